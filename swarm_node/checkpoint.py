"""Checkpoints that are whole or not there: written to a temporary folder, flushed, renamed; checked against their manifest when read.

A checkpoint is a folder `step-00001200` with `weights.safetensors`, `optimiser.safetensors`, `state.json`, `bodies.bin` (each body after
its length as a little-endian unsigned 64-bit integer) and `manifest.json`, which names every file's size and SHA-256.

A damaged checkpoint takes no place of a sound one. The process that saves to the folder renames it to `damaged-step-00001200` when it finds
it, and keeps the newest of those for whoever wants to look. What else lies in the folder is left alone: so is a checkpoint of another
version's format, and one that the disk does not give now.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("weights.safetensors", "optimiser.safetensors", "state.json", "bodies.bin")
_WRITING, _ASIDE, _REMOVING, _DAMAGED = ".writing-", ".aside-", ".removing-", "damaged-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, none left of the user's quota, a file larger than is allowed: the same to a node."""
_OS_ERROR = re.compile(r"os error (\d+)")
"""How safetensors gives the operating system's error: as text alone."""
_LENGTH = struct.Struct("<Q")
_SLACK = 1 << 20
"""Bytes asked for beyond the contents: headers, manifest, folder entries."""


class CheckpointError(ValueError):
    """Checkpoints cannot be kept there; the message says why and what to do."""


class DiskFull(CheckpointError):
    """There is no room for a checkpoint. Nothing was written."""

    def __init__(self, need: int, free: int, folder: Path, reason: str = "") -> None:
        """`reason` is the operating system's, where it refused though there seemed to be room."""
        refused = f" ({reason})" if reason else ""
        super().__init__(
            f"a checkpoint needs {need / 1e6:.1f} MB in {folder} and {free / 1e6:.1f} MB are free{refused}. "
            "Make room there, or choose another home with --home."
        )
        self.need = need
        self.free = free
        self.folder = folder


class _Damaged(Exception):
    """A checkpoint folder does not hold what its manifest says."""


class _OtherFormat(Exception):
    """A checkpoint is another version's."""


@dataclass
class Checkpoint:
    """Everything that a node needs to go on as if it had never stopped."""

    step: int
    """Optimiser steps taken."""
    weights: dict[str, Tensor]
    """Trainable parameters by name."""
    optimiser: dict[str, Tensor]
    """The optimiser's tensors by name."""
    state: dict[str, JsonValue]
    """Everything else: random states, task cursor, controller, counters. Floats survive to the bit."""
    bodies: list[bytes] = field(default_factory=list)
    """Encoded groups of the pool, in order."""

    @property
    def size(self) -> int:
        """Bytes of the contents, about."""
        tensors = sum(tensor.numel() * tensor.element_size() for part in (self.weights, self.optimiser) for tensor in part.values())
        return tensors + sum(_LENGTH.size + len(body) for body in self.bodies) + len(json.dumps(self.state))


