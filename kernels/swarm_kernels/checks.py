"""Argument checks that all backends share: a kernel that is handed a wrong shape would read foreign memory."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from swarm_kernels.interface import Attention, NewTokens, PromptAttention, Selection
from swarm_kernels.layout import DTYPES, HEAD_SIZES, MAX_GROUP, PAGE_SIZES, RESERVED_PAGES, LayerCache


def check_append(cache: LayerCache, tokens: NewTokens) -> None:
    """Raises ValueError when the tokens cannot be written into such a cache."""
    _check_cache(cache, tokens.keys.dtype)


def check_attend(cache: LayerCache, attention: Attention) -> None:
    """Raises ValueError when the arguments do not fit together."""
    query, pages = attention.query, attention.pages
    _check_batch(cache, query, attention.table, attention.lengths)
    batch, kv_heads = query.shape[0], cache.keys.shape[1]
    if pages is not None and (pages.dtype != torch.int32 or pages.shape[:2] != (batch, kv_heads) or pages.stride(2) != 1):
        raise ValueError(f"page lists are {tuple(pages.shape)} {pages.dtype}; expected ({batch}, {kv_heads}, K) int32, contiguous in K")
    _check_window(attention.window)
    if attention.splits is not None and attention.splits < 1:
        raise ValueError(f"splits is {attention.splits}; at least 1, or None")


def check_select(cache: LayerCache, selection: Selection) -> None:
    """Raises ValueError when the arguments do not fit together."""
    budgets, lengths = selection.budgets, selection.lengths
    _check_batch(cache, selection.query, selection.table, lengths)
    if budgets.dtype != torch.int32 or budgets.shape != lengths.shape or not budgets.is_contiguous():
        raise ValueError(f"budgets are {tuple(budgets.shape)} {budgets.dtype}; expected {tuple(lengths.shape)} int32")
    if selection.width < RESERVED_PAGES:
        raise ValueError(f"lists of {selection.width} pages have no room for the {RESERVED_PAGES} reserved ones")


def check_prompts(cache: LayerCache, attention: PromptAttention) -> None:
    """Raises ValueError when the arguments do not fit together."""
    query, table, bounds, starts = attention.query, attention.table, attention.bounds, attention.starts
    _check_cache(cache, query.dtype)
    _check_heads(cache, query)
    chunks = len(starts)
    _check_table(table, chunks)
    if any(part.dtype != torch.int32 or not part.is_contiguous() for part in (bounds, starts)) or bounds.shape != (chunks + 1,):
        raise ValueError(f"bounds are {tuple(bounds.shape)} {bounds.dtype}, starts {starts.dtype}; expected ({chunks + 1},), both int32")
    _check_window(attention.window)
    limits = bounds.tolist()
    if limits[0] != 0 or limits[-1] != len(query) or any(first >= last for first, last in pairwise(limits)):
        raise ValueError(f"bounds are {limits}; expected ascending numbers from 0 to the {len(query)} tokens")
    if bool((starts < 0).any()):
        raise ValueError(f"starts are {starts.tolist()}; a chunk begins at token 0 of its sequence at the earliest")
    longest = max(start + last - first for start, first, last in zip(starts.tolist(), limits[:-1], limits[1:], strict=True))
    if longest > table.shape[1] * cache.page_size:
        raise ValueError(f"a sequence of {longest} tokens does not fit into the {table.shape[1]} pages of its row")


def _check_cache(cache: LayerCache, dtype: torch.dtype) -> None:
    """Whether there are kernels for such a cache, and new tokens of its type."""
    _, _, page_size, head_size = cache.keys.shape
    if head_size not in HEAD_SIZES or page_size not in PAGE_SIZES or cache.keys.dtype not in DTYPES:
        raise ValueError(
            f"no kernel for heads of {head_size}, pages of {page_size} tokens and {cache.keys.dtype}: "
            f"heads {HEAD_SIZES}, pages {PAGE_SIZES}, {DTYPES}"
        )
    if cache.keys.dtype != dtype:
        raise ValueError(f"new tokens are {dtype}, the cache is {cache.keys.dtype}: they must agree")
    if cache.keys.stride() != cache.values.stride() or cache.keys.stride()[2:] != (head_size, 1) or cache.centroids.stride(2) != 1:
        raise ValueError(
            "keys and values need the same strides, and their last two dimensions contiguous; use swarm_kernels.layout.allocate"
        )


def _check_heads(cache: LayerCache, query: Tensor) -> None:
    _, heads, head_size = query.shape
    kv_heads = cache.keys.shape[1]
    if heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: a group has 1 to {MAX_GROUP} query heads")
    if head_size != cache.keys.shape[3] or query.stride(2) != 1:
        raise ValueError(f"query heads of {head_size}, cached heads of {cache.keys.shape[3]}: they must agree and be contiguous")


def _check_batch(cache: LayerCache, query: Tensor, table: Tensor, lengths: Tensor) -> None:
    _check_cache(cache, query.dtype)
    _check_heads(cache, query)
    batch = len(query)
    _check_table(table, batch)
    if lengths.dtype != torch.int32 or lengths.shape != (batch,) or not lengths.is_contiguous():
        raise ValueError(f"lengths are {tuple(lengths.shape)} {lengths.dtype}; expected ({batch},) int32")


def _check_table(table: Tensor, rows: int) -> None:
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != rows or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"the page table is {tuple(table.shape)} {table.dtype}; expected ({rows}, pages) int32, contiguous rows")


def _check_window(window: int) -> None:
    if window < 0:
        raise ValueError(f"window is {window}; 0 means none, a positive number the tokens that are visible")
