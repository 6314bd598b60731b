"""`status.json` in the home folder: what the node does now, for `swarm-node status` and health checks.

A file and not a socket: it answers while the main thread is deep in a matrix product, it needs no protocol, and it still says what the
node did last after the node has died. The home's lock tells whether anybody is alive.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE = "status.json"


class StatusError(ValueError):
    """The status cannot be read; the message says why."""


class StatusFile:
    """Rewrites the file every `interval` seconds from a thread of its own, and once more when it is closed."""

    def __init__(self, home: Path, describe: Callable[[], Mapping[str, Any]], interval: float = 1.0) -> None:
        """`describe` is called from the thread and returns what the file shall hold, as JSON."""
        self._path = home / FILE
        self._describe = describe
        self._interval = interval
        self._refused = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and write the last status; waits for the thread."""
        self._closing.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._write()
            self._closing.wait(self._interval)

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self._describe(), indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, self._path)
        except Exception as error:  # noqa: BLE001  # a full disk, a fault of ours: the next second may be better, and training goes on
            log.log(logging.DEBUG if self._refused else logging.WARNING, "%s cannot be written: %r", self._path, error)
            self._refused = True


def read_status(home: Path) -> dict[str, Any] | None:
    """What the file says, or None where no node has run.

    Raises:
        StatusError: it cannot be read, or holds something else.
    """
    path = home / FILE
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StatusError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON
        status = None
    if not isinstance(status, dict):
        raise StatusError(f"{path} is damaged: a running node writes it anew within a second; otherwise start the node, or remove the file")
    return status
