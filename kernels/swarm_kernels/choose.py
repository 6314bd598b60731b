"""Which kernels a device runs: each candidate is tried on a tiny problem, and the first whose result is right is taken."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

from swarm_kernels.interface import DecodeStep, Kernels, Selection
from swarm_kernels.layout import PageLayout, allocate
from swarm_kernels.naive import attention as naive
from swarm_kernels.naive.backend import TorchKernels

TOLERANCE = 2e-2
"""Of the probe, in bf16: a kernel that is wrong misses by far more."""


@dataclass(frozen=True)
class Backend:
    """Kernels and why they were chosen."""

    kernels: Kernels
    reason: str
    """One sentence for the user."""

    @property
    def name(self) -> str:
        """That of the kernels: `native`, `triton` or `torch`."""
        return self.kernels.name


class ProbeError(RuntimeError):
    """A backend ran and gave a wrong result."""


@functools.cache
def choose_backend(device: torch.device) -> Backend:
    """The fastest kernels that work on `device`. Falls back to torch operations with one warning that names the cause."""
    name, load = ("native", _load_native) if device.type == "cpu" else ("triton", _load_triton)
    if device.type not in ("cpu", "cuda"):
        return Backend(TorchKernels(), f"kernels: torch operations, because {device.type} has no kernels of its own here")
    failure = ""
    try:
        kernels = load()
        probe(kernels, device)
        return Backend(kernels, f"kernels: {name}, probed on {_describe(device)}")
    except (
        ImportError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # compiler, driver and loader failures of all kinds are of these types
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    reason = f"kernels: torch operations, several times slower, because {name} kernels do not work on {_describe(device)} ({failure})"
    warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return Backend(TorchKernels(), reason)


def probe(kernels: Kernels, device: torch.device) -> None:
    """Run one sparse decode layer and compare with the naive version. Raises ProbeError, or what the backend raises."""
    generator = torch.Generator().manual_seed(0)
    cache = allocate(PageLayout(layers=1, pages=8, kv_heads=1, head_size=64, dtype=torch.bfloat16, device=device))[0]
    for part in (cache.keys, cache.values, cache.centroids):
        part.copy_(torch.randn(part.shape, generator=generator))
    query, keys, values = (torch.randn(1, heads, 64, generator=generator).to(device, torch.bfloat16) for heads in (2, 1, 1))
    table = torch.tensor([[5, 2, 7, 1, 0, 3, 6, 4]], dtype=torch.int32, device=device)
    length, budget = (torch.tensor([value], dtype=torch.int32, device=device) for value in (100, 2))
    slot = torch.tensor([6 * 16 + 3], dtype=torch.int64, device=device)
    step = DecodeStep(table, length, slot, scale=0.125, splits=2, budgets=budget, list_width=5)
    out = kernels.decode_layer(step, cache, query, keys, values, sparse=True)
    pages = kernels.select_pages(cache, Selection(query, table, length, budget, 5))
    expected, _ = naive.attend(cache, step.attention(query, pages))
    error = float((out.float() - expected.float()).abs().max())
    if not error < TOLERANCE:
        raise ProbeError(f"the probe is off by {error:.3g}, more than {TOLERANCE}")


def _load_native() -> Kernels:
    from swarm_kernels.native.backend import NativeKernels

    return NativeKernels()


def _load_triton() -> Kernels:
    from swarm_kernels.gpu.backend import TritonKernels

    return TritonKernels()


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this processor ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
