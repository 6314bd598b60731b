"""Paged decode attention in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm_kernels.layout import LayerCache


def attend(
    query: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, *, scale: float, pages: Tensor | None = None, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of one new token a sequence over the cached tokens of chosen pages.

    query:   (B, query heads, head size); query head i reads KV head i // group
    table:   (B, M) int32, the physical page of each page of the sequence
    lengths: (B,) int32, tokens of the sequence, the new one included; its key and value are in the cache already
    pages:   (B, KV heads, K) int32, which pages of the sequence each KV head reads, -1 for none; None reads all (dense attention)
    window:  the last `window` tokens alone are visible; 0: all of them

    Returns the output, (B, query heads, head size) in the query's type, and the natural log-sum-exp of the scaled scores, (B, query heads)
    float32. A head that reads nothing returns 0 and minus infinity. A page of the sequence listed twice would count twice.
    """
    batch, heads, size = query.shape
    kv_heads, page_size = cache.keys.shape[1], cache.page_size
    group = heads // kv_heads
    out = torch.zeros(batch, heads, size, dtype=torch.float32, device=query.device)
    lse = torch.full((batch, heads), -math.inf, dtype=torch.float32, device=query.device)
    for b in range(batch):
        length = int(lengths[b])
        first = max(0, length - window) if window else 0
        for h in range(kv_heads):
            listed = range(-(-length // page_size)) if pages is None else pages[b, h].tolist()
            keys, values = [], []
            for page in listed:
                low, high = max(0, first - page * page_size), min(page_size, length - page * page_size)
                if page >= 0 and low < high:
                    keys.append(cache.keys[table[b, page], h, low:high].float())
                    values.append(cache.values[table[b, page], h, low:high].float())
            if not keys:
                continue
            for i in range(h * group, (h + 1) * group):
                scores = torch.cat(keys) @ query[b, i].float() * scale
                out[b, i] = torch.softmax(scores, dim=0) @ torch.cat(values)
                lse[b, i] = torch.logsumexp(scores, dim=0)
    return out.to(query.dtype), lse
