"""Standard output as a running node uses it: it may be closed, full, or of another encoding at any time, and training goes on."""

from __future__ import annotations

import logging
import os
import sys

from swarm_node.logs import SAID

log = logging.getLogger(__name__)


class Terminal:
    """Prints lines and keeps them in the log. When a line cannot be printed, the rest goes to the log alone."""

    def __init__(self) -> None:
        self.lost = False

    def __call__(self, line: str) -> None:
        """Say a line at once, into a pipe too. Never raises because of where it goes."""
        SAID.info("%s", line)
        if self.lost:
            return
        try:
            print(line, flush=True)
        except UnicodeEncodeError:
            self._say_in_ascii(line)
        except (OSError, ValueError) as error:  # a closed pipe, a full disk behind it; ValueError: the stream itself was closed
            self._lose(error)

    def _say_in_ascii(self, line: str) -> None:
        try:
            print(line.encode("ascii", "replace").decode("ascii"), flush=True)
        except (OSError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self.lost = True
        log.warning("standard output is lost (%s): the node goes on and says the rest in its log", error)
        abandon_output()


def abandon_output() -> None:
    """Send what standard output still holds nowhere: the interpreter flushes it at its end, and would fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError, AttributeError) as error:  # there is no descriptor behind it
        log.debug("standard output cannot be replaced: %s", error)
