"""Dense attention of a prompt's new tokens in plain torch: pages are gathered, then torch attends."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from swarm_kernels.layout import LayerCache, gather


def attend_prompts(
    query: Tensor, cache: LayerCache, table: Tensor, bounds: Tensor, starts: Tensor, *, scale: float, window: int = 0
) -> Tensor:
    """Causal attention of consecutive tokens of several sequences, over everything up to each.

    query:  (N, query heads, head size); query head i reads KV head i // group
    table:  (C, M) int32, the physical page of each page of each sequence
    bounds: (C + 1,) int32, ascending from 0 to N: tokens [bounds[c], bounds[c + 1]) belong to chunk c
    starts: (C,) int32, tokens of the sequence before its chunk; the keys and values of both are in the cache already
    window: the last `window` tokens alone are visible to a token; 0: all of them

    Returns (N, query heads, head size).
    """
    limits = bounds.tolist()
    parts = [
        _attend(query[first:last], cache, row, start, scale, window)
        for first, last, start, row in zip(limits[:-1], limits[1:], starts.tolist(), table, strict=True)
    ]
    return torch.cat(parts)


def _attend(query: Tensor, cache: LayerCache, pages: Tensor, start: int, scale: float, window: int) -> Tensor:
    length = start + len(query)
    keys, values = gather(cache, pages, length)
    causal = start == 0 and (not window or length <= window)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if causal else _mask(start, length, window, query.device),
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _mask(start: int, length: int, window: int, device: torch.device) -> Tensor:
    """(T, length) bool: what each token of the chunk sees."""
    rows = torch.arange(start, length, device=device)[:, None]
    columns = torch.arange(length, device=device)
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen
