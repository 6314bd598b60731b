"""What the machine can do at most, measured in the same call as everything that is held against it: memory reads and matrix products."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from swarm_kernels.choose import choose_backend
from swarm_kernels.measure import reader

_READ_BYTES = 1 << 29
"""Far more than a processor's caches hold."""
_MATRIX = {"cpu": 2048, "cuda": 8192}
"""Side of the square matrices that are multiplied."""
_ROUNDS = 5


@dataclass(frozen=True)
class Machine:
    """The hardware and its limits."""

    processor: str
    """Name of the GPU, or of the CPU."""
    cores: int
    """Of the CPU, as many as this process may use."""
    threads: int
    """That torch uses."""
    memory_gib: float
    """Of the CPU."""
    torch: str
    device: str
    dtype: str
    kernels: str
    """Why these kernels were chosen."""
    read_bytes_per_second: float
    flops: float
    """Floating-point operations a second of a large matrix product in `dtype`."""

    @property
    def intensity(self) -> float:
        """FLOP that the machine does in the time of reading one byte: I of the cost model."""
        return self.flops / self.read_bytes_per_second

    def describe(self) -> str:
        """One sentence for the foot of a table."""
        where = f"{self.processor}, {self.cores} cores" if self.device == "cpu" else self.processor
        return (
            f"{where}, {self.threads} threads, torch {self.torch}, {self.dtype}: memory reads {self.read_bytes_per_second / 1e9:.1f} GB/s, "
            f"matrix product {self.flops / 1e9:.0f} GFLOP/s"
        )


@dataclass(frozen=True)
class Limits:
    """What was measured of the machine at one moment."""

    read_bytes_per_second: float
    flops: float


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Median of five reads of half a GiB, and of five products of large square matrices."""
    buffer = torch.ones(_READ_BYTES // 4, device=device)
    read = reader(choose_backend(device).kernels)
    side = _MATRIX["cuda" if device.type == "cuda" else "cpu"]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Limits(
        buffer.nbytes / _median_seconds(lambda: read(buffer), device), 2 * side**3 / _median_seconds(lambda: left @ right, device)
    )


def describe_machine(device: torch.device, dtype: torch.dtype, limits: Sequence[Limits]) -> Machine:
    """The hardware, with the medians of what was measured at several moments: neighbours come and go."""
    return Machine(
        processor=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        cores=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=psutil.virtual_memory().total / 2**30,
        torch=torch.__version__,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        kernels=choose_backend(device).reason,
        read_bytes_per_second=statistics.median(limit.read_bytes_per_second for limit in limits),
        flops=statistics.median(limit.flops for limit in limits),
    )


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
