"""Writing new tokens into the paged cache, in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.layout import LayerCache


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding as transformers' modules compute it: x (N, heads, D), angles (N, D) of the same type."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cosines[:, None] + turned * sines[:, None]


def append(
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cache: LayerCache,
    *,
    query: Tensor | None = None,
    cosines: Tensor | None = None,
    sines: Tensor | None = None,
) -> None:
    """Write N new tokens and the centroids of the pages that they complete.

    keys, values:   (N, KV heads, head size), not rotated yet
    slots:          (N,) int64, physical page * page size + offset; -1 writes nothing (a padded row)
    query:          (N, query heads, head size), rotated in place when angles are given
    cosines, sines: (N, head size), both halves, of the keys' type; None leaves keys and query as they are

    A page is complete when its last slot is written; its other slots must have been written by then, in this call or before.
    """
    if cosines is not None and sines is not None:
        keys = rotate(keys, cosines, sines)
        if query is not None:
            query.copy_(rotate(query, cosines, sines))
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache.keys[slot // cache.page_size, :, slot % cache.page_size] = keys[n]
            cache.values[slot // cache.page_size, :, slot % cache.page_size] = values[n]
    for slot in slots.tolist():
        if slot >= 0 and slot % cache.page_size == cache.page_size - 1:
            page = slot // cache.page_size
            cache.centroids[page] = cache.keys[page].float().mean(dim=1).to(cache.centroids.dtype)
