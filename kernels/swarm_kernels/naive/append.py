"""Writing new tokens into the paged cache, in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.interface import NewTokens
from swarm_kernels.layout import LayerCache


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding as transformers' modules compute it: x (N, heads, D), angles (N, D) of the same type."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosines[:, None] + turned * sines[:, None]


def rotate_new(tokens: NewTokens) -> Tensor:
    """The keys, rotated if there are angles; the query then is rotated in place."""
    if tokens.cosines is None or tokens.sines is None:
        return tokens.keys
    if tokens.query is not None:
        tokens.query.copy_(rotate(tokens.query, tokens.cosines, tokens.sines))
    return rotate(tokens.keys, tokens.cosines, tokens.sines)


def append(cache: LayerCache, tokens: NewTokens) -> None:
    """Write new tokens and the centroids of the pages that they complete.

    A page is complete when its last slot is written; its other slots must have been written by then, in this call or before.
    """
    keys, values, slots = rotate_new(tokens), tokens.values, tokens.slots
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache.keys[slot // cache.page_size, :, slot % cache.page_size] = keys[n]
            cache.values[slot // cache.page_size, :, slot % cache.page_size] = values[n]
    for slot in slots.tolist():
        if slot >= 0 and slot % cache.page_size == cache.page_size - 1:
            page = slot // cache.page_size
            cache.centroids[page] = cache.keys[page].float().mean(dim=1).to(cache.centroids.dtype)
