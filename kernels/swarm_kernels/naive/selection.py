"""Choosing the pages of a sparse decode step, in plain torch: the definition that every other version is tested against.

Source: arXiv 2606.08446 (Sparrow): centroid per completed page, mean query of the group, the first page and the last two always kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.layout import RESERVED_PAGES, LayerCache


def select_pages(query: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, budgets: Tensor, width: int) -> Tensor:
    """The pages that each KV head of each sequence reads.

    query:   (B, query heads, head size), rotated
    table:   (B, M) int32, the physical page of each page of the sequence
    lengths: (B,) int32, tokens of the sequence, the new one included
    budgets: (B,) int32, pages besides the reserved three (the first and the last two)
    width:   K, the pages of a list; at least 3, and it cuts larger budgets

    Returns (B, KV heads, K) int32: page numbers within the sequence, ascending, then -1. A sequence with no more pages than it may read
    gets them all. Of equal scores the earlier page wins.
    """
    batch, heads, _ = query.shape
    kv_heads, page_size = cache.keys.shape[1], cache.page_size
    chosen = torch.full((batch, kv_heads, width), -1, dtype=torch.int32, device=query.device)
    for b in range(batch):
        count = -(-int(lengths[b]) // page_size)
        keep = min(int(budgets[b]) + RESERVED_PAGES, width)
        for h in range(kv_heads):
            if count <= keep:
                pages = list(range(count))
            else:
                group = heads // kv_heads
                mean = query[b, h * group : (h + 1) * group].float().mean(dim=0)
                middle = range(1, count - 2)
                scores = [float(mean @ cache.centroids[table[b, page], h].float()) for page in middle]
                best = sorted(middle, key=lambda page: (-scores[page - 1], page))[: keep - RESERVED_PAGES]
                pages = sorted([0, *best, count - 2, count - 1])
            chosen[b, h, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=query.device)
    return chosen