def check_room(folder: Path, need: int) -> None:
    """Whether `need` bytes fit on the disk of `folder`, which need not exist yet; what `save_checkpoint` would remove for them counts.

    Raises:
        DiskFull: they do not.
        CheckpointError: something else than a folder is there, or one that this user cannot write to.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise CheckpointError(f"{existing} is not a folder: move it away, or choose another home with --home")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(f"{existing} cannot be written to by this user: change its mode, or choose another home with --home")
    free = shutil.disk_usage(existing).free
    if free + sum(map(_bytes, _removable(folder))) < need:
        raise DiskFull(need, free, folder)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint below `folder` and remove all but it and the newest sound ones, `keep` (at least 1) in all. A checkpoint of the
    same step is replaced. Where room is short the oldest go before, but never the newest sound one.

    Killed at any moment, it leaves the earlier checkpoints complete; a second process must not save to the same folder.

    Raises:
        DiskFull: there is no room; nothing was written.
        CheckpointError: the folder cannot be used; nothing was written.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
    need = checkpoint.size + _SLACK
    check_room(folder, need)
    final = folder / f"step-{checkpoint.step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        while shutil.disk_usage(folder).free < need and _make_room(folder):
            pass
        temporary = folder / f"{_WRITING}{final.name}"
        while (reason := _try_to_write(temporary, checkpoint)) is not None:
            # A quota, or another program that took the room meanwhile. Nothing that is removed makes a larger file allowed.
            if reason == errno.EFBIG or not _make_room(folder):
                raise DiskFull(need, shutil.disk_usage(folder).free, folder, os.strerror(reason))
        if final.is_dir():  # a folder cannot be renamed onto a full one; `_clean` puts it back if the next line is never reached
            final.rename(folder / f"{_ASIDE}{final.name}")
        elif os.path.lexists(final):
            _LOG.warning("%s is no checkpoint and in the way of one: it is %s now", final, final.rename(f"{final}.moved").name)
        temporary.rename(final)
        _flush(folder)
        _clean(folder)
        others = [path for path in _sound_and_damaged(folder)[0] if path != final]
        newest_is_another = bool(others) and _step(others[0]) > checkpoint.step
        for old in others[max(keep - 1, newest_is_another) :]:
            _remove(old)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint of step {checkpoint.step} cannot be written to {folder}: {error}") from error
    return final


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is what its manifest says, or None. For the process that saves to `folder`: leftovers are removed, damaged
    checkpoints set aside, and what does not belong there is named.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    if not folder.is_dir():
        return None
    try:
        _clean(folder)
        strays = [path.name for path in folder.iterdir() if not (path.is_dir() and _NAME.fullmatch(path.name.removeprefix(_DAMAGED)))]
        if strays:
            _LOG.warning("%s holds what is no checkpoint and is left alone: %s", folder, ", ".join(sorted(strays)))
        found = _first_sound(folder, _set_aside)
        for old in _damaged(folder)[:-1]:
            _LOG.warning("%s is removed: only the newest damaged checkpoint is kept", old)
            _discard(old)
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be used: {error}; repair that, or choose another home") from error
    return found


def read_latest(folder: Path) -> Checkpoint | None:
    """As `load_latest`, but nothing in the folder is touched: for those who look at another process's checkpoints.

    Damaged checkpoints are passed over with a warning.
    """
    return _first_sound(folder, lambda path: path) if folder.is_dir() else None


def _first_sound(folder: Path, damaged: Callable[[Path], Path]) -> Checkpoint | None:
    """The newest checkpoint that can be read; `damaged` is called with the others on the way and says where they are then."""
    for path in _newest_first(folder):
        try:
            return _read(path)
        except _Damaged as error:
            _LOG.warning("checkpoint %s is damaged (%s); trying the one before. It is in %s", path, error, damaged(path))
        except (_OtherFormat, OSError) as error:
            _LOG.warning("checkpoint %s cannot be read (%s) and is left alone; trying the one before", path, error)
    return None


def _try_to_write(folder: Path, checkpoint: Checkpoint) -> int | None:
    """Write into a new folder. Returns None, or the number of the operating system's error where there is no room: nothing is left then.

    Raises:
        OSError, SafetensorError: another error.
    """
    folder.mkdir()
    try:
        _write(folder, checkpoint)
    except (OSError, SafetensorError) as error:
        _discard(folder)
        given = _OS_ERROR.search(str(error))
        number = int(given[1]) if given else getattr(error, "errno", None)
        if number not in _FULL:
            raise
        return number
    return None


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.weights.items()}, folder / "weights.safetensors")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.optimiser.items()}, folder / "optimiser.safetensors")
    state = {"format": _FORMAT, "step": checkpoint.step, "state": checkpoint.state}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with (folder / "bodies.bin").open("wb") as file:
        for body in checkpoint.bodies:
            file.write(_LENGTH.pack(len(body)))
            file.write(body)
    files = [folder / name for name in _FILES]
    manifest = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, folder / "manifest.json", folder):
        _flush(path)


def _read(folder: Path) -> Checkpoint:
    """Raises _Damaged, _OtherFormat, or OSError where the disk does."""
    _verify(folder)
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(
            step=state["step"],
            weights=load_file(folder / "weights.safetensors"),
            optimiser=load_file(folder / "optimiser.safetensors"),
            state=state["state"],
            bodies=_split((folder / "bodies.bin").read_bytes()),
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        struct.error,
        SafetensorError,
    ) as error:  # as its manifest says, and no checkpoint all the same
        raise _Damaged(f"its contents cannot be read: {error!r}") from error


def _verify(folder: Path) -> None:
    """Raises _Damaged where a file is not what the manifest says, and whatever `_verify_sizes` raises."""
    _verify_sizes(folder)
    for name, entry in _manifest(folder).items():
        if _sha256(folder / name) != entry["sha256"]:
            raise _Damaged(f"{name} does not have the SHA-256 of its manifest")


def _verify_sizes(folder: Path) -> None:
    """The part of `_verify` that costs nothing; what a kill or a full disk leaves behind fails it.

    Raises:
        _Damaged, _OtherFormat, OSError: as `_read`.
    """
    _verify_format(folder)
    for name, entry in _manifest(folder).items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise _Damaged(f"{name} is missing") from None
        if size != entry["bytes"]:
            raise _Damaged(f"{name} has {size} bytes, its manifest says {entry['bytes']}")


def _verify_format(folder: Path) -> None:
    """Raises _OtherFormat. A state that cannot be read is nobody's format: whether it is damaged is for the manifest to say."""
    try:
        found = json.loads((folder / "state.json").read_text(encoding="utf-8"))["format"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return
    if found != _FORMAT:
        raise _OtherFormat(f"its format is {found}, and this version reads {_FORMAT}")


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """What each file of a checkpoint should be."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return {name: {"bytes": manifest[name]["bytes"], "sha256": manifest[name]["sha256"]} for name in _FILES}
    except FileNotFoundError:
        raise _Damaged("manifest.json is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Damaged("its manifest is not readable") from error


def _split(packed: bytes) -> list[bytes]:
    bodies, start = [], 0
    while start < len(packed):
        (length,) = _LENGTH.unpack_from(packed, start)
        start += _LENGTH.size
        bodies.append(packed[start : start + length])
        start += length
    return bodies


def _newest_first(folder: Path) -> list[Path]:
    """Checkpoint folders under their final names; damaged ones among them."""
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_step, reverse=True)


def _step(path: Path) -> int:
    """The step in a name that this module gives."""
    return int(path.name.rpartition("-")[2])


def _removable(folder: Path) -> list[Path]:
    """What may go when room is short, the first to go first: damaged checkpoints, then sound ones from the oldest, all but the newest."""
    if not folder.is_dir():
        return []
    sound, damaged = _sound_and_damaged(folder)
    return _damaged(folder) + damaged + sound[:0:-1]


def _sound_and_damaged(folder: Path) -> tuple[list[Path], list[Path]]:
    """Checkpoint folders, newest first, as far as sizes tell; what cannot be read now is neither."""
    sound, damaged = [], []
    for path in _newest_first(folder):
        try:
            _verify_sizes(path)
            sound.append(path)
        except _Damaged:
            damaged.append(path)
        except (_OtherFormat, OSError) as error:
            _LOG.debug("%s is left alone: %s", path, error)
    return sound, damaged


def _make_room(folder: Path) -> bool:
    """Remove what may go first, and say so; False where nothing may."""
    old = next(iter(_removable(folder)), None)
    if old is not None:
        _LOG.warning("%s is removed to make room for a newer checkpoint", old)
        _remove(old)
    return old is not None


def _set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is in nobody's way."""
    aside = path.with_name(f"{_DAMAGED}{path.name}")
    if os.path.lexists(aside):
        _discard(aside)
    path.rename(aside)
    return aside


def _damaged(folder: Path) -> list[Path]:
    """Those that were set aside, the oldest first."""
    found = [path for path in folder.iterdir() if _is_ours(path, _DAMAGED)]
    return sorted(found, key=_step)


def _is_ours(path: Path, prefix: str) -> bool:
    """Whether a name is one that this module gives."""
    return path.name.startswith(prefix) and _NAME.fullmatch(path.name.removeprefix(prefix)) is not None


def _clean(folder: Path) -> None:
    """Remove what a killed process left, and put back a checkpoint that had stepped aside for one that never came."""
    for path in list(folder.iterdir()):
        if _is_ours(path, _ASIDE):
            original = folder / path.name.removeprefix(_ASIDE)
            if original.exists():
                _discard(path)
            else:
                path.rename(original)
        elif _is_ours(path, _WRITING) or _is_ours(path, _REMOVING):
            _discard(path)


def _remove(path: Path) -> None:
    """Take the name away first, so that a half-removed folder is never mistaken for a checkpoint."""
    leaving = path.with_name(f"{_REMOVING}{path.name.removeprefix(_DAMAGED)}")
    path.rename(leaving)
    _discard(leaving)


def _discard(path: Path) -> None:
    """Remove a folder with all that is in it, or whatever else has that name; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _bytes(path: Path) -> int:
    """What removing a folder frees."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
