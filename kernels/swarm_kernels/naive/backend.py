"""Every kernel out of torch operations, for where there is no compiler and no Triton.

Correct on any device, and slow: it copies what it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.checks import check_append, check_attend, check_select
from swarm_kernels.interface import Attention, DecodeStep, NewTokens, Selection, compose_layer
from swarm_kernels.layout import RESERVED_PAGES, LayerCache
from swarm_kernels.naive.append import rotate_new
from swarm_kernels.naive.layers import PlainLayers


class TorchKernels(PlainLayers):
    """See `swarm_kernels.interface.Kernels`."""

    name = "torch"

    def append(self, cache: LayerCache, tokens: NewTokens) -> None:
        """See `Kernels.append`. Padded rows are left out by a mask, which waits for the device."""
        check_append(cache, tokens)
        keys, slots, size = rotate_new(tokens), tokens.slots, cache.page_size
        written = slots >= 0
        pages, offsets = slots[written] // size, slots[written] % size
        cache.keys[pages, :, offsets] = keys[written]
        cache.values[pages, :, offsets] = tokens.values[written]
        complete = pages[offsets == size - 1]
        cache.centroids[complete] = cache.keys[complete].float().mean(dim=2).to(cache.centroids.dtype)

    def select_pages(self, cache: LayerCache, selection: Selection) -> Tensor:
        """See `Kernels.select_pages`. Scores are float32."""
        check_select(cache, selection)
        query, table = selection.query, selection.table
        batch, _, size = query.shape
        kv_heads = cache.keys.shape[1]
        mean = query.float().view(batch, kv_heads, -1, size).mean(dim=2)
        pages = torch.arange(table.shape[1], device=query.device)
        counts = (selection.lengths.long() + cache.page_size - 1) // cache.page_size
        inside = pages < counts[:, None]
        centroids = cache.centroids[torch.where(inside, table, 0).long()].float()
        scores = torch.einsum("bmhd,bhd->bhm", centroids, mean)
        reserved = inside & ((pages == 0) | (pages >= counts[:, None] - 2))
        return keep_best(scores, inside, reserved, selection.budgets, selection.width)

    def attend(self, cache: LayerCache, attention: Attention) -> tuple[Tensor, Tensor]:
        """See `Kernels.attend`. Gathers the listed pages, so it takes memory for a copy of them."""
        check_attend(cache, attention)
        query, table, pages, window = attention.query, attention.table, attention.pages, attention.window
        batch, heads, size = query.shape
        kv_heads, page_size = cache.keys.shape[1], cache.page_size
        if pages is None:
            pages = torch.arange(table.shape[1], device=query.device).expand(batch, kv_heads, -1)
        pages = pages.long()
        limit = attention.lengths.long()[:, None, None, None]
        positions = pages[..., None] * page_size + torch.arange(page_size, device=query.device)
        visible = (pages >= 0)[..., None] & (positions < limit)
        if window:
            visible &= positions >= limit - window
        listed = (pages >= 0) & (pages * page_size < limit[..., 0])
        rows = torch.arange(batch, device=query.device)[:, None, None]
        physical = table[rows, torch.where(listed, pages, 0)].long()
        physical = torch.where(listed, physical, 0)
        kv = torch.arange(kv_heads, device=query.device)[None, :, None]
        keys, values = (
            torch.where(visible[..., None], part[physical, kv], 0).float().view(batch, kv_heads, -1, size)
            for part in (cache.keys, cache.values)
        )
        scores = query.float().view(batch, kv_heads, -1, size) @ keys.transpose(2, 3) * attention.scale
        scores = scores.masked_fill(~visible.view(batch, kv_heads, 1, -1), -torch.inf)
        lse = torch.logsumexp(scores, dim=3)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
        return (weights @ values).view(batch, heads, size).to(query.dtype), lse.view(batch, heads)

    def decode_layer(
        self, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, *, sparse: bool, window: int = 0
    ) -> Tensor:
        """See `Kernels.decode_layer`. The three kernels, one after the other."""
        return compose_layer(self, step, cache, query, keys, values, sparse, window)


def keep_best(scores: Tensor, inside: Tensor, reserved: Tensor, budgets: Tensor, width: int) -> Tensor:
    """Page lists out of scores (B, KV heads, M): the reserved pages, then the best within the budget, ascending, padded with -1.

    inside, reserved: (B, M) bool, pages of the sequence, and those that are always kept.
    """
    batch, heads, count = scores.shape
    scores = scores.masked_fill(reserved[:, None], torch.inf).masked_fill(~inside[:, None], -torch.inf)
    order = scores.sort(dim=2, descending=True, stable=True).indices[..., :width]
    rank = torch.arange(order.shape[2], device=scores.device)
    kept = (rank < (budgets + RESERVED_PAGES)[:, None, None]) & inside[:, None].expand(-1, heads, -1).gather(2, order)
    chosen = torch.where(kept, order, count).sort(dim=2).values
    lists = torch.full((batch, heads, width), -1, dtype=torch.int32, device=scores.device)
    lists[..., : order.shape[2]] = torch.where(chosen < count, chosen, -1)
    return lists
