"""Checkpoints that are whole or not there: written to a temporary folder, flushed, renamed; checked against their manifest when read.

A checkpoint is a folder `step-00001200` with `weights.safetensors`, `optimiser.safetensors`, `state.json`, `bodies.bin` (each body after
its length as a little-endian unsigned 64-bit integer) and `manifest.json`, which names every file's size and SHA-256.
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
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("weights.safetensors", "optimiser.safetensors", "state.json", "bodies.bin")
_WRITING, _ASIDE, _REMOVING = ".writing-", ".aside-", ".removing-"
_LENGTH = struct.Struct("<Q")
_SLACK = 1 << 20
"""Bytes asked for beyond the contents: headers, manifest, folder entries."""


class DiskFull(ValueError):
    """There is no room for a checkpoint. Nothing was written."""

    def __init__(self, need: int, free: int, folder: Path) -> None:
        super().__init__(
            f"a checkpoint needs {need / 1e6:.1f} MB in {folder} and {free / 1e6:.1f} MB are free. "
            "Make room there, or choose another home with --home."
        )
        self.need = need
        self.free = free
        self.folder = folder


class _Damaged(Exception):
    """A checkpoint folder does not hold what its manifest says."""


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
    """Whether `need` bytes fit on the disk of `folder`, which need not exist yet.

    Raises:
        DiskFull: they do not.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < need:
        raise DiskFull(need, free, folder)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint below `folder` and remove all but the newest `keep` (at least 1). A checkpoint of the same step is replaced.

    Killed at any moment, it leaves the earlier checkpoints complete; a second process must not save to the same folder.

    Raises:
        DiskFull: there is no room; nothing was written.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
    check_room(folder, checkpoint.size + _SLACK)
    folder.mkdir(parents=True, exist_ok=True)
    _clean(folder)
    name = f"step-{checkpoint.step:08d}"
    temporary = folder / f"{_WRITING}{name}"
    temporary.mkdir()
    try:
        _write(temporary, checkpoint)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # Another program took the room meanwhile. safetensors gives the operating system's error as text alone.
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            raise DiskFull(checkpoint.size + _SLACK, shutil.disk_usage(folder).free, folder) from error
        raise
    final = folder / name
    if final.exists():  # a folder cannot be renamed onto a full one; `_clean` puts it back if the next line is never reached
        final.rename(folder / f"{_ASIDE}{name}")
    temporary.rename(final)
    _flush(folder)
    _clean(folder)
    for old in _newest_first(folder)[keep:]:
        _remove(old)
    return final


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is what its manifest says, or None. For the process that saves to `folder`: leftovers are removed."""
    if folder.is_dir():
        _clean(folder)
    return read_latest(folder)


def read_latest(folder: Path) -> Checkpoint | None:
    """As `load_latest`, but nothing in the folder is touched: for those who look at another process's checkpoints.

    Damaged checkpoints are passed over with a warning.
    """
    for path in _newest_first(folder) if folder.is_dir() else ():
        try:
            return _read(path)
        except (_Damaged, OSError) as error:
            _LOG.warning("checkpoint %s is damaged (%s); trying the one before", path, error)
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
    """Raises _Damaged, or OSError where the disk does."""
    _verify(folder)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["format"] != _FORMAT:
        raise _Damaged(f"its format is {state['format']}, and this version reads {_FORMAT}")
    return Checkpoint(
        step=state["step"],
        weights=load_file(folder / "weights.safetensors"),
        optimiser=load_file(folder / "optimiser.safetensors"),
        state=state["state"],
        bodies=_split((folder / "bodies.bin").read_bytes()),
    )


def _verify(folder: Path) -> None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        expected = {name: (manifest[name]["bytes"], manifest[name]["sha256"]) for name in _FILES}
        for name, (size, digest) in expected.items():
            path = folder / name
            if path.stat().st_size != size:
                raise _Damaged(f"{name} has {path.stat().st_size} bytes, its manifest says {size}")
            if _sha256(path) != digest:
                raise _Damaged(f"{name} does not have the SHA-256 of its manifest")
    except FileNotFoundError as error:
        raise _Damaged(f"{Path(error.filename).name} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
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
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def _clean(folder: Path) -> None:
    """Remove what a killed process left, and put back a checkpoint that had stepped aside for one that never came."""
    for path in list(folder.iterdir()):
        if path.name.startswith(_ASIDE):
            original = folder / path.name.removeprefix(_ASIDE)
            if original.exists():
                shutil.rmtree(path)
            else:
                path.rename(original)
        elif path.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Take the name away first, so that a half-removed folder is never mistaken for a checkpoint."""
    leaving = path.with_name(f"{_REMOVING}{path.name}")
    path.rename(leaving)
    shutil.rmtree(leaving)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
