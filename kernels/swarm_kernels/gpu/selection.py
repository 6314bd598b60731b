"""Page scoring and selection in Triton: scores in parallel over pages, then one program a (sequence, KV head) that keeps the best."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_pages(
    query,
    centroids,
    table,
    lengths,
    scores,
    query_sequence,
    query_head,
    centroid_page,
    centroid_head,
    table_sequence,
    width,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scores (B, KV heads, width) float32: mean query of the group times centroid; unset for the reserved pages."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pages = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, HEAD_PADDED)
    head_mask = columns < HEAD
    count = tl.cdiv(tl.load(lengths + sequence), PAGE)
    middle = (pages > 0) & (pages < count - 2)
    mean = tl.zeros([HEAD_PADDED], tl.float32)
    for row in tl.static_range(GROUP):
        pointers = query + sequence * query_sequence + (head * GROUP + row) * query_head + columns
        mean += tl.load(pointers, mask=head_mask, other=0.0).to(tl.float32)
    mean = mean / GROUP
    physical = tl.load(table + sequence * table_sequence + pages, mask=middle, other=0).to(tl.int64)
    pointers = centroids + (physical * centroid_page + head.to(tl.int64) * centroid_head)[:, None] + columns[None, :]
    rows = tl.load(pointers, mask=middle[:, None] & head_mask[None, :], other=0.0).to(tl.float32)
    dots = tl.sum(rows * mean[None, :], axis=1)
    tl.store(scores + (sequence * tl.num_programs(1) + head) * width + pages, dots, mask=middle)


@triton.jit
def keep_best(scores, lengths, budgets, lists, width, list_width, PAGE: tl.constexpr, RESERVED: tl.constexpr, PADDED: tl.constexpr):
    """lists (B, KV heads, list_width) int32: the reserved pages and the best others, ascending, then -1.

    The score that just makes it is found bit by bit over integers that sort like the floats, so there is no sort. Of equal scores the
    earlier page wins.
    """
    sequence = tl.program_id(0).to(tl.int64)
    row = sequence * tl.num_programs(1) + tl.program_id(1)
    pages = tl.arange(0, PADDED)
    count = tl.cdiv(tl.load(lengths + sequence), PAGE)
    keep = tl.minimum(tl.load(budgets + sequence) + RESERVED, list_width)
    inside = pages < count
    middle = (pages > 0) & (pages < count - 2)
    bits = tl.load(scores + row * width + pages, mask=middle, other=0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    ordered = tl.where(middle, ordered, -1)
    wanted = keep - RESERVED
    least = tl.zeros([], tl.int64)
    bit = tl.full([], 2147483648, tl.int64)
    for _ in range(32):
        reach = tl.sum((ordered >= least + bit).to(tl.int32), axis=0)
        least = tl.where(reach >= wanted, least + bit, least)
        bit = bit // 2
    above = ordered > least
    tie = middle & (ordered == least)
    left = wanted - tl.sum(above.to(tl.int32), axis=0)
    kept = above | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= left))
    kept = tl.where(count <= keep, inside, kept | (inside & (pages == 0)) | (inside & (pages >= count - 2)))
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(lists + row * list_width + place, pages, mask=kept)
    filled = tl.sum(kept.to(tl.int32), axis=0)
    tl.store(lists + row * list_width + pages, tl.full([PADDED], -1, tl.int32), mask=(pages >= filled) & (pages < list_width))
