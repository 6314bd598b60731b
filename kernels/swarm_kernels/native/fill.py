"""Argument structures out of tensors. Nothing here keeps a tensor alive: whoever calls does, until the kernels have returned."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.checks import check_attend, check_cache, check_select
from swarm_kernels.interface import DecodeStep
from swarm_kernels.layout import LayerCache
from swarm_kernels.native.arguments import DTYPE_CODES, AppendArguments, AttendArguments, DecodeArguments, PromptArguments, SelectArguments

TASKS_A_THREAD = 4
"""Splits are added until every thread has this many (sequence, KV head, split) tasks, so that uneven lengths still balance."""


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def fill_decode(a: DecodeArguments, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Everything that the layers of a step share, and the scratch memory that must live as long. Strides must be the same in all layers."""
    check_cache(cache, query.dtype)
    check_attend(query, cache, step.table, step.lengths, None, 0, step.splits)
    batch, kv_heads = query.shape[0], cache.keys.shape[1]
    splits = step.splits or choose_splits(batch * kv_heads)
    partial, lse = partial_sums(query, splits), torch.empty(query.shape[:2], dtype=torch.float32)
    fill_append(a.append, keys, values, step.slots, cache, query, step.cosines, step.sines)
    fill_attend(a.attend, query, cache, step.table, step.lengths, None, query, lse, partial, splits)
    a.attend.scale = step.scale
    if step.budgets is None:
        return partial, lse
    check_select(query, cache, step.table, step.lengths, step.budgets, step.list_width)
    pages = torch.empty(batch, kv_heads, step.list_width, dtype=torch.int32)
    fill_select(a.select, query, cache, step.table, step.lengths, step.budgets, pages)
    fill_pages(a.attend, pages)
    return partial, lse, pages


def choose_splits(pairs: int) -> int:
    """Splits for a batch of (sequence, KV head) pairs."""
    return max(1, min(8, -(-TASKS_A_THREAD * torch.get_num_threads() // max(pairs, 1))))


def partial_sums(query: Tensor, splits: int) -> Tensor:
    batch, heads, size = query.shape
    return torch.empty(batch * heads * splits * (size + 2) if splits > 1 else 0, dtype=torch.float32)


def packed_rows(rows: int, inputs: int) -> Tensor:
    """Room for the rows of a linear layer as the matrix unit wants them: groups of sixteen, or of all where there are fewer."""
    return torch.empty(min(rows, 16) * -(-rows // 16) * inputs, dtype=torch.bfloat16)


def fill_append(
    a: AppendArguments,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cache: LayerCache,
    query: Tensor | None,
    cosines: Tensor | None,
    sines: Tensor | None,
) -> None:
    a.keys, a.values, a.query, a.slots = keys.data_ptr(), values.data_ptr(), pointer(query), slots.data_ptr()
    a.cosines, a.sines = pointer(cosines), pointer(sines)
    a.cache_keys, a.cache_values, a.centroids = cache.keys.data_ptr(), cache.values.data_ptr(), cache.centroids.data_ptr()
    a.key_token, a.key_head = keys.stride()[:2]
    a.value_token, a.value_head = values.stride()[:2]
    if query is not None:
        a.query_token, a.query_head = query.stride()[:2]
        a.query_heads = query.shape[1]
    a.angle_token = 0 if cosines is None else cosines.stride(0)
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.centroid_page, a.centroid_head = cache.centroids.stride()[:2]
    a.tokens, a.kv_heads, a.head_size = keys.shape
    a.dtype, a.page_size, a.threads = DTYPE_CODES[keys.dtype], cache.page_size, torch.get_num_threads()


def fill_select(
    a: SelectArguments, query: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, budgets: Tensor, pages: Tensor
) -> None:
    a.query, a.centroids, a.pages = query.data_ptr(), cache.centroids.data_ptr(), pages.data_ptr()
    a.table, a.lengths, a.budgets = table.data_ptr(), lengths.data_ptr(), budgets.data_ptr()
    a.query_sequence, a.query_head = query.stride()[:2]
    a.centroid_page, a.centroid_head = cache.centroids.stride()[:2]
    a.table_sequence = table.stride(0)
    a.batch, a.kv_heads, a.list_width = pages.shape
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.dtype, a.threads = DTYPE_CODES[query.dtype], torch.get_num_threads()


def fill_attend(
    a: AttendArguments,
    query: Tensor,
    cache: LayerCache,
    table: Tensor,
    lengths: Tensor,
    pages: Tensor | None,
    out: Tensor,
    lse: Tensor,
    partial: Tensor,
    splits: int,
) -> None:
    a.query, a.keys, a.values = query.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr()
    a.table, a.lengths = table.data_ptr(), lengths.data_ptr()
    a.out, a.lse, a.partial, a.splits = out.data_ptr(), lse.data_ptr(), partial.data_ptr(), splits
    a.query_sequence, a.query_head = query.stride()[:2]
    a.out_sequence, a.out_head = out.stride()[:2]
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.table_sequence = table.stride(0)
    a.batch, a.kv_heads = query.shape[0], cache.keys.shape[1]
    a.pages = None
    if pages is not None:
        fill_pages(a, pages)
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.dtype, a.threads = DTYPE_CODES[query.dtype], torch.get_num_threads()


def fill_prompts(a: PromptArguments, query: Tensor, cache: LayerCache, table: Tensor, bounds: Tensor, starts: Tensor, out: Tensor) -> None:
    a.query, a.keys, a.values, a.out = query.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(), out.data_ptr()
    a.bounds, a.starts, a.table = bounds.data_ptr(), starts.data_ptr(), table.data_ptr()
    a.query_token, a.query_head = query.stride()[:2]
    a.out_token, a.out_head = out.stride()[:2]
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.table_sequence = table.stride(0)
    a.chunks, a.kv_heads = len(starts), cache.keys.shape[1]
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.threads = torch.get_num_threads()


def fill_pages(a: AttendArguments, pages: Tensor) -> None:
    a.pages = pages.data_ptr()
    a.pages_sequence, a.pages_head, a.list_width = pages.stride(0), pages.stride(1), pages.shape[2]
