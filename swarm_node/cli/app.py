"""`swarm-node`: the commands, each in a file of its own, and what becomes of their errors.

Exit codes: 0 done, 1 an unexpected error (with its traceback) or a check that failed, 2 bad input (with one paragraph that says what to
do), 130 interrupted. This module and the commands' modules import nothing slow, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swarm_node import __version__
from swarm_node.cli import bench, calibrate, config, eval, identity, join, model, report, reproduce, simulate, status

OURS = ("swarm_node", "swarm_protocols", "swarm_kernels")
EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="swarm-node",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"swarm-node {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: swarm-node join --model tiny-s")
def _swarm_node(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train your own model with everyone's verified rollouts, peer to peer."""


app.command(epilog=join.EXAMPLE)(join.join)
app.command(epilog=simulate.EXAMPLE)(simulate.simulate)
app.command(epilog=status.EXAMPLE)(status.status)
app.command(name="eval", epilog=eval.EXAMPLE)(eval.evaluate)
app.command(epilog=report.EXAMPLE)(report.report)
app.command(epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(bench.app, name="bench")
app.add_typer(model.app, name="model")
app.add_typer(config.app, name="config")
app.add_typer(identity.app, name="identity")


def main() -> None:
    """The console script."""
    try:
        app()
    except ValueError as error:
        if not is_bad_input(error):
            raise
        print(f"swarm-node: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def is_bad_input(error: BaseException) -> bool:
    """Whether an error is the user's to mend: the rooms raise a ValueError of their own for those, and its message says how."""
    return isinstance(error, ValueError) and type(error).__module__.partition(".")[0] in OURS


if __name__ == "__main__":
    main()
