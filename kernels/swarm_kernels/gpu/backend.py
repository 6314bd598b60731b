"""The Triton kernels behind the interface of all backends.

Nothing here waits for the device, so a decode step can be captured in a graph.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor

from swarm_kernels.checks import check_append, check_attend, check_select
from swarm_kernels.gpu.append import append_tokens, write_centroids
from swarm_kernels.gpu.attention import attend_split, merge_splits
from swarm_kernels.gpu.selection import keep_best, score_pages
from swarm_kernels.interface import Attention, DecodeStep, NewTokens, Selection, compose_layer
from swarm_kernels.layout import RESERVED_PAGES, LayerCache
from swarm_kernels.naive.layers import PlainLayers

BLOCK_TOKENS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
"""Tokens whose keys one iteration of attention holds; float32 takes no tensor cores, and more registers."""
ATTEND_WARPS = 4
MIN_SPLIT_PAGES = 4
"""Of a split, when their number is chosen here: a smaller one costs more to merge than to read."""
SCORE_BLOCK = 64
"""Pages that one program scores."""
INTERPRETED = not isinstance(attend_split, triton.JITFunction)
"""Whether Triton only interprets (TRITON_INTERPRET=1, on CPU tensors): for tests."""
ATTEND_STAGES = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 1}
"""Blocks of keys and values in flight; more would spill in float32."""
PROGRAMS_A_PROCESSOR = 2
"""Splits are added until every multiprocessor of the device has this many programs."""


class TritonKernels(PlainLayers):
    """See `swarm_kernels.interface.Kernels`."""

    name = "triton"

    def append(self, cache: LayerCache, tokens: NewTokens) -> None:
        """See `Kernels.append`. Centroids of the pages that became full are written by a second kernel."""
        check_append(cache, tokens)
        keys, values, slots, query, cosines, sines = tokens.keys, tokens.values, tokens.slots, tokens.query, tokens.cosines, tokens.sines
        count, kv_heads, size = keys.shape
        rotate = cosines is not None
        query_heads = query.shape[1] if query is not None and rotate else 0
        to_rotate = keys if query is None else query
        append_tokens[(count, kv_heads + query_heads)](
            keys,
            values,
            to_rotate,
            keys if cosines is None else cosines,
            keys if sines is None else sines,
            slots,
            cache.keys,
            cache.values,
            *keys.stride()[:2],
            *values.stride()[:2],
            *to_rotate.stride()[:2],
            0 if cosines is None else cosines.stride(0),
            *cache.keys.stride()[:2],
            KV_HEADS=kv_heads,
            HEAD=size,
            HEAD_PADDED=triton.next_power_of_2(size),
            PAGE=cache.page_size,
            ROTATE=rotate,
            num_warps=1,
        )
        write_centroids[(count, kv_heads)](
            slots,
            cache.keys,
            cache.centroids,
            *cache.keys.stride()[:2],
            *cache.centroids.stride()[:2],
            HEAD=size,
            HEAD_PADDED=triton.next_power_of_2(size),
            PAGE=cache.page_size,
            num_warps=1,
        )

    def select_pages(self, cache: LayerCache, selection: Selection) -> Tensor:
        """See `Kernels.select_pages`. One kernel scores, another one sorts out the best."""
        check_select(cache, selection)
        query, table, lengths, width = selection.query, selection.table, selection.lengths, selection.width
        batch, heads, size = query.shape
        kv_heads, most = cache.keys.shape[1], table.shape[1]
        scores = torch.empty(batch, kv_heads, most, dtype=torch.float32, device=query.device)
        lists = torch.empty(batch, kv_heads, width, dtype=torch.int32, device=query.device)
        score_pages[(batch, kv_heads, triton.cdiv(most, SCORE_BLOCK))](
            query,
            cache.centroids,
            table,
            lengths,
            scores,
            *query.stride()[:2],
            *cache.centroids.stride()[:2],
            table.stride(0),
            most,
            GROUP=heads // kv_heads,
            HEAD=size,
            HEAD_PADDED=triton.next_power_of_2(size),
            PAGE=cache.page_size,
            BLOCK=SCORE_BLOCK,
            num_warps=4,
        )
        keep_best[(batch, kv_heads)](
            scores,
            lengths,
            selection.budgets,
            lists,
            most,
            width,
            PAGE=cache.page_size,
            RESERVED=RESERVED_PAGES,
            PADDED=triton.next_power_of_2(max(most, width)),
            num_warps=4,
        )
        return lists

    def attend(self, cache: LayerCache, attention: Attention) -> tuple[Tensor, Tensor]:
        """See `Kernels.attend`. Splits of a sequence are merged by a second kernel."""
        check_attend(cache, attention)
        query, table, pages = attention.query, attention.table, attention.pages
        batch, heads, size = query.shape
        kv_heads = cache.keys.shape[1]
        width = table.shape[1] if pages is None else pages.shape[2]
        splits = attention.splits or choose_splits(batch * kv_heads, width, query.device)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(batch, heads, dtype=torch.float32, device=query.device)
        parts = (batch, heads, splits if splits > 1 else 0)
        sums = torch.empty(*parts, size, dtype=torch.float32, device=query.device)
        stats = torch.empty(*parts, 2, dtype=torch.float32, device=query.device)
        attend_split[(batch, kv_heads, splits)](
            query,
            cache.keys,
            cache.values,
            table,
            attention.lengths,
            table if pages is None else pages,
            out,
            lse,
            sums,
            stats,
            attention.scale / math.log(2),
            attention.window,
            width,
            splits,
            *query.stride()[:2],
            *cache.keys.stride()[:2],
            table.stride(0),
            *((0, 0) if pages is None else pages.stride()[:2]),
            GROUP=heads // kv_heads,
            HEAD=size,
            HEAD_PADDED=triton.next_power_of_2(size),
            PAGE=cache.page_size,
            BLOCK=BLOCK_TOKENS[query.dtype],
            LISTED=pages is not None,
            WHOLE=splits == 1,
            WIDEN=INTERPRETED and query.dtype == torch.bfloat16,
            num_warps=ATTEND_WARPS,
            num_stages=ATTEND_STAGES[query.dtype],
        )
        if splits > 1:
            merge_splits[(batch * heads,)](
                out,
                lse,
                sums,
                stats,
                splits,
                HEAD=size,
                HEAD_PADDED=triton.next_power_of_2(size),
                SPLITS_PADDED=triton.next_power_of_2(splits),
                num_warps=4,
            )
        return out, lse

    def decode_layer(
        self, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, *, sparse: bool, window: int = 0
    ) -> Tensor:
        """See `Kernels.decode_layer`. The three kernels, one after the other."""
        return compose_layer(self, step, cache, query, keys, values, sparse, window)


def choose_splits(pairs: int, pages: int, device: torch.device) -> int:
    """Splits for a batch of (sequence, KV head) pairs whose longest list has `pages` entries."""
    wanted = -(-PROGRAMS_A_PROCESSOR * _processors(device) // max(pairs, 1))
    return max(1, min(wanted, -(-pages // MIN_SPLIT_PAGES), 64))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
