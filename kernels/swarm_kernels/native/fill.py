"""Argument structures out of tensors, once they are checked. Nothing here keeps a tensor alive: whoever calls does, until the kernels have
returned."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_kernels.checks import check_append, check_attend, check_prompts, check_select
from swarm_kernels.interface import Attention, DecodeStep, NewTokens, PromptAttention, Selection
from swarm_kernels.layout import LayerCache
from swarm_kernels.native.arguments import DTYPE_CODES, AppendArguments, AttendArguments, DecodeArguments, PromptArguments, SelectArguments

TASKS_A_THREAD = 4
"""Splits are added until every thread has this many (sequence, KV head, split) tasks, so that uneven lengths still balance."""


def pointer(tensor: Tensor | None) -> int | None:
    """The address of the first element; null for None."""
    return None if tensor is None else tensor.data_ptr()


def fill_decode(a: DecodeArguments, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Everything that the layers of a step share, and the scratch memory that must live as long. Strides must be the same in all layers."""
    fill_append(a.append, cache, step.new_tokens(query, keys, values))
    scratch = fill_attend(a.attend, cache, step.attention(query), query)
    selection = step.selection(query)
    if selection is None:
        return scratch
    pages = fill_select(a.select, cache, selection)
    fill_pages(a.attend, pages)
    return *scratch, pages


def choose_splits(pairs: int) -> int:
    """Splits for a batch of (sequence, KV head) pairs."""
    return max(1, min(8, -(-TASKS_A_THREAD * torch.get_num_threads() // max(pairs, 1))))


def packed_rows(rows: int, inputs: int) -> Tensor:
    """Room for the rows of a linear layer as the matrix unit wants them: groups of sixteen, or of all where there are fewer."""
    return torch.empty(min(rows, 16) * -(-rows // 16) * inputs, dtype=torch.bfloat16)


def fill_append(a: AppendArguments, cache: LayerCache, tokens: NewTokens) -> None:
    """Checked first, see `check_append`. Raises ValueError."""
    check_append(cache, tokens)
    keys, values, query = tokens.keys, tokens.values, tokens.query
    a.keys, a.values, a.query, a.slots = keys.data_ptr(), values.data_ptr(), pointer(query), tokens.slots.data_ptr()
    a.cosines, a.sines = pointer(tokens.cosines), pointer(tokens.sines)
    a.cache_keys, a.cache_values, a.centroids = cache.keys.data_ptr(), cache.values.data_ptr(), cache.centroids.data_ptr()
    a.key_token, a.key_head = keys.stride()[:2]
    a.value_token, a.value_head = values.stride()[:2]
    if query is not None:
        a.query_token, a.query_head = query.stride()[:2]
        a.query_heads = query.shape[1]
    a.angle_token = 0 if tokens.cosines is None else tokens.cosines.stride(0)
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.centroid_page, a.centroid_head = cache.centroids.stride()[:2]
    a.tokens, a.kv_heads, a.head_size = keys.shape
    a.dtype, a.page_size, a.threads = DTYPE_CODES[keys.dtype], cache.page_size, torch.get_num_threads()


def fill_select(a: SelectArguments, cache: LayerCache, selection: Selection) -> Tensor:
    """Returns the lists that the kernel writes."""
    check_select(cache, selection)
    query, table = selection.query, selection.table
    pages = torch.empty(query.shape[0], cache.keys.shape[1], selection.width, dtype=torch.int32)
    a.query, a.centroids, a.pages = query.data_ptr(), cache.centroids.data_ptr(), pages.data_ptr()
    a.table, a.lengths, a.budgets = table.data_ptr(), selection.lengths.data_ptr(), selection.budgets.data_ptr()
    a.query_sequence, a.query_head = query.stride()[:2]
    a.centroid_page, a.centroid_head = cache.centroids.stride()[:2]
    a.table_sequence = table.stride(0)
    a.batch, a.kv_heads, a.list_width = pages.shape
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.dtype, a.threads = DTYPE_CODES[query.dtype], torch.get_num_threads()
    return pages


def fill_attend(a: AttendArguments, cache: LayerCache, attention: Attention, out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what the kernel writes besides `out`: the log-sum-exps, and the sums of the splits."""
    check_attend(cache, attention)
    query, table = attention.query, attention.table
    batch, heads, size = query.shape
    a.batch, a.kv_heads, a.splits = batch, cache.keys.shape[1], attention.splits or choose_splits(batch * cache.keys.shape[1])
    lse = torch.empty(batch, heads, dtype=torch.float32)
    partial = torch.empty(batch * heads * a.splits * (size + 2) if a.splits > 1 else 0, dtype=torch.float32)
    a.query, a.keys, a.values = query.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr()
    a.table, a.lengths = table.data_ptr(), attention.lengths.data_ptr()
    a.out, a.lse, a.partial = out.data_ptr(), lse.data_ptr(), partial.data_ptr()
    a.query_sequence, a.query_head = query.stride()[:2]
    a.out_sequence, a.out_head = out.stride()[:2]
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.table_sequence = table.stride(0)
    a.pages = None
    if attention.pages is not None:
        fill_pages(a, attention.pages)
    a.group, a.head_size, a.page_size = heads // a.kv_heads, size, cache.page_size
    a.scale, a.window = attention.scale, attention.window
    a.dtype, a.threads = DTYPE_CODES[query.dtype], torch.get_num_threads()
    return lse, partial


def fill_prompts(a: PromptArguments, cache: LayerCache, attention: PromptAttention, out: Tensor) -> None:
    """Checked first, see `check_prompts`. Raises ValueError. The result goes to `out`, as `attention.query`."""
    check_prompts(cache, attention)
    query = attention.query
    a.query, a.keys, a.values, a.out = query.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr(), out.data_ptr()
    a.bounds, a.starts, a.table = attention.bounds.data_ptr(), attention.starts.data_ptr(), attention.table.data_ptr()
    a.query_token, a.query_head = query.stride()[:2]
    a.out_token, a.out_head = out.stride()[:2]
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.table_sequence = attention.table.stride(0)
    a.chunks, a.kv_heads = len(attention.starts), cache.keys.shape[1]
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.scale, a.window, a.threads = attention.scale, attention.window, torch.get_num_threads()


def fill_pages(a: AttendArguments, pages: Tensor) -> None:
    """`pages` are lists as in `Attention.pages`."""
    a.pages = pages.data_ptr()
    a.pages_sequence, a.pages_head, a.list_width = pages.stride(0), pages.stride(1), pages.shape[2]
