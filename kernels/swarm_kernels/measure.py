"""Measures kernels against the floor that memory reads set, in one run: `python -m swarm_kernels.measure --help`.

Every round times each candidate once, so that all see the same neighbours; the rows are medians and each candidate's share of the floor.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from swarm_kernels.choose import choose_backend
from swarm_kernels.interface import Attention, Kernels, Selection
from swarm_kernels.layout import RESERVED_PAGES, LayerCache, PageLayout, allocate, gather
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """The attention of one decode step; the defaults are SmolLM2-135M's at batch 8."""

    batch: int = 8
    length: int = 4096
    """Tokens of each sequence, a multiple of the page size."""
    layers: int = 30
    """As many as a model has: their cache must not fit into the processor's own."""
    kv_heads: int = 3
    group: int = 3
    """Query heads a KV head."""
    head_size: int = 64
    budget: int = 61
    """Pages besides the reserved three."""
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scattered: bool = False
    """Whether pages lie in random order instead of as a fresh cache hands them out."""

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return self.length // PAGE_SIZE

    @property
    def list_width(self) -> int:
        """Pages that a sparse step reads of one sequence."""
        return min(self.budget + RESERVED_PAGES, self.pages)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all sequences and layers: what dense attention has to read."""
        return 2 * self.batch * self.length * self.token_width * self.layers

    @property
    def centroid_bytes(self) -> int:
        """Centroids of all pages: what selection has to read."""
        return self.batch * self.pages * self.token_width * self.layers

    @property
    def token_width(self) -> int:
        """Bytes of one token's keys in one layer."""
        return self.kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class Candidate:
    """Something to time."""

    name: str
    run: Callable[[], object]
    size: float
    """Bytes that it has to move at least."""


@dataclass(frozen=True)
class Row:
    """What a candidate came to."""

    name: str
    seconds: tuple[float, ...]
    """Of each round."""
    size: float
    """Bytes that it has to move at least."""
    floor: float
    """Bytes a second of the candidate that the others are held against."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.size / self.median

    @property
    def share(self) -> float:
        """Of the floor's rate."""
        return self.rate / self.floor


class StepData:
    """The tensors of a workload: a full cache, and the arguments of a step over it."""

    def __init__(self, workload: Workload) -> None:
        w, device = workload, workload.device
        self.workload = workload
        self.caches = allocate(PageLayout(w.layers, w.batch * w.pages, w.kv_heads, w.head_size, PAGE_SIZE, w.dtype, device))
        for cache in self.caches:
            for part in (cache.keys, cache.values, cache.centroids):
                part.fill_(0.5)
        generator = torch.Generator().manual_seed(0)
        count = w.batch * w.pages
        order = torch.randperm(count, generator=generator) if w.scattered else torch.arange(count)
        self.table = order.to(torch.int32).view(w.batch, w.pages).to(device)
        self.lengths = torch.full((w.batch,), w.length, dtype=torch.int32, device=device)
        self.budgets = torch.full((w.batch,), w.budget, dtype=torch.int32, device=device)
        self.query = torch.randn(w.batch, w.kv_heads * w.group, w.head_size, generator=generator).to(device, w.dtype)
        self.scale = w.head_size**-0.5

    def select(self, kernels: Kernels, cache: LayerCache) -> Tensor:
        """Page lists of one layer."""
        return kernels.select_pages(cache, Selection(self.query, self.table, self.lengths, self.budgets, self.workload.list_width))

    def attend(self, kernels: Kernels, cache: LayerCache, pages: Tensor | None = None) -> Tensor:
        """Attention of one layer."""
        return kernels.attend(cache, Attention(self.query, self.table, self.lengths, self.scale, pages))[0]

    def every_layer(self, run: Callable[[LayerCache], object]) -> Callable[[], None]:
        """`run` over all layers, one after the other, as a step does."""

        def step() -> None:
            for cache in self.caches:
                run(cache)

        return step

    def floor(self, kernels: Kernels) -> Candidate:
        """Reading the whole cache once."""
        read = reader(kernels)
        keys = self.caches[0].keys
        whole = torch.empty(0, dtype=keys.dtype, device=keys.device).set_(keys.untyped_storage())  # all layers are one piece of memory
        return Candidate("memory read (floor)", lambda: read(whole), self.workload.cache_bytes)


