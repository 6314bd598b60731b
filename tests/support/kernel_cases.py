"""Paged caches for the kernel tests: slots that a kernel has no business reading hold NaN, table entries past an end are absurd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from swarm_kernels.interface import Attention, Selection
from swarm_kernels.layout import LayerCache, PageLayout, allocate
from torch import Tensor

LENGTHS = (1, 15, 16, 17, 1025)
ABSURD_PAGE = 10**9


@dataclass(frozen=True, eq=False)
class Case:
    query: Tensor
    cache: LayerCache
    table: Tensor
    lengths: Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def attention(self, **changes: Any) -> Attention:
        return replace(Attention(self.query, self.table, self.lengths, self.scale), **changes)

    def selection(self, budgets: list[int] | Tensor, width: int) -> Selection:
        return Selection(self.query, self.table, self.lengths, torch.as_tensor(budgets, dtype=torch.int32), width)


def make_case(
    *,
    lengths: tuple[int, ...] = LENGTHS,
    group: int = 2,
    head_size: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 2,
    seed: int = 0,
) -> Case:
    """Random keys and values behind a permuted page table; the first two full pages of each sequence are shared, as a group's prompt is."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts) + 2
    cache = allocate(PageLayout(layers=1, pages=total, kv_heads=kv_heads, head_size=head_size, page_size=page_size, dtype=dtype))[0]
    for part in (cache.keys, cache.values, cache.centroids):
        part.fill_(torch.nan)
    order = torch.randperm(total, generator=generator).tolist()
    shared = order[:2]
    table = torch.full((len(lengths), max(max(counts), 1) + 1), ABSURD_PAGE, dtype=torch.int32)
    taken = 2
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for page in range(count):
            full = (page + 1) * page_size <= length
            if page < 2 and full:
                physical = shared[page]
            else:
                physical, taken = order[taken], taken + 1
            table[b, page] = physical
            used = min(page_size, length - page * page_size)
            for part in (cache.keys, cache.values):
                part[physical, :, :used] = torch.randn(kv_heads, used, head_size, generator=generator).to(dtype)
            if full:
                cache.centroids[physical] = cache.keys[physical].float().mean(dim=1).to(dtype)
    query = torch.randn(len(lengths), kv_heads * group, head_size, generator=generator).to(dtype)
    return Case(query, cache, table, torch.tensor(lengths, dtype=torch.int32))


def random_lists(case: Case, width: int, *, seed: int = 0) -> Tensor:
    """Page lists with -1 strewn in, in no order; some are empty."""
    generator = torch.Generator().manual_seed(seed)
    batch, kv_heads, page_size = case.query.shape[0], case.cache.keys.shape[1], case.cache.page_size
    lists = torch.full((batch, kv_heads, width), -1, dtype=torch.int32)
    for b in range(batch):
        count = -(-int(case.lengths[b]) // page_size)
        for h in range(kv_heads):
            chosen = torch.randperm(count, generator=generator)[: int(torch.randint(0, width + 1, (), generator=generator))]
            places = torch.randperm(width, generator=generator)[: len(chosen)]
            lists[b, h, places] = chosen[: len(places)].to(torch.int32)
    return lists


TOLERANCE = {torch.float32: (3e-6, 3e-6), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 2e-2)}
"""(absolute, relative) of an output, which is rounded to its type once."""


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Outputs agree within the rounding of their type, log-sum-exps within float32's."""
    absolute, relative = TOLERANCE[expected[0].dtype]
    torch.testing.assert_close(actual[0].float(), expected[0].float(), atol=absolute, rtol=relative)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-5, rtol=1e-5)
