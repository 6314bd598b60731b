"""Where messages go: warnings to standard error, and everything of note to `node.log` in the home folder, in files of bounded size.

`SWARM_NODE_LOG` (debug, info, warning, error) sets what standard error gets, and the children's; `join --verbose` is the same as debug.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

FILE = "node.log"
MAX_BYTES = 4 * 1024 * 1024
OLDER_FILES = 2
PATIENCE_S = 1.0
"""How long a line waits for a reader that is slow, before it is left out."""
LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "SWARM_NODE_LOG"
OURS = logging.getLogger("swarm_node")
QUIET = logging.getLogger("swarm_node.quiet")
"""For the file alone, unless everything is shown: what a terminal has seen already, and tracebacks."""


class LogError(ValueError):
    """The level that was asked for does not exist."""


def takes_more(stream: TextIO, wait_s: float = PATIENCE_S) -> bool:
    """Whether a line can be printed without standing still, now or within `wait_s`: a pipe may be full, a terminal paused."""
    try:
        return bool(select.select((), (stream.fileno(),), (), wait_s)[1])
    except (OSError, ValueError):  # there is no descriptor behind it, or none that can be asked
        return True


class _Console(logging.Handler):
    """Standard error, whatever that is now; a message that it does not take is lost, and nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or on a full disk
            if takes_more(sys.stderr):
                print(self.format(record), file=sys.stderr, flush=True)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.level <= logging.DEBUG or not record.name.startswith(QUIET.name)


class _File(RotatingFileHandler):
    """A file that may be refused at any time; the first refusal is said."""

    refused = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.refused:
            self.refused = True
            OURS.warning("%s cannot be written (%s): messages are lost", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        """Closes the file; what it still holds and the disk refuses is lost."""
        with contextlib.suppress(OSError):
            super().close()


def log_to_console(level: str = "") -> None:
    """Show messages from `level` on, by default what `SWARM_NODE_LOG` says, else warnings, on standard error. Whatever ends a thread is a
    message too.

    Raises:
        LogError: there is no such level.
    """
    level = (level or os.environ.get(VARIABLE) or "warning").lower()
    if level not in LEVELS:
        raise LogError(f"{VARIABLE}={level}: choose {', '.join(LEVELS)}")
    os.environ[VARIABLE] = level  # child processes read it
    console = _Console(level.upper())
    _replace(_Console, console)
    OURS.setLevel(min(logging.INFO, console.level))
    threading.excepthook = _log_thread


def log_to_file(home: Path) -> Path:
    """Keep messages in the home folder too, from info on or from what the console shows. The file appears with the first of them."""
    path = Path(os.path.abspath(home / FILE))
    if log_file() != path:
        handler = _File(path, maxBytes=MAX_BYTES, backupCount=OLDER_FILES, encoding="utf-8", errors="backslashreplace", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _replace(_File, handler)
    return path


def log_file() -> Path | None:
    """The file that `log_to_file` was given last."""
    files = [Path(handler.baseFilename) for handler in logging.getLogger().handlers if isinstance(handler, _File)]
    return files[-1] if files else None


def _replace(kind: type[logging.Handler], handler: logging.Handler) -> None:
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, kind)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)


def _log_thread(error: threading.ExceptHookArgs) -> None:
    name = error.thread.name if error.thread else "?"
    OURS.error("the thread %s ended: %s: %s", name, error.exc_type.__name__, error.exc_value)
    if error.exc_value is not None:
        QUIET.error("the thread %s ended", name, exc_info=error.exc_value)
