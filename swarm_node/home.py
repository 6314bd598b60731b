"""The home folder of a node: where its identity, metrics and checkpoints are, and the lock that keeps a second process out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

LOCK = "lock"
PAUSES_S = (0.0, 0.02, 0.05)
"""Pauses before the attempts to take the lock: `holder` has it for an instant when it looks whether it is free."""


class HomeError(ValueError):
    """The home folder cannot be used."""


class HomeInUse(HomeError):
    """Another process holds the home folder; the message names its pid."""


def default_home(swarm: str) -> Path:
    """`~/.swarm-node/<swarm>`; it never depends on the working directory."""
    return Path.home() / ".swarm-node" / swarm


class Home:
    """An opened home folder: held by this process until `close`, or until the process dies in whatever way.

    The lock is `flock` on the file `lock`, which the kernel drops with the process, so a killed node leaves nothing to clean up.
    The pid inside the file only serves the message that another process gets.
    """

    def __init__(self, path: Path, lock: int, created: tuple[Path, ...]) -> None:
        """Use `Home.open`."""
        self.path = path
        self._lock: int | None = lock
        self._created = created

    @classmethod
    def open(cls, path: Path) -> Home:
        """Take the folder at `path`, creating it (mode 0700) where it is missing.

        Raises:
            HomeInUse: another process holds it. Nothing was written.
            HomeError: it cannot be created or written to.
        """
        path = path.expanduser().absolute()
        created: tuple[Path, ...] = ()
        try:
            created = _make_folders(path)
            lock = _take(path)
        except BlockingIOError:
            raise HomeInUse(_in_use(path)) from None
        except OSError as error:
            _remove_unused(path, created)
            raise HomeError(f"the home folder {path} cannot be used: {error.strerror}; choose another with --home") from error
        return cls(path, lock, created)

    @property
    def config(self) -> Path:
        """The TOML file with what differed from the defaults at the first start."""
        return self.path / "config.toml"

    @property
    def identity(self) -> Path:
        """The file with the Ed25519 seed."""
        return self.path / "identity.key"

    @property
    def metrics(self) -> Path:
        """The rows of `observe.metrics`, one a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, one folder a kept step."""
        return self.path / "checkpoints"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the disk refuses inside the block into a HomeError."""
        try:
            yield
        except OSError as error:
            raise HomeError(
                f"{error.filename or self.path} cannot be written: {error.strerror}; choose another home with --home"
            ) from error

    def close(self) -> None:
        """Let go of the folder; idempotent. Folders that `open` created and nobody put anything in disappear again."""
        if self._lock is None:
            return
        _remove_unused(self.path, self._created)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Home:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def holder(path: Path) -> int | None:
    """The pid of the process that holds the home folder at `path`, 0 if it did not say, or None where nobody does.

    Raises:
        HomeError: the folder refuses to say.
    """
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise HomeError(f"the home folder {path} cannot be used: {error.strerror}; choose another with --home") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_pid(path)
    finally:
        os.close(lock)


def _make_folders(path: Path) -> tuple[Path, ...]:
    """Create `path` with its parents; those that were missing, outermost first."""
    missing: list[Path] = []
    folder = path
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tuple(reversed(missing))


def _remove_unused(path: Path, created: tuple[Path, ...]) -> None:
    """Remove the folders that were created for a home in which there is nothing but the lock."""
    with contextlib.suppress(OSError):  # a folder that is not empty stays, and so do those around it; nor does it matter if one is gone
        if created and os.listdir(path) == [LOCK]:
            (path / LOCK).unlink()
            for folder in reversed(created):
                folder.rmdir()


def _take(path: Path) -> int:
    """An open descriptor of the folder's lock file, locked and signed by this process. Raises BlockingIOError when another holds it."""
    refused = BlockingIOError()
    for pause in PAUSES_S:
        time.sleep(pause)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file between the two calls: then this is a lock on nothing.
            if (path / LOCK).exists() and os.path.samestat(os.fstat(lock), (path / LOCK).stat()):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            refused = error
    raise refused


def _read_pid(path: Path) -> int:
    """The pid in the lock file, 0 where there is none."""
    try:
        text = (path / LOCK).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return 0
    return int(text) if re.fullmatch(r"\d{1,10}", text) else 0


def _in_use(path: Path) -> str:
    pid = _read_pid(path)
    who = f"process {pid}" if pid else "another process"
    return f"the home folder {path} is in use by {who}; stop that node, or start this one with another --home"
