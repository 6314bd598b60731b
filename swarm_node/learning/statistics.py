"""What the loss saw: one row a completion, which micro-batches append to one another, and the metrics that rows add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


def segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums over consecutive segments: values (T,), lengths int64 (C,), T in sum; returns (C,).

    Deterministic, and NaN stays in its segment.
    """
    return torch.segment_reduce(values, "sum", lengths=lengths)


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """One entry a completion; float64 (C,) where nothing else is said."""

    keep: Tensor
    """bool."""
    lengths: Tensor
    """Tokens, int64."""
    distance: Tensor
    """D_i, as the filter compares it with its threshold."""
    ratio_max: Tensor
    ratio_sum: Tensor
    truncated: Tensor
    """Tokens whose importance weight was cut at C."""
    clipped: Tensor
    """Tokens at which PPO's clip was active."""
    kl_sum: Tensor
    weight_sum: Tensor
    """Sum of truncated importance weights."""
    surprise_sum: Tensor
    """Sum of truncated importance weight times -log policy."""

    def select(self, mask: Tensor) -> Self:
        """The rows where `mask`, bool (C,), holds."""
        return type(self)(*(getattr(self, field.name)[mask] for field in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Rows of several micro-batches, in their order; `parts` is not empty."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@dataclass(frozen=True)
class LossMetrics:
    """Metrics over completions. Averages are NaN where there was nothing to average; log quantities are in nats."""

    completions: int = 0
    kept: int = 0
    """Completions that gave gradient."""
    filtered: int = 0
    """Completions that gave none."""
    nonfinite: int = 0
    """Filtered because a log-prob was not finite; they are left out of every average below."""
    tokens: int = 0
    """Completion tokens, filtered ones included."""
    kept_share: float = float("nan")
    ratio_mean: float = float("nan")
    """exp(theta - gen) before truncation, mean over tokens."""
    ratio_max: float = float("nan")
    ratio_truncated_share: float = float("nan")
    """Share of tokens whose weight was cut at C."""
    clip_fraction: float = float("nan")
    """Share of tokens at which PPO's clip was active."""
    approx_kl: float = float("nan")
    """The options' KL estimate, mean over a completion's tokens, averaged over completions."""
    approx_kl_sum: float = float("nan")
    """The same, summed over a completion's tokens, averaged over completions."""
    distance_max: float = float("nan")
    """Largest distance of a completion, in the unit of `kl_threshold`."""
    entropy: float = float("nan")
    """Entropy of the policy a token, estimated by truncated importance weighting of -log policy."""


def summarise(rows: RowStatistics) -> LossMetrics:
    """The metrics of any set of completions."""
    completions, kept = len(rows.keep), int(rows.keep.sum())
    finite = rows.select(rows.distance.isfinite())
    counts = {
        "completions": completions,
        "kept": kept,
        "filtered": completions - kept,
        "nonfinite": completions - len(finite.keep),
        "tokens": int(rows.lengths.sum()),
    }
    if completions == 0:
        return LossMetrics()
    if len(finite.keep) == 0:
        return LossMetrics(**counts, kept_share=kept / completions)
    tokens = int(finite.lengths.sum())
    return LossMetrics(
        **counts,
        kept_share=kept / completions,
        ratio_mean=float(finite.ratio_sum.sum()) / tokens,
        ratio_max=float(finite.ratio_max.max()),
        ratio_truncated_share=float(finite.truncated.sum()) / tokens,
        clip_fraction=float(finite.clipped.sum()) / tokens,
        approx_kl=float((finite.kl_sum / finite.lengths).mean()),
        approx_kl_sum=float(finite.kl_sum.mean()),
        distance_max=float(finite.distance.max()),
        entropy=float(finite.surprise_sum.sum() / finite.weight_sum.sum()),
    )
