"""F-TIS: filtered truncated importance sampling (arXiv 2605.22537), as pure functions over ragged, flat tensors.

Completions lie one after the other, without padding: `theta`, `gen` and `old` have shape (T,), T tokens in all, and `lengths`, shape (C,),
says where each of the C completions ends. Groups are consecutive completions. With w the importance weight and R the policy's ratio:

    L = -sum_i keep_i * weight_i * sum_t w_t * min(R_t A_i, clip(R_t, 1 - low, 1 + high) A_i)

`completion_weights` gives weight_i, which is where GRPO, Dr. GRPO and DAPO differ. Because every completion's share of the loss is its
own, the loss of a batch is the sum of the losses of its parts, however it is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_node.learning.options import Estimator, LearningOptions
from swarm_node.learning.statistics import LossMetrics, RowStatistics, segment_sums, summarise

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated: beyond it float32 gains nothing but infinities."""


@dataclass(frozen=True)
class Loss:
    """The loss of a batch with what was seen on the way."""

    loss: Tensor
    """Scalar, differentiable with respect to theta; 0 when nothing was kept."""
    metrics: LossMetrics
    keep: Tensor
    """bool (C,)."""


def ftis_loss(
    theta: Tensor,
    gen: Tensor,
    old: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    group_sizes: Tensor,
    options: LearningOptions,
    *,
    truncated: Tensor | None = None,
    groups: int | None = None,
) -> Loss:
    """Loss and metrics of whole groups.

    Args:
        theta: Log-probs of the tokens under the policy being trained, shape (T,), with gradient.
        gen: Log-probs that the generator recorded, shape (T,).
        old: theta at the start of the step, detached, shape (T,).
        lengths: Tokens of each completion, int64 (C,), each at least 1, T in sum.
        advantages: One a completion, shape (C,).
        group_sizes: Completions of each group, int64 (P,), C in sum.
        options: Algorithm, correction, filter, normalizer.
        truncated: Which completions ended at the token limit, bool (C,); only read with `mask_truncated`.
        groups: Groups that the average counts, where that is more than P because groups without advantage were left out.
    """
    keep = keep_mask(theta, gen, lengths, advantages, options, truncated)
    weights = completion_weights(lengths, group_sizes, options, keep, groups)
    loss = partial_loss(theta, gen, old, lengths, advantages, weights, keep, options)
    rows = row_statistics(theta, gen, old, lengths, advantages, keep, options)
    return Loss(loss, summarise(rows), keep)


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
def distances(theta: Tensor, gen: Tensor, lengths: Tensor, options: LearningOptions) -> Tensor:
    """D_i, shape (C,): how far each completion is from the policy, by the options' estimator and reduction."""
    sums = segment_sums(kl_estimates(theta, gen, options.kl_estimator), lengths)
    return sums if options.kl_reduction == "sum" else sums / lengths


@torch.no_grad()
def keep_mask(
    theta: Tensor, gen: Tensor, lengths: Tensor, advantages: Tensor, options: LearningOptions, truncated: Tensor | None = None
) -> Tensor:
    """Which completions give gradient, bool (C,): the filter's decision, always on whole completions.

    A completion whose log-probs are not all finite is dropped under every setting.
    """
    distance = distances(theta, gen, lengths, options)
    keep = distance.isfinite()
    if options.off_policy.startswith("f-"):
        no_gain, far = advantages <= 0, distance > options.kl_threshold
        if options.filter == "both":
            keep = keep & ~(no_gain & far)
        elif options.filter == "either":
            keep = keep & ~(no_gain | far)
    if options.mask_truncated and truncated is not None:
        keep = keep & ~truncated
    return keep


