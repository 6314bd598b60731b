"""Where messages go: warnings to standard error, and everything of note to `node.log` in the home folder, in files of bounded size.

`SWARM_NODE_LOG` (debug, info, warning, error) sets what standard error gets; `join --verbose` is the same as debug, for both.
"""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILE = "node.log"
MAX_BYTES = 4 * 1024 * 1024
OLDER_FILES = 2
LEVELS = ("debug", "info", "warning", "error")
VARIABLE = "SWARM_NODE_LOG"
OURS = logging.getLogger("swarm_node")
SAID = logging.getLogger("swarm_node.said")
"""What a node says on standard output; repeated in the file, and not on standard error."""


class LogError(ValueError):
    """The level that was asked for does not exist."""


def log_to_console(level: str | None = None) -> None:
    """Show messages from `level` on, by default what `SWARM_NODE_LOG` says, else warnings, on standard error.

    Raises:
        LogError: there is no such level.
    """
    level = level or os.environ.get(VARIABLE) or "warning"
    if level.lower() not in LEVELS:
        raise LogError(f"{VARIABLE}={level}: choose {', '.join(LEVELS)}")
    logging.raiseExceptions = False  # a full disk or a closed terminal costs the message and nothing else
    console = logging.StreamHandler()
    console.setLevel(level.upper())
    console.addFilter(lambda record: record.name != SAID.name)
    console.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger().handlers = [console]
    OURS.setLevel(min(logging.INFO, console.level))


def log_to_file(home: Path) -> Path | None:
    """Keep messages in the home folder too, from info on or from what the console shows; None where that cannot be."""
    path = home / FILE
    try:
        handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=OLDER_FILES, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        OURS.warning("%s cannot be written (%s): messages are only shown", path, error.strerror)
        return None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    return path


def log_file() -> Path | None:
    """The file that `log_to_file` opened last, in this process."""
    files = [Path(handler.baseFilename) for handler in logging.getLogger().handlers if isinstance(handler, RotatingFileHandler)]
    return files[-1] if files else None
