"""Dense attention of a prompt's new tokens in plain torch: pages are gathered, then torch attends."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from swarm_kernels.interface import PromptAttention
from swarm_kernels.layout import LayerCache, gather


def attend_prompts(cache: LayerCache, attention: PromptAttention) -> Tensor:
    """Causal attention of consecutive tokens of several sequences, over everything up to each. Returns (N, query heads, head size)."""
    limits, starts = attention.bounds.tolist(), attention.starts.tolist()
    parts = [
        _attend(attention.query[first:last], cache, row, start, attention.scale, attention.window)
        for first, last, start, row in zip(limits[:-1], limits[1:], starts, attention.table, strict=True)
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
