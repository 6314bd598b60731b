"""Choosing the pages of a sparse decode step, in plain torch: the definition that every other version is tested against.

Source: arXiv 2606.08446 (Sparrow): centroid per completed page, mean query of the group, the first page and the last two always kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.interface import Selection
from swarm_kernels.layout import RESERVED_PAGES, LayerCache


def select_pages(cache: LayerCache, selection: Selection) -> Tensor:
    """The pages that each KV head of each sequence reads.

    Returns (B, KV heads, K) int32: page numbers within the sequence, ascending, then -1. A sequence with no more pages than it may read
    gets them all. Of equal scores the earlier page wins.
    """
    query, table, width = selection.query, selection.table, selection.width
    batch, heads, _ = query.shape
    kv_heads, page_size = cache.keys.shape[1], cache.page_size
    chosen = torch.full((batch, kv_heads, width), -1, dtype=torch.int32, device=query.device)
    for b in range(batch):
        count = -(-int(selection.lengths[b]) // page_size)
        keep = min(int(selection.budgets[b]) + RESERVED_PAGES, width)
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
