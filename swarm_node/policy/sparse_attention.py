"""What the sparse engine computes token by token, in one teacher-forced forward that gradients can flow through.

Source: arXiv 2606.08446 (Sparrow). Prompt positions and the first layers are dense. For every other position, layer and KV head the pages
are chosen as `swarm_kernels/naive/selection.py` says: by the group's mean query against the mean key of each page, besides the first page
and the last two. Choosing has no gradient; attending to what was chosen has. Layers with a sliding window that is shorter than the
sequence stay dense within it, as in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from swarm_kernels.layout import RESERVED_PAGES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from swarm_node.policy.parts import body

PAGE_SIZE = 16
DENSE_LAYERS = 2
"""The first layers stay dense."""
QUERIES = 256
"""Positions whose mask over all keys may exist at once."""
_NAME = "swarm_sparse"


@dataclass(frozen=True, eq=False)
class _Plan:
    """What one forward attends to."""

    prompt: int
    """P: positions that are dense throughout."""
    budgets: Tensor
    """(N,) int64 on the CPU: pages besides the reserved three that position P + i may read, wherever that is fewer than there are."""


_PLAN: ContextVar[_Plan] = ContextVar("sparse attention plan")


def completion_hidden(model: nn.Module, prompt: Tensor, completion: Tensor, budgets: NDArray[np.integer] | None = None) -> Tensor:
    """Hidden states, after the body's final norm, that predict each token of one completion.

    Args:
        model: A causal language model whose attention goes through transformers' interface, perhaps wrapped by peft.
        prompt: (P,) token ids, P >= 1.
        completion: (T,) token ids, T >= 1.
        budgets: (T - 1,): pages besides the reserved three that the positions P .. P + T - 2 may read, those where the completion's
            tokens are read back; None: dense attention.

    Returns:
        (T, H) in the model's type; differentiable unless gradients are off.

    Raises:
        ValueError: no prompt or no completion, or another number of budgets than of positions.
    """
    if len(prompt) < 1 or len(completion) < 1:
        raise ValueError(f"{len(prompt)} prompt and {len(completion)} completion tokens; both need at least one")
    ids = torch.cat([prompt, completion[:-1]]).to(next(model.parameters()).device)[None]
    transformer = body(model)
    if budgets is None:
        hidden: Tensor = transformer(input_ids=ids, use_cache=False).last_hidden_state
    else:
        if len(budgets) != len(completion) - 1:
            raise ValueError(f"{len(budgets)} budgets for a completion of {len(completion)} tokens: give one less than tokens")
        with sparse_attention(model, len(prompt), budgets):
            hidden = transformer(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0, len(prompt) - 1 :]


@contextmanager
def sparse_attention(model: nn.Module, prompt: int, budgets: NDArray[np.integer]) -> Iterator[None]:
    """Inside, the model's forward over one sequence of `prompt` + len(budgets) tokens (no padding, no cache) is sparse.

    Backward may follow outside. The model is as before when the context ends.

    Raises:
        ValueError: an empty prompt, or a negative budget.
    """
    if prompt < 1 or (len(budgets) and int(np.min(budgets)) < 0):
        raise ValueError(f"a prompt of {prompt} tokens and budgets of {np.min(budgets, initial=0)} pages and more: need 1 and 0 at least")
    config: Any = body(model).config
    before = config._attn_implementation
    token = _PLAN.set(_Plan(prompt, torch.from_numpy(np.array(budgets, dtype=np.int64))))
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _PLAN.reset(token)


def sparse_positions(prompt: int, budgets: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which of the positions `prompt` .. `prompt` + N - 1 have more pages than their budgets (N,) let them read."""
    pages = -(-(prompt + np.arange(len(budgets)) + 1) // PAGE_SIZE)
    return pages > np.asarray(budgets, dtype=np.int64) + RESERVED_PAGES


def choose_pages(query: Tensor, keys: Tensor, start: int, budgets: Tensor) -> Tensor:
    """Which pages each position reads.

    Args:
        query: (query heads, N, D), rotated, of the positions start .. start + N - 1.
        keys: (KV heads, at least start + N, D), rotated.
        start: Position of the first query.
        budgets: (N,) int64 pages besides the reserved three.

    Returns:
        (KV heads, N, pages up to the last position) bool.
    """
    kv_heads, size = keys.shape[0], keys.shape[2]
    length = start + query.shape[1]
    complete, pages = length // PAGE_SIZE, -(-length // PAGE_SIZE)
    mean = query.float().unflatten(0, (kv_heads, -1)).mean(dim=1)
    # The engine stores centroids in the cache's type.
    centroids = keys[:, : complete * PAGE_SIZE].float().view(kv_heads, complete, PAGE_SIZE, size).mean(dim=2).to(keys.dtype).float()
    scores = functional.pad(mean @ centroids.transpose(1, 2), (0, pages - complete))
    page = torch.arange(pages, device=keys.device)
    counts = (torch.arange(start, length, device=keys.device) // PAGE_SIZE + 1)[:, None]
    inside = page < counts
    scores = scores.masked_fill(inside & ((page == 0) | (page >= counts - 2)), torch.inf).masked_fill(~inside, -torch.inf)
    # A stable sort lets the earlier of two equal pages win.
    order = scores.sort(dim=2, descending=True, stable=True).indices
    kept = (page < budgets.to(keys.device)[:, None] + RESERVED_PAGES).expand_as(order)
    return torch.zeros_like(kept).scatter(2, order, kept) & inside


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (1, query heads, L, D), key and value (1, KV heads, L, D); output (1, L, query heads, D)."""
    plan = _PLAN.get()
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    length = query.shape[2]
    if unknown or attention_mask is not None or dropout or query.shape[0] != 1 or key.shape[2] != length:
        raise ValueError(
            f"sparse attention is for one sequence without mask, cache and dropout, and knows no {', '.join(unknown) or 'such arguments'}"
        )
    if length != plan.prompt + len(plan.budgets):
        raise ValueError(f"{length} tokens, and sparse attention was set up for {plan.prompt} + {len(plan.budgets)}")
    window = sliding_window if sliding_window is not None and sliding_window < length else 0
    index: Any = module.layer_idx
    sparse = sparse_positions(plan.prompt, plan.budgets.numpy())
    # Everything before the first sparse position is dense, in a windowed layer everything.
    first = plan.prompt + int(sparse.argmax()) if sparse.any() and index >= DENSE_LAYERS and not window else length
    query, key, value = query[0], key[0], value[0]
    if window:
        parts = [_masked(query, key, value, start, None, scaling, window) for start in range(0, length, QUERIES)]
    else:
        parts = [_causal(query[:, :first], key[:, :first], value[:, :first], scaling)]
        for start in range(first, length, QUERIES):
            stop = min(start + QUERIES, length)
            with torch.no_grad():
                chosen = choose_pages(query[:, start:stop], key, start, plan.budgets[start - plan.prompt : stop - plan.prompt])
            parts.append(_masked(query, key, value, start, chosen, scaling, 0))
    return torch.cat(parts, dim=1).transpose(0, 1)[None], None


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Dense attention of (query heads, N, D) over (KV heads, N, D), as (query heads, N, D)."""
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    return functional.scaled_dot_product_attention(query[None], keys[None], values[None], is_causal=True, scale=scale)[0]


def _masked(query: Tensor, keys: Tensor, values: Tensor, start: int, chosen: Tensor | None, scale: float, window: int) -> Tensor:
    """`_causal` for the QUERIES positions from `start` on, over chosen pages or a window. The backward pass makes the mask again: kept for
    every layer it would be as large as dense attention's scores."""
    stop = min(start + QUERIES, query.shape[1])
    arguments = query[:, start:stop], keys[:, :stop], values[:, :stop], start, chosen, scale, window
    if torch.is_grad_enabled():
        result: Tensor = checkpoint(_attend_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        return result
    return _attend_chunk(*arguments)


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, start: int, chosen: Tensor | None, scale: float, window: int) -> Tensor:
    kv_heads, length = keys.shape[:2]
    column = torch.arange(length, device=keys.device)
    row = torch.arange(start, length, device=keys.device)[:, None]
    seen = column <= row
    if window:
        seen = seen & (column > row - window)
    if chosen is not None:
        seen = seen & chosen.repeat_interleave(PAGE_SIZE, dim=2)[..., :length]
    grouped = query.unflatten(0, (kv_heads, -1))
    # KV heads are the batch, the group's heads share its keys and its mask.
    mask = seen[:, None] if chosen is not None else seen
    keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (keys, values))
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).flatten(0, 1)


AttentionInterface.register(_NAME, _attend)
