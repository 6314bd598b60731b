"""Acceptance: how much of the dense distribution a sparse one covers, token by token (arXiv 2606.08446).

    acceptance = Σ_v min(p_dense(v), p_sparse(v)) = 1 - total variation

over the whole vocabulary, at the sampling temperature. It is the probability that speculative sampling would accept a sparse token. The
statistic that is held is its 5th percentile, per bin of positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_node.policy.growing_cache import GrowingLayer, growing_cache
from swarm_node.policy.parts import body, cache_argument, evaluating, head, unwrap
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import Top

ROWS = 64
"""Positions whose probabilities exist at once: 64 of 150,000 ids are 40 MB a side."""
TOP = 20


def exact_acceptance(dense: Tensor, sparse: Tensor, temperature: float, rows: int = ROWS) -> Tensor:
    """Acceptance of each position from the logits of both sides, in float32.

    dense, sparse: (T, V), before the temperature, of any floating type and device; the result lies where `dense` does.
    rows: positions at a time, which bounds the memory.

    Returns (T,) in [0, 1]. Raises ValueError when the shapes differ.
    """
    if dense.shape != sparse.shape:
        raise ValueError(f"dense logits of shape {tuple(dense.shape)} and sparse ones of {tuple(sparse.shape)}: give the same positions")
    parts = [
        torch.minimum(_probabilities(ours, temperature), _probabilities(theirs.to(ours.device), temperature)).sum(-1)
        for ours, theirs in zip(dense.split(rows), sparse.split(rows), strict=True)
    ]
    return torch.cat(parts).clamp(max=1.0) if parts else dense.new_empty(0, dtype=torch.float32)


def top_logprobs(logits: Tensor, temperature: float, k: int = TOP, rows: int = ROWS) -> Top:
    """The k most probable tokens of each position and their log-probs under softmax(logits / temperature). logits (T, V)."""
    tops = []
    for piece in logits.split(rows):
        scaled = piece.float() / temperature
        values, ids = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
        tops.append((ids, values - scaled.logsumexp(-1, keepdim=True)))
    return Top(torch.cat([ids for ids, _ in tops]), torch.cat([logprobs for _, logprobs in tops]))


def lower_bound(dense: Top, sparse: Top) -> Tensor:
    """What the top tokens of both sides alone prove of the acceptance, (T,): tokens that only one side lists count nothing."""
    same = dense.ids[:, :, None] == sparse.ids[:, None, :]
    smaller = torch.minimum(dense.logprobs[:, :, None], sparse.logprobs[:, None, :]).exp()
    return torch.where(same, smaller, 0.0).sum((1, 2)).clamp(max=1.0)


@torch.inference_mode()
def rescore(
    policy: Policy, prompt: NDArray[np.int32], completions: Sequence[tuple[NDArray[np.int32], Tensor | Top]], temperature: float
) -> list[NDArray[np.float32]]:
    """Acceptance of sampled completions: the policy scores them densely, once, and is compared with what they were drawn from.

    Several completions of one prompt share its keys and values, so a long prompt is computed once.

    Args:
        policy: Scores densely.
        prompt: (P,) token ids, P >= 1.
        completions: Pairs of token ids (T,) and the logits (T, V) that they were drawn from, before the temperature; or the top tokens of
            those, at the temperature.
        temperature: That they were drawn at.

    Returns:
        One array (T,) a completion: acceptance, or its lower bound where only the top tokens are known. The first token was drawn from the
        prefill, which is dense.
    """
    with evaluating(policy.model):
        tokens = [torch.from_numpy(ids.astype(np.int64)) for ids, _ in completions]
        project = head(policy.model)
        results = []
        for hidden, (_, sparse) in zip(_hidden(policy, torch.from_numpy(prompt.astype(np.int64)), tokens), completions, strict=True):
            parts = [
                _accepted(project(states), sparse, slice(start * ROWS, (start + 1) * ROWS), temperature)
                for start, states in enumerate(hidden.split(ROWS))
            ]
            results.append(torch.cat(parts).cpu().numpy())
        return results


def _hidden(policy: Policy, prompt: Tensor, completions: list[Tensor]) -> Iterator[Tensor]:
    """The hidden states (T, H) that predict each completion's tokens."""
    transformer, device = body(policy.model), policy.device
    cache = growing_cache(unwrap(policy.model).config)
    shared = len(completions) > 1 and len(prompt) > 1 and all(type(layer) is GrowingLayer for layer in cache.layers)
    name = cache_argument(policy.model)
    if shared:
        transformer(input_ids=prompt[None, :-1].to(device), use_cache=True, **{name: cache})
    for tokens in completions:
        if shared:
            ids = torch.cat([prompt[-1:], tokens[:-1]])
            # Without position ids some families would count from 0 again.
            positions = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(ids), device=device)[None]
            output = transformer(input_ids=ids[None].to(device), position_ids=positions, use_cache=True, **{name: cache})
            yield output.last_hidden_state[0]
            cache.crop(-len(ids))
        else:
            ids = torch.cat([prompt, tokens[:-1]])
            yield transformer(input_ids=ids[None].to(device), use_cache=False).last_hidden_state[0, len(prompt) - 1 :]


def _accepted(dense: Tensor, sparse: Tensor | Top, rows: slice, temperature: float) -> Tensor:
    """Acceptance of some rows, or its lower bound."""
    if isinstance(sparse, Top):
        return lower_bound(top_logprobs(dense, temperature), Top(*(part[rows].to(dense.device) for part in sparse)))
    return exact_acceptance(dense, sparse[rows].to(dense.device), temperature)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.float() / temperature, dim=-1)


RESERVED = 3
"""Pages that a sparse step reads besides its budget: the first and the last two."""
TAIL = 0.05
"""The share of tokens that the percentile leaves below it: it separates stable from collapsing training, the mean does not
(arXiv 2606.08446)."""


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of some tokens."""

    mean: float
    p5: float
    count: int
    """Tokens; under 20 of them the percentile is the minimum."""


def fifth_percentile(values: NDArray[np.floating]) -> float:
    """The smallest of the values (n,) that at least 5 % of them do not exceed: the one of rank ceil(n / 20), never interpolated.

    NaN where there are none. Of up to 20 values it is the minimum: few tokens look worse than they are, never better.
    """
    if not len(values):
        return math.nan
    rank = -(-len(values) // 20) - 1
    return float(np.partition(values, rank)[rank])


def summarise(values: NDArray[np.floating]) -> Acceptance:
    """Mean, 5th percentile and count of acceptances (n,)."""
    return Acceptance(float(values.mean()) if len(values) else math.nan, fifth_percentile(values), len(values))


def is_sparse(positions: NDArray[np.int64], budgets: NDArray[np.integer] | int, page_size: int) -> NDArray[np.bool_]:
    """Whether a token at each position leaves pages unread: its sequence, itself included, has more than budget + 3. Shapes broadcast."""
    return positions // page_size + 1 > np.asarray(budgets, dtype=np.int64) + RESERVED