def reader(kernels: Kernels) -> Callable[[Tensor], object]:
    """A function that reads a contiguous tensor, of a whole number of 8-byte words, once and as fast as memory allows."""
    if isinstance(kernels, NativeKernels):
        library = kernels.library

        def read(tensor: Tensor) -> object:
            words = ctypes.c_int64(tensor.nbytes // 8)
            return library.swarm_read(ctypes.c_void_p(tensor.data_ptr()), words, torch.get_num_threads())

        return read
    return lambda tensor: tensor.view(torch.float32).sum()


def measure(candidates: Sequence[Candidate], rounds: int, device: torch.device) -> list[Row]:
    """Time every candidate once a round, after a round that does not count. The first candidate is the floor of the others."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds + 1):
        for times, candidate in zip(seconds, candidates, strict=True):
            _wait(device)
            start = time.perf_counter()
            candidate.run()
            _wait(device)
            times.append(time.perf_counter() - start)
    floor = candidates[0].size / statistics.median(seconds[0][1:])
    return [Row(one.name, tuple(times[1:]), one.size, floor) for one, times in zip(candidates, seconds, strict=True)]


def rivals(workload: Workload, kernels: Kernels) -> list[Candidate]:
    """Our kernels and the other ways to do the attention of a decode step, the floor first."""
    data, portable = StepData(workload), TorchKernels()
    contiguous = {
        id(cache): [torch.stack(parts) for parts in zip(*(gather(cache, row, workload.length) for row in data.table), strict=True)]
        for cache in data.caches
    }

    def sdpa(cache: LayerCache) -> Tensor:
        keys, values = contiguous[id(cache)]
        return scaled_dot_product_attention(data.query[:, :, None], keys, values, scale=data.scale, enable_gqa=True)

    def sparse(cache: LayerCache) -> Tensor:
        return data.attend(kernels, cache, data.select(kernels, cache))

    dense_bytes = workload.cache_bytes
    sparse_bytes = dense_bytes * workload.list_width / workload.pages + workload.centroid_bytes
    named: list[tuple[str, Callable[[LayerCache], object], float]] = [
        (f"dense, {kernels.name}", lambda cache: data.attend(kernels, cache), dense_bytes),
        (f"sparse, {kernels.name}, {workload.list_width} pages", sparse, sparse_bytes),
        ("dense, SDPA, contiguous", sdpa, dense_bytes),
        ("dense, torch gathers", lambda cache: data.attend(portable, cache), dense_bytes),
    ]
    return [data.floor(kernels), *(Candidate(name, data.every_layer(run), size) for name, run, size in named)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print how long each kernel takes, what it reads, and how that compares with the floor."""
    parser = argparse.ArgumentParser(description="GB/s of decode attention; the defaults are one SmolLM2-135M step at batch 8.")
    parser.add_argument("--batch", type=int, default=Workload.batch)
    parser.add_argument("--length", type=int, default=Workload.length, help="tokens of each sequence, a multiple of 16")
    parser.add_argument("--layers", type=int, default=Workload.layers)
    parser.add_argument("--kv-heads", type=int, default=Workload.kv_heads)
    parser.add_argument("--group", type=int, default=Workload.group, help="query heads a KV head")
    parser.add_argument("--head-size", type=int, default=Workload.head_size)
    parser.add_argument("--budget", type=int, default=Workload.budget, help="pages besides the reserved three")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scattered", action="store_true", help="pages in random order instead of as a fresh cache hands them out")
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    threads, rounds, as_json = given.pop("threads"), given.pop("rounds"), given.pop("json")
    torch.set_num_threads(threads)
    workload = Workload(**{**given, "dtype": DTYPES[given["dtype"]]})
    rows = measure(rivals(workload, choose_backend(workload.device).kernels), rounds, workload.device)
    if as_json:
        print(json.dumps([{"name": row.name, "seconds": row.seconds, "bytes": row.size, "share": row.share} for row in rows]))
        return
    print(f"{'':<28} {'ms':>8} {'MB':>8} {'GB/s':>7} {'of floor':>9}")
    for row in rows:
        print(f"{row.name:<28} {row.median * 1e3:>8.1f} {row.size / 1e6:>8.0f} {row.rate / 1e9:>7.1f} {row.share:>9.2f}")


if __name__ == "__main__":
    main()
