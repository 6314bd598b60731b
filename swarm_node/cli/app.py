"""`swarm-node`: the commands, each in a file of its own, and what becomes of their errors.

Exit codes: 0 done, 1 a check that failed or steps that could not be saved, 2 bad input (with one paragraph that says what to do), 70 an
internal error (what to send us; the traceback is in the log), 130 interrupted.

This module and the commands' modules import nothing slow, so that `--help` answers at once.
"""

from __future__ import annotations

import platform
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated

import typer

from swarm_node import __version__
from swarm_node.cli import bench, calibrate, config, eval, identity, join, model, report, reproduce, simulate, status

OURS = ("swarm_node", "swarm_protocols", "swarm_kernels")
EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 70

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
    from swarm_node.logs import log_to_console

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that knows no Greek prints a question mark
            stream.reconfigure(errors="replace")
    try:
        log_to_console()
        app()
    except Exception as error:  # noqa: BLE001  # the last handler: nobody is shown a traceback
        bad_input = is_bad_input(error)
        _complain(f"swarm-node: {error}" if bad_input else internal_error(error))
        sys.exit(EXIT_BAD_INPUT if bad_input else EXIT_INTERNAL)


def is_bad_input(error: BaseException) -> bool:
    """Whether an error is the user's to mend: the rooms raise a ValueError of their own for those, and its message says how."""
    return isinstance(error, ValueError) and type(error).__module__.partition(".")[0] in OURS


def internal_error(error: Exception) -> str:
    """What the user is told of an error that nobody foresaw; the traceback goes to the node's log, or to a file of its own."""
    from swarm_node.logs import log_file

    path = log_file() or Path(tempfile.gettempdir()) / "swarm-node-error.log"
    trace = "".join(traceback.format_exception(error))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(trace)
        where = f"{path} (its end is the traceback)"
    except OSError:  # a disk that is full may be the very reason
        where = f"nowhere, it could not be written:\n{trace}"
    summary = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return (
        f"swarm-node: internal error: {summary}\n"
        "This is a fault of swarm-node, not of yours. What is in the home folder is safe; the same command may be given again.\n"
        "Please report it, with these four things:\n"
        f"  version   {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"  command   {shlex.join(['swarm-node', *sys.argv[1:]])}\n"
        f"  error     {summary}\n"
        f"  log       {where}"
    )


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody is there to read it
        sys.stderr = None


if __name__ == "__main__":
    main()
