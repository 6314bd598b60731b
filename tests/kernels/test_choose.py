"""The backend is probed, says why it was chosen, and falls back with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from swarm_kernels import choose
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels
from swarm_kernels.native.build import BuildError, build, cache_folder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _forget_choices() -> Iterator[None]:
    choose.choose_backend.cache_clear()
    yield
    choose.choose_backend.cache_clear()


def test_the_cpu_runs_compiled_kernels_and_says_so() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = choose.choose_backend(CPU)
    assert chosen.name == "native"
    assert "probed on this processor" in chosen.reason


def test_without_a_compiler_torch_takes_over_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler: looked for no-such-compiler; install g\\+\\+ or set CXX"):
        chosen = choose.choose_backend(CPU)
    assert chosen.name == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose.choose_backend(CPU) is chosen


def test_a_compiler_that_fails_is_named_with_its_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\necho unknown target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="broken-cxx failed: unknown target"):
        build()


def test_a_cache_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        build()


def test_the_library_is_built_once_into_the_cache_folder() -> None:
    first = build()
    stamp = first.stat().st_mtime_ns
    assert first.parent == cache_folder()
    assert build() == first
    assert first.stat().st_mtime_ns == stamp


def test_kernels_that_compute_nonsense_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nonsense(NativeKernels):
        def decode_layer(self, *args: object, **kwargs: object) -> torch.Tensor:
            return super().decode_layer(*args, **kwargs) + 1  # type: ignore[arg-type]

    monkeypatch.setattr(choose, "_load_native", Nonsense)
    with pytest.warns(RuntimeWarning, match="the probe is off by 1"):
        assert choose.choose_backend(CPU).name == "torch"


def test_the_portable_kernels_pass_the_probe() -> None:
    choose.probe(TorchKernels(), CPU)


def test_a_device_without_kernels_gets_torch_operations() -> None:
    chosen = choose.choose_backend(torch.device("meta"))
    assert chosen.name == "torch"
    assert "meta" in chosen.reason
