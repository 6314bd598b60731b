"""Compiles the CPU kernels on first use, for the processor at hand, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = (
    "kernels.cpp",
    "append.h",
    "attention.h",
    "decode.h",
    "draw.h",
    "elementwise.h",
    "linear.h",
    "logprob.h",
    "low_rank.h",
    "matrix.h",
    "panel.h",
    "prompt.h",
    "selection.h",
    "stack.h",
    "vectors.h",
)
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-w", "-fPIC", "-shared")
TIMEOUT_SECONDS = 900


class BuildError(RuntimeError):
    """The CPU kernels could not be compiled; the message says why."""


def build(march: str = "native") -> Path:
    """The compiled library; compiles it unless this source, compiler and processor have one already. Raises BuildError.

    march: the compiler's name of the processor to compile for.
    """
    compiler = find_compiler()
    folder = Path(__file__).parent
    command = [compiler, *FLAGS, f"-march={march}", str(folder / "kernels.cpp"), *openmp_libraries(), "-Wl,--as-needed", "-fopenmp"]
    target = cache_folder() / f"kernels-{_key(folder, command)}.so"
    if not target.exists():
        _compile(command, target)
    return target


def find_compiler() -> str:
    """`$CXX`, else the first C++ compiler on the path."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler: looked for {', '.join(wanted)}; install g++ or set CXX")


def openmp_libraries() -> list[str]:
    """torch's own copy of the OpenMP runtime: with another, two pools of threads would spin against each other on the same cores."""
    root = Path(torch.__file__).parent
    return [str(path) for folder in (root / "lib", root.parent / "torch.libs") for path in sorted(folder.glob("libgomp*.so*"))][:1]


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarm-node" / "kernels"


def _key(folder: Path, command: list[str]) -> str:
    compiler = Path(command[0]).stat()
    parts = [" ".join(command), f"{compiler.st_size} {compiler.st_mtime_ns}", _processor()]
    parts += [(folder / name).read_text() for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by machines with different processors."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(("model", "flags", "Features"))}))


def _compile(command: list[str], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
            if done.returncode != 0:
                raise BuildError(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}")
            built.rename(target)  # another process may have built the same file meanwhile: either one will do
    except OSError as error:
        raise BuildError(f"cannot write {target.parent} ({error.strerror}); set XDG_CACHE_HOME to a folder that can be written") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not finish in {TIMEOUT_SECONDS} s") from error
