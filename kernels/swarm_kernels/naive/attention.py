"""Paged decode attention in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm_kernels.interface import Attention
from swarm_kernels.layout import LayerCache


def attend(cache: LayerCache, attention: Attention) -> tuple[Tensor, Tensor]:
    """Attention of one new token a sequence over the cached tokens of chosen pages.

    Returns the output, (B, query heads, head size) in the query's type, and the natural log-sum-exp of the scaled scores, (B, query heads)
    float32. A head that reads nothing returns 0 and minus infinity. A page of the sequence listed twice would count twice.
    """
    query, table, lengths, pages, window = attention.query, attention.table, attention.lengths, attention.pages, attention.window
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
                scores = torch.cat(keys) @ query[b, i].float() * attention.scale
                out[b, i] = torch.softmax(scores, dim=0) @ torch.cat(values)
                lse[b, i] = torch.logsumexp(scores, dim=0)
    return out.to(query.dtype), lse
