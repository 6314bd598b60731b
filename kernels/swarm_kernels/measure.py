"""Measures the CPU decode kernels against the floor that memory reads set, in one run: `python -m swarm_kernels.measure --help`.

Every round times each candidate once, so that all see the same neighbours; the table shows medians and each candidate's share of the floor.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm_kernels.layout import RESERVED_PAGES, LayerCache, PageLayout, allocate, gather
from swarm_kernels.native.library import NativeKernels
from swarm_kernels.portable import TorchKernels

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measure(options: argparse.Namespace) -> list[dict[str, float | str]]:
    """One row a candidate: name, milliseconds of one decode step over all layers, bytes that it has to read, GB/s, share of the floor."""
    torch.set_num_threads(options.threads)
    pages = options.length // 16
    layout = PageLayout(options.layers, options.batch * pages, options.kv_heads, options.head_size, 16, DTYPES[options.dtype])
    caches = allocate(layout)
    for cache in caches:
        for part in (cache.keys, cache.values, cache.centroids):
            part.fill_(0.5)
    order = torch.randperm(layout.pages) if options.scattered else torch.arange(layout.pages)
    table = order.to(torch.int32).view(options.batch, pages)
    lengths = torch.full((options.batch,), options.length, dtype=torch.int32)
    query = torch.randn(options.batch, options.kv_heads * options.group, options.head_size).to(layout.dtype)
    budgets = torch.full((options.batch,), options.budget, dtype=torch.int32)
    width = min(options.budget + RESERVED_PAGES, pages)
    scale = options.head_size**-0.5
    native, portable = NativeKernels(), TorchKernels()
    contiguous = {
        id(cache): [torch.stack(parts) for parts in zip(*(gather(cache, row, options.length) for row in table), strict=True)]
        for cache in caches
    }

    def read(cache: LayerCache) -> None:
        words = cache.keys.untyped_storage().nbytes() // 8
        native.library.swarm_read(ctypes.c_void_p(cache.keys.data_ptr()), ctypes.c_int64(words), torch.get_num_threads())

    def sparse(cache: LayerCache) -> None:
        chosen = native.select_pages(query, cache, table, lengths, budgets, width)
        native.attend(query, cache, table, lengths, scale=scale, pages=chosen)

    def sdpa(cache: LayerCache) -> None:
        keys, values = contiguous[id(cache)]
        scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale, enable_gqa=True)

    cached = 2 * options.batch * options.length * options.kv_heads * options.head_size * layout.dtype.itemsize * options.layers
    chosen_share, centroid_share = width / pages, 1 / 32
    candidates: list[tuple[str, Callable[[LayerCache], None], float]] = [
        ("memory read (floor)", read, cached),
        ("dense, native", lambda cache: void(native.attend(query, cache, table, lengths, scale=scale)), cached),
        (f"sparse, native, {width} pages", sparse, cached * (chosen_share + centroid_share)),
        ("dense, SDPA, contiguous", sdpa, cached),
        ("dense, torch gathers", lambda cache: void(portable.attend(query, cache, table, lengths, scale=scale)), cached),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in candidates}
    for _ in range(options.rounds):
        for name, run, _ in candidates:
            start = time.perf_counter()
            for cache in caches:
                run(cache)
            seconds[name].append(time.perf_counter() - start)
    rows: list[dict[str, float | str]] = []
    floor = 0.0
    for name, _, size in candidates:
        median = statistics.median(seconds[name])
        rate = size / median / 1e9
        floor = floor or rate
        rows.append({"name": name, "ms": median * 1e3, "MB": size / 1e6, "GB/s": rate, "share of floor": rate / floor})
    return rows


def void(_: object) -> None:
    """Drop a result."""


def main() -> None:
    parser = argparse.ArgumentParser(description="GB/s of the CPU decode kernels; the defaults are one SmolLM2-135M step at batch 8.")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence, a multiple of 16")
    parser.add_argument("--layers", type=int, default=30, help="as many as a model has: their cache must not fit the processor's own")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--group", type=int, default=3, help="query heads a KV head")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--budget", type=int, default=61, help="pages besides the reserved three")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scattered", action="store_true", help="pages in random order instead of as a fresh cache hands them out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'':<28} {'ms':>8} {'MB':>8} {'GB/s':>7} {'of floor':>9}")
    for row in rows:
        print(f"{row['name']:<28} {row['ms']:>8.1f} {row['MB']:>8.0f} {row['GB/s']:>7.1f} {row['share of floor']:>9.2f}")


if __name__ == "__main__":
    main()
