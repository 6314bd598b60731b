"""`swarm-node`: the commands, each in a file of its own, and what becomes of their errors.

Exit codes: 0 done, 1 a check that failed, steps that could not be saved or output that could not be written, 2 bad input (with one
paragraph that says what to do), 70 an internal error (what to send us; the traceback is in the log), 130 interrupted.

This module and the commands' modules import nothing slow, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm_node import __version__
from swarm_node.cli import bench, calibrate, config, eval, identity, join, model, report, reproduce, simulate, status

OURS = ("swarm_node", "swarm_protocols", "swarm_kernels")
EXIT_FAILED = 1
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
    from swarm_node.terminal import flush_output, open_streams

    open_streams()
    code: Any = 0
    failure: Exception | None = None
    try:
        log_to_console()
        app()
    except SystemExit as leaving:
        code = leaving.code
    except Exception as error:  # noqa: BLE001  # the last handler: nobody is shown a traceback
        failure = error
    refused = flush_output(probe=isinstance(failure, OSError))
    if refused is not None and (failure is None or (isinstance(failure, OSError) and failure.errno == refused.errno)):
        code = code or EXIT_FAILED
        if refused.errno != errno.EPIPE:  # who closed a pipe knows
            _complain(f"swarm-node: standard output cannot be written: {refused.strerror}")
    elif failure is not None and is_bad_input(failure):
        code = EXIT_BAD_INPUT
        _complain(f"swarm-node: {failure}")
    elif failure is not None:
        code = EXIT_INTERNAL
        _complain(internal_error(failure))
    sys.exit(code)


def is_bad_input(error: BaseException) -> bool:
    """Whether an error is the user's to mend: the rooms raise a ValueError of their own for those, and its message says how."""
    return isinstance(error, ValueError) and type(error).__module__.partition(".")[0] in OURS


def internal_error(error: Exception) -> str:
    """What the user is told of an error that nobody foresaw; the traceback goes to the node's log, or to a file of its own."""
    summary = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    facts = {
        "version": f"{__version__}, Python {platform.python_version()}, {platform.platform()}",
        "command": shlex.join(["swarm-node", *sys.argv[1:]]),
        "error": f"{summary} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})",
        "state": "; ".join(getattr(error, "__notes__", ())),  # what those who knew more have noted on the way
        "log": _keep_trace(error),
    }
    return (
        f"swarm-node: internal error: {summary}\n"
        "This is a fault of swarm-node, not of yours. What is in the home folder is safe; the same command may be given again.\n"
        "Please report it with what follows, and the log:\n"
    ) + "\n".join(f"  {name:9} {text}" for name, text in facts.items() if text)


def _keep_trace(error: Exception) -> str:
    """Where the traceback is now: at the end of the node's log, or in a file of its own where there is no such log or no room for it."""
    from swarm_node.logs import log_file

    trace = "".join(traceback.format_exception(error))
    for path in filter(None, (log_file(), Path(tempfile.gettempdir()) / f"swarm-node-error-{os.getpid()}-{time.time_ns()}.log")):
        try:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(trace)
            return f"{path}, which ends with the traceback"
        except OSError:  # a disk that is full may be the very reason
            continue
    return "nowhere: it cannot be written"


def _complain(text: str) -> None:
    """Print on standard error, if anybody is there to read it."""
    from swarm_node.logs import takes_more

    with contextlib.suppress(OSError, ValueError):
        if takes_more(sys.stderr):
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
