"""Standard output and error as a running node uses them: they may be closed, full, or of another encoding at any time."""

from __future__ import annotations

import logging
import os
import sys

from swarm_node.logs import PATIENCE_S, QUIET, takes_more

log = logging.getLogger(__name__)
SAID = QUIET.getChild("said")


def open_streams() -> None:
    """Make sure that there are three standard streams, and that printing any text is possible. A file that is opened while one of them is
    closed would get its number, and whatever a library prints there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  # as long-lived as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that knows no Greek prints a question mark
            stream.reconfigure(errors="replace")


class Terminal:
    """Says lines on standard output and keeps them in the log. When one cannot be printed, the rest goes to the log alone."""

    def __init__(self) -> None:
        open_streams()
        self.lost = False
        self._stalled = False

    def __call__(self, line: str) -> None:
        """Say a line at once, into a pipe too. Never raises because of where it goes."""
        SAID.info("%s", line)
        if self.lost or self._stands_still():
            return
        try:
            print(line, flush=True)
        except (OSError, ValueError) as error:  # a closed pipe, a full disk behind it; ValueError: the stream was closed, or is not ours
            self.lost = True
            log.warning("standard output is lost (%s): the node goes on and says the rest in its log", error)
            abandon_output()

    def _stands_still(self) -> bool:
        """Whether nobody reads; said once, and then every line looks whether somebody does again."""
        still = not takes_more(sys.stdout, 0.0 if self._stalled else PATIENCE_S)
        if still and not self._stalled:
            log.warning("nobody reads standard output: until somebody does, lines go to the log alone")
        self._stalled = still
        return still


def flush_output(probe: bool = False) -> OSError | None:
    """Write what standard output still holds; where it refuses, give that up and return why.

    Args:
        probe: write an empty line as well: where nothing is buffered, there may be nothing left to be refused.
    """
    try:
        print(end="\n" if probe else "", flush=True)
    except OSError as error:
        abandon_output()
        return error
    return None


def abandon_output() -> None:
    """Send what standard output still holds nowhere: the interpreter flushes it at its end, and would fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:  # there is no descriptor behind it
        log.debug("standard output cannot be replaced: %s", error)
