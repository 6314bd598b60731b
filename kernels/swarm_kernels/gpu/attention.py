"""Paged decode attention in Triton: one program a (sequence, KV head, split), then a merge by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)
"""The query heads of a group, padded to what tensor cores multiply at least."""


@triton.jit
def attend_split(
    query,
    keys,
    values,
    table,
    lengths,
    pages,
    out,
    lse,
    sums,
    stats,
    scale_log2,
    window,
    list_width,
    splits,
    query_sequence,
    query_head,
    page_stride,
    head_stride,
    table_sequence,
    pages_sequence,
    pages_head,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Softmax over the pages of one split. WHOLE: there is one split, and the result is final. WIDEN: multiply in float32, for Triton's
    interpreter, which cannot multiply bf16.

    sums:  (B, query heads, splits, HEAD) float32, sum of 2^(score - top) * value
    stats: (B, query heads, splits, 2) float32, top (the largest score, in units of log2) and mass (sum of 2^(score - top))
    out:   (B, query heads, HEAD) and lse (B, query heads) float32, contiguous; written when WHOLE
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    length = tl.load(lengths + sequence)
    first = tl.where(window > 0, length - window, 0)
    entries = list_width if LISTED else tl.cdiv(length, PAGE)
    # Blocks are dealt to the splits in turn, so which split reads a page depends neither on the length of the list nor on its padding.
    block = BLOCK // PAGE

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_PADDED)
    tokens = tl.arange(0, BLOCK)
    head_mask = columns < HEAD
    row_mask = (rows < GROUP)[:, None] & head_mask[None, :]
    q = tl.load(
        query + sequence * query_sequence + (head * GROUP + rows)[:, None] * query_head + columns[None, :], mask=row_mask, other=0.0
    )

    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    for start in range(split * block, entries, splits * block):
        entry = start + tokens // PAGE
        inside = entry < entries
        if LISTED:
            page = tl.load(pages + sequence * pages_sequence + head * pages_head + entry, mask=inside, other=-1)
        else:
            page = tl.where(inside, entry, -1)
        position = page * PAGE + tokens % PAGE
        visible = (page >= 0) & (position < length) & (position >= first)
        physical = tl.load(table + sequence * table_sequence + page, mask=visible, other=0).to(tl.int64)
        offset = physical * page_stride + head.to(tl.int64) * head_stride + (tokens % PAGE) * HEAD
        # Masked tokens are not read: their slots may hold NaN, which no multiplication by 0 would remove.
        k = tl.load(keys + offset[None, :] + columns[:, None], mask=visible[None, :] & head_mask[:, None], other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(top - anchor)
        mass = mass * fade + tl.sum(weights, axis=1)
        v = tl.load(values + offset[:, None] + columns[None, :], mask=visible[:, None] & head_mask[None, :], other=0.0)
        weights = weights.to(v.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        total = total * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = new_top

    row = sequence * heads + head * GROUP + rows
    if WHOLE:
        empty = mass == 0.0
        result = total / tl.where(empty, 1.0, mass)[:, None]
        tl.store(out + row[:, None] * HEAD + columns[None, :], result.to(out.dtype.element_ty), mask=row_mask)
        tl.store(lse + row, tl.where(empty, float("-inf"), (top + tl.log2(mass)) * 0.6931471805599453), mask=rows < GROUP)
    else:
        part = row * splits + split
        tl.store(sums + part[:, None] * HEAD + columns[None, :], total, mask=row_mask)
        tl.store(stats + part * 2, top, mask=rows < GROUP)
        tl.store(stats + part * 2 + 1, mass, mask=rows < GROUP)


@triton.jit
def merge_splits(out, lse, sums, stats, splits, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr):
    """One program a (sequence, query head): splits weighted by 2^(their top - the largest top); empty ones carry no weight."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SPLITS_PADDED)
    columns = tl.arange(0, HEAD_PADDED)
    there = parts < splits
    tops = tl.load(stats + (row * splits + parts) * 2, mask=there, other=float("-inf"))
    masses = tl.load(stats + (row * splits + parts) * 2 + 1, mask=there, other=0.0)
    top = tl.max(tops, axis=0)
    empty = top == float("-inf")
    weights = tl.exp2(tops - tl.where(empty, 0.0, top))
    mass = tl.sum(masses * weights, axis=0)
    pointers = sums + (row * splits + parts)[:, None] * HEAD + columns[None, :]
    parts_sums = tl.load(pointers, mask=there[:, None] & (columns < HEAD)[None, :], other=0.0)
    result = tl.sum(parts_sums * weights[:, None], axis=0) / tl.where(empty, 1.0, mass)
    tl.store(out + row * HEAD + columns, result.to(out.dtype.element_ty), mask=columns < HEAD)
    tl.store(lse + row, tl.where(empty, float("-inf"), (top + tl.log2(mass)) * 0.6931471805599453))
