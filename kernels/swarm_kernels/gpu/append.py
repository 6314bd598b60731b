"""Cache write in Triton: new tokens into their slots, rotated on the way, and the centroids of completed pages."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated(pointer, cosines, sines, half, mask, HALF: tl.constexpr):
    """Both halves of one head, as transformers' modules compute them: products are rounded to the model's type before the sum."""
    kind = pointer.dtype.element_ty
    x = tl.load(pointer + half, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(pointer + HALF + half, mask=mask, other=0.0).to(tl.float32)
    c1 = tl.load(cosines + half, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cosines + HALF + half, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sines + half, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sines + HALF + half, mask=mask, other=0.0).to(tl.float32)
    low = (x * c1).to(kind).to(tl.float32) - (y * s1).to(kind).to(tl.float32)
    high = (y * c2).to(kind).to(tl.float32) + (x * s2).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind)


@triton.jit
def append_tokens(
    keys,
    values,
    query,
    cosines,
    sines,
    slots,
    cache_keys,
    cache_values,
    key_token,
    key_head,
    value_token,
    value_head,
    query_token,
    query_head,
    angle_token,
    page_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One program a (token, head): KV heads first, then the query heads to rotate in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HEAD_PADDED // 2)
    half_mask = half < HEAD // 2
    if head >= KV_HEADS:
        to = query + token * query_token + (head - KV_HEADS) * query_head
        low, high = _rotated(to, cosines + token * angle_token, sines + token * angle_token, half, half_mask, HEAD // 2)
        tl.store(to + half, low, mask=half_mask)
        tl.store(to + HEAD // 2 + half, high, mask=half_mask)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            offset = slot // PAGE * page_stride + head.to(tl.int64) * head_stride + slot % PAGE * HEAD
            columns = tl.arange(0, HEAD_PADDED)
            mask = columns < HEAD
            key = keys + token * key_token + head * key_head
            if ROTATE:
                low, high = _rotated(key, cosines + token * angle_token, sines + token * angle_token, half, half_mask, HEAD // 2)
                tl.store(cache_keys + offset + half, low, mask=half_mask)
                tl.store(cache_keys + offset + HEAD // 2 + half, high, mask=half_mask)
            else:
                tl.store(cache_keys + offset + columns, tl.load(key + columns, mask=mask), mask=mask)
            value = tl.load(values + token * value_token + head * value_head + columns, mask=mask)
            tl.store(cache_values + offset + columns, value, mask=mask)


@triton.jit
def write_centroids(
    slots,
    cache_keys,
    centroids,
    page_stride,
    head_stride,
    centroid_page,
    centroid_head,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One program a (token, KV head); those whose token is the last of its page store the mean of the page's keys."""
    slot = tl.load(slots + tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    if (slot >= 0) & (slot % PAGE == PAGE - 1):
        page = slot // PAGE
        tokens = tl.arange(0, PAGE)
        columns = tl.arange(0, HEAD_PADDED)
        mask = columns < HEAD
        pointers = cache_keys + page * page_stride + head * head_stride + tokens[:, None] * HEAD + columns[None, :]
        keys = tl.load(pointers, mask=mask[None, :], other=0.0).to(tl.float32)
        mean = tl.sum(keys, axis=0) / PAGE
        tl.store(centroids + page * centroid_page + head * centroid_head + columns, mean.to(centroids.dtype.element_ty), mask=mask)
