"""F-TIS: filtered truncated importance sampling (arXiv 2605.22537), as pure functions over ragged, flat tensors.

Completions lie one after the other, without padding (`Tokens`). With w the importance weight and R the policy's ratio:

    L = -sum_i keep_i * weight_i * sum_t w_t * min(R_t A_i, clip(R_t, 1 - low, 1 + high) A_i)

`completion_weights` gives weight_i, which is where GRPO, Dr. GRPO and DAPO differ. Because every completion's share of the loss is its
own, the loss of a batch is the sum of the losses of its parts, however it is cut into micro-batches. Only under normalizer `kept` does a
part's loss need all of them first: `keep_mask` of every part, for the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_node.learning.options import Estimator, LearningOptions
from swarm_node.learning.statistics import RowStatistics, segment_sums

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated: beyond it float32 gains nothing but infinities."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """What the loss reads of C completions with T tokens in all: a batch, or a micro-batch."""

    theta: Tensor
    """Log-probs under the policy being trained, (T,); where a gradient is wanted, with one."""
    gen: Tensor
    """Log-probs that the generator recorded, (T,)."""
    old: Tensor
    """theta at the start of the step, (T,), detached."""
    lengths: Tensor
    """Tokens of each completion, int64 (C,), each at least 1, T in sum."""
    advantages: Tensor
    """(C,)."""
    truncated: Tensor
    """Which completions ended at the token limit, bool (C,)."""

    def select(self, keep: Tensor) -> Tokens:
        """The completions where `keep`, bool (C,), holds."""
        chosen = keep.repeat_interleave(self.lengths)
        flat = (part[chosen] for part in (self.theta, self.gen, self.old))
        return Tokens(*flat, *(part[keep] for part in (self.lengths, self.advantages, self.truncated)))


def ftis_loss(tokens: Tokens, weights: Tensor, options: LearningOptions) -> tuple[Tensor, RowStatistics]:
    """The loss of any of a batch's completions, and what was seen on the way: one row a completion, on the CPU, dropped ones included.

    Args:
        tokens: Of these completions.
        weights: Of these completions, from `completion_weights` of the whole batch, (C,). Under normalizer `kept` they say as well which
            completions were dropped: those that weigh 0.
        options: Filter, truncation and normalizer.

    Returns:
        A scalar, differentiable with respect to theta, and 0 when nothing was kept; the losses of a batch's parts add up to its own. And
        the rows.
    """
    keep = weights > 0 if options.normalizer == "kept" else keep_mask(tokens, options)
    # Dropped completions are cut out before any arithmetic and not multiplied by zero, so that not even their NaN reaches the loss or the
    # gradient.
    kept = tokens.select(keep)
    factor = weights[keep].to(kept.theta.dtype).repeat_interleave(kept.lengths)
    return -(factor * surrogate(kept, options)).sum(), row_statistics(tokens, keep, options)


def kl_estimates(theta: Tensor, gen: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimates of KL(gen || theta) from samples of gen, shape (T,); x = gen - theta. k1 and k3 are unbiased for x's mean; k2 and
    k3 are never negative. On samples of gen the mean of k3 is chi^2(gen || theta) - KL(gen || theta), so it is heavy-tailed."""
    x = gen - theta
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    # Bounded as a whole and not only in its exponential, or -x would outgrow it. What is not finite stays so, for `keep_mask` to drop.
    bounded = x.clamp(max=EXPONENT_LIMIT)
    return torch.where(x.isfinite(), _exp(bounded) - bounded - 1, x.abs())


@torch.no_grad()
def distances(tokens: Tokens, options: LearningOptions) -> Tensor:
    """D_i, shape (C,): how far each completion is from the policy, by the options' estimator and reduction."""
    sums = segment_sums(kl_estimates(tokens.theta, tokens.gen, options.kl_estimator), tokens.lengths)
    return sums if options.kl_reduction == "sum" else sums / tokens.lengths