def completion_weights(lengths: Tensor, group_sizes: Tensor, options: LearningOptions, keep: Tensor, groups: int | None = None) -> Tensor:
    """weight_i, float64 (C,): by how much each token of completion i counts, if the completion is kept.

    - `grpo`: 1 / (groups * N * |a_i|): mean over tokens, over the group's N completions, over groups (arXiv 2402.03300, eq. 3).
    - `dr-grpo`: 1 / (groups * N * constant): long wrong answers are not excused by their length (arXiv 2503.20783).
    - `dapo`: 1 / tokens of the batch: every token counts the same (arXiv 2503.14476, eq. 8).

    N is each group's own, so that no group weighs more because it is larger, except under `dapo`, which asks for that. Normalizer
    `all` counts every completion, and `groups` groups; it never reads `keep`. Normalizer `kept` counts kept completions, and groups
    that have one.
    """
    if options.normalizer == "all":
        counted = torch.ones_like(lengths, dtype=torch.float64)
        counted_groups: Tensor | int = len(group_sizes) if groups is None else groups
    else:
        counted = keep.to(torch.float64)
        counted_groups = (segment_sums(counted, group_sizes) > 0).sum().clamp(min=1)
    if options.algorithm == "dapo":
        return torch.ones_like(counted) / (counted * lengths).sum().clamp(min=1)
    members = segment_sums(counted, group_sizes).clamp(min=1).repeat_interleave(group_sizes)
    tokens = lengths if options.algorithm == "grpo" else torch.full_like(lengths, options.constant_length)
    return 1 / (counted_groups * members * tokens)


def surrogate(theta: Tensor, gen: Tensor, old: Tensor, advantages: Tensor, options: LearningOptions) -> Tensor:
    """What each token contributes before weighting, shape (T,); `advantages` are per token here.

    The importance weight w carries no gradient.
    """
    correction = options.off_policy.removeprefix("f-")
    # VIS differentiates through the whole ratio to the generator; the others only through the ratio to the step's start.
    ratio = _exp(theta - gen) if correction == "vis" else _exp(theta - old)
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.ratio_cap)
    value = torch.minimum(ratio * advantages, clipped * advantages)
    return _exp(theta.detach() - gen).clamp(max=options.truncation) * value if correction == "tis" else value


def partial_loss(
    theta: Tensor,
    gen: Tensor,
    old: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    weights: Tensor,
    keep: Tensor,
    options: LearningOptions,
) -> Tensor:
    """The loss of any subset of a batch's completions, given `completion_weights` of the whole batch; sums to the batch's loss.

    Dropped completions are cut out before any arithmetic and not multiplied by zero, so that not even their NaN reaches the loss or
    the gradient.
    """
    chosen = keep.repeat_interleave(lengths)
    expand = lengths[keep]
    per_token = advantages[keep].to(theta.dtype).repeat_interleave(expand)
    factor = weights[keep].to(theta.dtype).repeat_interleave(expand)
    return -(factor * surrogate(theta[chosen], gen[chosen], old[chosen], per_token, options)).sum()


@torch.no_grad()
def row_statistics(
    theta: Tensor, gen: Tensor, old: Tensor, lengths: Tensor, advantages: Tensor, keep: Tensor, options: LearningOptions
) -> RowStatistics:
    """What the metrics are made of, one row a completion, dropped ones included. Tensors on the CPU."""
    weight = _exp(theta - gen)
    capped = weight.clamp(max=options.truncation)
    ratio = weight if options.off_policy.removeprefix("f-") == "vis" else _exp(theta - old)
    gain = advantages.repeat_interleave(lengths)
    clipped = ((gain > 0) & (ratio > 1 + options.ratio_cap)) | ((gain < 0) & (ratio < 1 - options.clip_low))
    estimates = kl_estimates(theta, gen, options.kl_estimator)
    columns = torch.stack([weight, weight > options.truncation, clipped, estimates, capped, capped * -theta])
    sums = torch.stack([segment_sums(column, lengths) for column in columns.double()])
    largest = torch.segment_reduce(weight, "max", lengths=lengths)
    return RowStatistics(keep, lengths, distances(theta, gen, lengths, options).double(), largest.double(), *sums)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