@torch.no_grad()
def keep_mask(tokens: Tokens, options: LearningOptions) -> Tensor:
    """Which completions give gradient, bool (C,): the filter's decision, always on whole completions.

    A completion whose log-probs are not all finite is dropped under every setting.
    """
    distance = distances(tokens, options)
    keep = distance.isfinite()
    if options.off_policy.startswith("f-"):
        no_gain, far = tokens.advantages <= 0, distance > options.kl_threshold
        if options.filter == "both":
            keep = keep & ~(no_gain & far)
        elif options.filter == "either":
            keep = keep & ~(no_gain | far)
    return keep & ~tokens.truncated if options.mask_truncated else keep


def completion_weights(lengths: Tensor, group_sizes: Tensor, groups: int, keep: Tensor, options: LearningOptions) -> Tensor:
    """weight_i, float64 (C,): by how much each token of completion i counts, if the completion is kept.

    - `grpo`: 1 / (groups * N * |a_i|): mean over tokens, over the group's N completions, over groups (arXiv 2402.03300, eq. 3).
    - `dr-grpo`: 1 / (groups * N * constant): long wrong answers are not excused by their length (arXiv 2503.20783).
    - `dapo`: 1 / tokens of the batch: every token counts the same (arXiv 2503.14476, eq. 8).

    N is each group's own, so that no group weighs more because it is larger, except under `dapo`, which asks for that. Normalizer
    `all` counts every completion, and `groups` groups; it never reads `keep`. Normalizer `kept` counts kept completions, and groups
    that have one; the others weigh 0.

    Args:
        lengths: Tokens of each completion of the batch, int64 (C,).
        group_sizes: Completions of each group, int64 (P,), C in sum.
        groups: Groups that the average counts; more than P where groups without advantage were left out.
        keep: `keep_mask` of the batch, bool (C,).
        options: Algorithm, normalizer and constant.
    """
    if options.normalizer == "all":
        counted = torch.ones_like(lengths, dtype=torch.float64)
        counted_groups: Tensor | int = groups
    else:
        counted = keep.to(torch.float64)
        counted_groups = (segment_sums(counted, group_sizes) > 0).sum().clamp(min=1)
    if options.algorithm == "dapo":
        return counted / (counted * lengths).sum().clamp(min=1)
    members = segment_sums(counted, group_sizes).clamp(min=1).repeat_interleave(group_sizes)
    tokens = lengths if options.algorithm == "grpo" else torch.full_like(lengths, options.constant_length)
    return counted / (counted_groups * members * tokens)


def surrogate(tokens: Tokens, options: LearningOptions) -> Tensor:
    """What each token contributes before weighting, shape (T,). The importance weight w carries no gradient."""
    theta, correction = tokens.theta, options.off_policy.removeprefix("f-")
    # VIS differentiates through the whole ratio to the generator; the others only through the ratio to the step's start.
    ratio = _exp(theta - tokens.gen) if correction == "vis" else _exp(theta - tokens.old)
    advantages = tokens.advantages.to(theta.dtype).repeat_interleave(tokens.lengths)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.ratio_cap)
    value = torch.minimum(ratio * advantages, clipped * advantages)
    return _exp(theta.detach() - tokens.gen).clamp(max=options.truncation) * value if correction == "tis" else value


@torch.no_grad()
def row_statistics(tokens: Tokens, keep: Tensor, options: LearningOptions) -> RowStatistics:
    """What the metrics are made of, one row a completion, dropped ones included. Tensors on the CPU."""
    theta, lengths = tokens.theta, tokens.lengths
    weight = _exp(theta - tokens.gen)
    capped = weight.clamp(max=options.truncation)
    ratio = weight if options.off_policy.removeprefix("f-") == "vis" else _exp(theta - tokens.old)
    gain = tokens.advantages.repeat_interleave(lengths)
    clipped = ((gain > 0) & (ratio > 1 + options.ratio_cap)) | ((gain < 0) & (ratio < 1 - options.clip_low))
    estimates = kl_estimates(theta, tokens.gen, options.kl_estimator)
    columns = torch.stack([weight, weight > options.truncation, clipped, estimates, capped, capped * -theta])
    sums = torch.stack([segment_sums(column, lengths) for column in columns.double()])
    largest = torch.segment_reduce(weight, "max", lengths=lengths)
    return RowStatistics(keep, lengths, distances(tokens, options).double(), largest.double(), *sums)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
