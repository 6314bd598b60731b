"""The F-TIS loss: a worked example, and what must hold for every batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_node.learning.ftis import Tokens, completion_weights, distances, ftis_loss, keep_mask, kl_estimates
from swarm_node.learning.options import Algorithm, Estimator, LearningOptions, OffPolicy
from swarm_node.learning.statistics import LossMetrics, RowStatistics, summarise

PROPERTY = settings(max_examples=15, deadline=None, derandomize=True)
MODES: list[OffPolicy] = ["f-tis", "tis", "f-vis", "vis", "f-nois", "nois"]
ALGORITHMS: list[Algorithm] = ["grpo", "dr-grpo", "dapo"]
INFINITE: dict[str, Any] = {"truncation": math.inf, "kl_threshold": math.inf}


@dataclass(frozen=True)
class Outcome:
    """What a step sees of a batch."""

    loss: float
    gradient: Tensor
    """With respect to theta, (T,)."""
    keep: list[bool]
    metrics: LossMetrics


@dataclass
class Case:
    """A batch of whole groups; float64, so that comparisons can be strict."""

    tokens: Tokens
    sizes: Tensor

    def run(self, parts: Sequence[Tensor] | None = None, groups: int | None = None, **settings: Any) -> Outcome:
        """As the trainer does it: the weights of the whole batch first, then loss and gradient of one part after the other."""
        theta = self.tokens.theta.detach().clone().requires_grad_()
        tokens, options = replace(self.tokens, theta=theta), LearningOptions(**settings)
        weights = self.weights(options, keep_mask(tokens, options), groups)
        loss, statistics = 0.0, []
        for rows in parts or [torch.arange(len(tokens.lengths))]:
            part_loss, seen = ftis_loss(pick(tokens, rows), weights[rows], options)
            part_loss.backward()
            loss += part_loss.item()
            statistics.append(seen)
        assert theta.grad is not None
        whole = RowStatistics.concatenate(statistics)
        return Outcome(loss, theta.grad, whole.keep.tolist(), summarise(whole))

    def weights(self, options: LearningOptions, keep: Tensor | None = None, groups: int | None = None) -> Tensor:
        keep = torch.ones(len(self.tokens.lengths), dtype=torch.bool) if keep is None else keep
        return completion_weights(self.tokens.lengths, self.sizes, groups or len(self.sizes), keep, options)

    def change(self, **parts: Tensor) -> Case:
        return replace(self, tokens=replace(self.tokens, **parts))

    def rows(self) -> list[slice]:
        """Where each completion's tokens lie."""
        return slices(self.tokens.lengths)


def batch(theta: Tensor, gen: Tensor, old: Tensor, lengths: Sequence[int], advantages: Sequence[float], sizes: Sequence[int]) -> Case:
    """A case in which nothing was truncated."""
    counts = torch.tensor(lengths)
    return Case(
        Tokens(theta, gen, old, counts, torch.tensor(advantages, dtype=theta.dtype), torch.zeros(len(counts), dtype=torch.bool)),
        torch.tensor(sizes),
    )


def slices(lengths: Tensor) -> list[slice]:
    ends = lengths.cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]


def pick(tokens: Tokens, rows: Tensor) -> Tokens:
    """The completions `rows`, in that order, each with all its tokens."""
    places = places_of(tokens.lengths, rows)
    flat = {"theta", "gen", "old"}
    return Tokens(**{field.name: getattr(tokens, field.name)[places if field.name in flat else rows] for field in fields(Tokens)})


def places_of(lengths: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([torch.arange(int(lengths.sum()))[slices(lengths)[row]] for row in rows.tolist()])


def random_case(seed: int, drift: float = 0.5, moved: float = 0.1) -> Case:
    """1 to 4 groups of 2 to 5 completions of 1 to 7 tokens; theta is `drift` away from gen and `moved` from old."""
    draws = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high + 1, (count,), generator=draws)

    def noise(count: int) -> Tensor:
        return torch.randn(count, generator=draws, dtype=torch.float64)

    sizes = integers(2, 5, int(integers(1, 4, 1)))
    lengths = integers(1, 7, int(sizes.sum()))
    tokens = int(lengths.sum())
    theta = -noise(tokens).abs() - 0.1
    gen, old, advantages = theta + drift * noise(tokens), theta + moved * noise(tokens), noise(len(lengths))
    return batch(theta, gen, old, lengths.tolist(), advantages.tolist(), sizes.tolist())


# One prompt, two completions of two tokens, rewards 1 and 0, so A = +1/2 and -1/2.
#   completion 1: policy .6 .4, generator .4 .1, ratios 1.5 and 4; completion 2: policy .2 .1, generator .4 .2, ratios .5 and .5
EXAMPLE = batch(
    theta=torch.tensor([0.6, 0.4, 0.2, 0.1], dtype=torch.float64).log(),
    gen=torch.tensor([0.4, 0.1, 0.4, 0.2], dtype=torch.float64).log(),
    old=torch.tensor([0.6, 0.4, 0.2, 0.1], dtype=torch.float64).log(),
    lengths=[2, 2],
    advantages=[0.5, -0.5],
    sizes=[2],
)


def test_the_example_by_hand() -> None:
    result = EXAMPLE.run()
    # w = 1.5, min(4, 2) = 2, .5, .5 and R = 1 everywhere.
    # L = -1/2 [ 1/2 (1.5 * .5 + 2 * .5) + 1/2 (.5 * -.5 + .5 * -.5) ] = -1/2 [ .875 - .25 ] = -.3125
    assert result.loss == pytest.approx(-0.3125, rel=1e-12)
    # dL/dtheta_t = -1/2 * 1/2 * w_t * A: -.25 * .75, -.25 * 1, +.25 * .25, +.25 * .25
    assert result.gradient.tolist() == pytest.approx([-0.1875, -0.25, 0.0625, 0.0625], rel=1e-12)


def test_the_examples_metrics_by_hand() -> None:
    metrics = EXAMPLE.run().metrics
    # k3 = 1/ratio - 1 + log ratio: .0721318, .6362944 | .3068528, .3068528. Sums .7084262 and .6137056; means half of them.
    assert metrics.approx_kl_sum == pytest.approx((0.7084262 + 0.6137056) / 2, abs=1e-6)
    assert metrics.approx_kl == pytest.approx((0.3542131 + 0.3068528) / 2, abs=1e-6)
    assert metrics.distance_max == pytest.approx(0.3542131, abs=1e-6)
    assert metrics.ratio_mean == pytest.approx((1.5 + 4 + 0.5 + 0.5) / 4, rel=1e-12)
    assert metrics.ratio_max == pytest.approx(4, rel=1e-12)
    assert metrics.ratio_truncated_share == 0.25
    assert (metrics.completions, metrics.kept, metrics.filtered, metrics.tokens, metrics.kept_share) == (2, 2, 0, 4, 1.0)
    # Sum of w * -log policy over sum of w: (1.5 * .5108256 + 2 * .9162907 + .5 * 1.6094379 + .5 * 2.3025851) / 4.5
    assert metrics.entropy == pytest.approx((0.7662384 + 1.8325815 + 0.8047190 + 1.1512925) / 4.5, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept", "loss"),
    [
        # Distances are .354 and .307. At .3 both are far: `both` spares completion 1 for its advantage.
        ({"filter": "both", "kl_threshold": 0.3}, [True, False], -0.4375),
        ({"filter": "both", "kl_threshold": 0.3, "normalizer": "kept"}, [True, False], -0.875),
        ({"filter": "either", "kl_threshold": 0.3}, [False, False], 0.0),
        ({"filter": "either", "kl_threshold": 0.4}, [True, False], -0.4375),
        ({"filter": "none", "kl_threshold": 0.3}, [True, True], -0.3125),
        # Summed over its tokens completion 2 is .614 away.
        ({"filter": "both", "kl_threshold": 0.6, "kl_reduction": "sum"}, [True, False], -0.4375),
        ({"filter": "both", "kl_threshold": 0.62, "kl_reduction": "sum"}, [True, True], -0.3125),
    ],
)
def test_the_example_filtered(settings: dict[str, Any], kept: list[bool], loss: float) -> None:
    result = EXAMPLE.run(**settings)
    assert result.keep == kept
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert [bool(result.gradient[:2].any()), bool(result.gradient[2:].any())] == kept


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        # Lengths 1 and 3, all ratios 1, A = +-1/2: per token +.5 | -.5 -.5 -.5
        ("grpo", -(0.5 / 1 - 1.5 / 3) / 2),
        ("dr-grpo", -(0.5 / 10 - 1.5 / 10) / 2),
        ("dapo", -(0.5 - 1.5) / 4),
    ],
)
def test_algorithms_differ_in_how_tokens_are_averaged(algorithm: Algorithm, loss: float) -> None:
    theta = torch.full((4,), -1.0, dtype=torch.float64)
    case = batch(theta, theta, theta, [1, 3], [0.5, -0.5], [2])
    assert case.run(algorithm=algorithm, constant_length=10).loss == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Completion 1 has A = .5 and ratios 1.5 and 4, completion 2 has A = -.5 and ratios .5; R = 1. The gradient is -1/4 * factor * A.
        ("tis", [1.5, 2.0, 0.5, 0.5]),
        # VIS: for A > 0 ratios above 1.2 are clipped, for A < 0 those below .8: none of the four has gradient.
        ("vis", [0.0, 0.0, 0.0, 0.0]),
        ("nois", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_corrections_differ_in_what_multiplies_a_tokens_gradient(mode: OffPolicy, expected: list[float]) -> None:
    per_token = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    for name in (mode, f"f-{mode}"):
        gradient = EXAMPLE.run(off_policy=name).gradient
        assert gradient.tolist() == pytest.approx((-per_token * torch.tensor(expected, dtype=torch.float64) / 4).tolist(), rel=1e-12)


def test_vis_keeps_the_whole_ratio_within_the_clip() -> None:
    case = EXAMPLE.change(gen=EXAMPLE.tokens.theta - torch.tensor([1.1, 0.9, 1.1, 0.9], dtype=torch.float64).log())
    result = case.run(off_policy="vis")
    assert result.gradient.tolist() == pytest.approx([-1.1 / 8, -0.9 / 8, 1.1 / 8, 0.9 / 8], rel=1e-12)
    assert result.loss == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_only_f_modes_filter(mode: OffPolicy) -> None:
    kept = EXAMPLE.run(off_policy=mode, filter="both", kl_threshold=0.3).keep
    assert kept == ([True, False] if mode.startswith("f-") else [True, True])


def test_estimators_on_a_known_log_ratio() -> None:
    theta, gen = torch.tensor([-2.0, -1.0], dtype=torch.float64), torch.tensor([-1.0, -2.0], dtype=torch.float64)
    assert kl_estimates(theta, gen, "k1").tolist() == [1.0, -1.0]
    assert kl_estimates(theta, gen, "k2").tolist() == [0.5, 0.5]
    assert kl_estimates(theta, gen, "k3").tolist() == pytest.approx([math.e - 2, 1 / math.e])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_distances_reduce_the_estimates_of_each_completion(estimator: Estimator, reduction: Literal["mean", "sum"]) -> None:
    case = random_case(3)
    options = LearningOptions(kl_estimator=estimator, kl_reduction=reduction)
    estimates = kl_estimates(case.tokens.theta, case.tokens.gen, estimator)
    expected = [getattr(estimates[row], reduction)().item() for row in case.rows()]
    assert distances(case.tokens, options).tolist() == pytest.approx(expected, rel=1e-12)


def test_k1_estimates_kl_and_k3_estimates_chi_square_minus_kl_on_samples_of_the_generator() -> None:
    gen, theta = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    kl, chi_square = (gen * (gen / theta).log()).sum(), (gen.square() / theta).sum() - 1
    # The expectation over the generator's three tokens, exactly.
    assert (gen * kl_estimates(theta.log(), gen.log(), "k1")).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    assert (gen * kl_estimates(theta.log(), gen.log(), "k3")).sum().item() == pytest.approx((chi_square - kl).item(), rel=1e-12)


@PROPERTY
@given(st.integers(0, 10_000))
def test_without_truncation_and_threshold_it_is_plain_importance_sampling(seed: int) -> None:
    case = random_case(seed, moved=0.0)
    tokens, result = case.tokens, case.run(**INFINITE)
    groups, expected = len(case.sizes), torch.zeros_like(tokens.theta)
    members = case.sizes.repeat_interleave(case.sizes)
    for i, row in enumerate(case.rows()):
        ratio = (tokens.theta[row] - tokens.gen[row]).exp()
        expected[row] = -ratio * tokens.advantages[i] / (groups * members[i] * tokens.lengths[i])
    assert all(result.keep)
    torch.testing.assert_close(result.gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@PROPERTY
@given(seed=st.integers(0, 10_000))
def test_on_policy_it_is_grpo_to_the_bit_of_the_gradient(algorithm: Algorithm, seed: int) -> None:
    case = random_case(seed, drift=0.0, moved=0.0)
    corrected = case.run(algorithm=algorithm).gradient
    plain = case.run(algorithm=algorithm, off_policy="nois").gradient
    assert torch.equal(corrected, plain)
    # And plain GRPO is what its definition says.
    weights = case.weights(LearningOptions(algorithm=algorithm))
    assert torch.equal(plain, -(weights * case.tokens.advantages).repeat_interleave(case.tokens.lengths))


@PROPERTY
@given(st.integers(0, 10_000))
def test_the_importance_weight_has_no_gradient(seed: int) -> None:
    case = random_case(seed, moved=0.0)
    # If d w / d theta were not 0, the gradient would also depend on R's value through w' R; with w constant it is w * A * weight exactly.
    tokens = case.tokens
    weight = (tokens.theta - tokens.gen).exp().clamp(max=2.0)
    expected = -weight * (case.weights(LearningOptions()) * tokens.advantages).repeat_interleave(tokens.lengths)
    torch.testing.assert_close(case.run(off_policy="tis").gradient, expected, rtol=1e-12, atol=1e-15)


@PROPERTY
@given(st.integers(0, 10_000))
def test_gradient_agrees_with_finite_differences_of_the_ratio(seed: int) -> None:
    """With w frozen at theta, L(theta + h) - L(theta - h) over 2h is the gradient, clip included (away from its kinks)."""
    case = random_case(seed, moved=0.6)
    theta, step = case.tokens.theta, 1e-6
    ratio = (theta - case.tokens.old).exp()
    assume(not ((ratio - 0.8).abs() < 1e-4).any() and not ((ratio - 1.2).abs() < 1e-4).any())
    gradient = case.run(off_policy="nois").gradient
    for token in range(0, len(theta), 5):
        nudge = torch.zeros_like(theta)
        nudge[token] = step
        above, below = (case.change(theta=theta + side * nudge).run(off_policy="nois").loss for side in (1, -1))
        assert (above - below) / (2 * step) == pytest.approx(gradient[token].item(), abs=1e-7)


@PROPERTY
@given(st.integers(0, 10_000))
def test_clip_fraction_counts_exactly_the_tokens_without_gradient(seed: int) -> None:
    case = random_case(seed, moved=0.6)
    result = case.run(off_policy="tis")
    assert result.metrics.clip_fraction * len(case.tokens.theta) == pytest.approx((result.gradient == 0).sum().item())


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_filtered_rows_have_zero_gradient_and_their_nan_reaches_nobody(
    normalizer: Literal["all", "kept"], algorithm: Algorithm, poison: float
) -> None:
    case = random_case(11)
    broken, tokens = case.rows()[1], case.tokens
    theta, old = tokens.theta.clone(), tokens.old.clone()
    theta[broken] = old[broken] = poison
    masked = case.change(truncated=torch.arange(len(tokens.lengths)) == 1)
    clean = masked.run(mask_truncated=True, normalizer=normalizer, algorithm=algorithm)
    result = case.change(theta=theta, old=old).run(normalizer=normalizer, algorithm=algorithm)
    assert not result.gradient[broken].any()
    assert torch.equal(result.gradient, clean.gradient)  # the others are as if the broken completion had been masked
    assert math.isfinite(result.loss)
    assert (result.metrics.nonfinite, result.metrics.filtered) == (1, 1)
    assert math.isfinite(result.metrics.approx_kl)
    assert math.isfinite(result.metrics.ratio_mean)


@pytest.mark.parametrize("off_policy", MODES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalizer", ["all", "kept"])
def test_all_filtered_gives_loss_zero_and_no_nan(off_policy: OffPolicy, algorithm: Algorithm, normalizer: Literal["all", "kept"]) -> None:
    case = random_case(5)
    case = case.change(truncated=torch.ones(len(case.tokens.lengths), dtype=torch.bool))
    result = case.run(off_policy=off_policy, algorithm=algorithm, normalizer=normalizer, mask_truncated=True)
    assert result.loss == 0.0
    assert not result.gradient.any()
    assert result.metrics.kept_share == 0.0


def test_truncated_completions_are_masked_only_when_asked() -> None:
    case = EXAMPLE.change(truncated=torch.tensor([True, False]))
    assert case.run().keep == [True, True]
    assert case.run(mask_truncated=True).keep == [False, True]


@PROPERTY
@given(st.integers(0, 10_000), st.sampled_from(["both", "either", "none"]))
def test_the_filter_decides_per_completion_by_its_definition(seed: int, kind: str) -> None:
    case = random_case(seed)
    tokens, keep = case.tokens, case.run(filter=kind, kl_threshold=0.2).keep
    for i, row in enumerate(case.rows()):
        x = tokens.gen[row] - tokens.theta[row]
        far, no_gain = (x.exp() - x - 1).mean().item() > 0.2, tokens.advantages[i].item() <= 0
        assert keep[i] == {"both": not (far and no_gain), "either": not (far or no_gain), "none": True}[kind]


def test_no_advantage_at_all_counts_as_no_gain() -> None:
    case = EXAMPLE.change(advantages=torch.tensor([0.5, 0.0], dtype=torch.float64))
    for kind in ("both", "either"):
        assert case.run(filter=kind, kl_threshold=0.31).keep == ([True, True] if kind == "both" else [False, False])
        assert case.run(filter=kind, kl_threshold=0.3).keep == ([True, False] if kind == "both" else [False, False])


def padded_gradient(case: Case, options: LearningOptions, side: str) -> Tensor:
    """An independent version on a padded rectangle with a mask, mean over tokens, group and groups, filter `both`."""
    tokens = case.tokens
    width = int(tokens.lengths.max()) + 2
    rows = case.rows()
    places = [torch.arange(width - n, width) if side == "left" else torch.arange(n) for n in tokens.lengths.tolist()]
    theta = torch.full((len(rows), width), -7.0, dtype=torch.float64)
    gen, old, mask = theta.clone() + 1, theta.clone() - 1, torch.zeros_like(theta)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        theta[i, place], gen[i, place], old[i, place], mask[i, place] = tokens.theta[row], tokens.gen[row], tokens.old[row], 1.0
    theta.requires_grad_()
    x = gen - theta.detach()
    distance = ((x.exp() - x - 1) * mask).sum(1) / mask.sum(1)
    advantage = tokens.advantages[:, None]
    keep = ~((tokens.advantages <= 0) & (distance > options.kl_threshold))
    ratio = (theta - old).exp()
    weight = (theta.detach() - gen).exp().clamp(max=options.truncation)
    token = weight * torch.minimum(ratio * advantage, ratio.clamp(1 - options.clip_low, 1 + options.ratio_cap) * advantage) * mask
    completion = keep * token.sum(1) / mask.sum(1)
    group_means = [part.mean() for part in completion.split(case.sizes.tolist())]
    (-torch.stack(group_means).mean()).backward()
    assert theta.grad is not None
    return torch.cat([theta.grad[i, place] for i, place in enumerate(places)])


@pytest.mark.parametrize("side", ["left", "right"])
@PROPERTY
@given(seed=st.integers(0, 10_000))
def test_padding_makes_no_difference(side: str, seed: int) -> None:
    case = random_case(seed, moved=0.3)
    torch.testing.assert_close(
        case.run(kl_threshold=0.1).gradient, padded_gradient(case, LearningOptions(kl_threshold=0.1), side), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@PROPERTY
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 3))
def test_micro_batches_add_up_to_the_batch(normalizer: Literal["all", "kept"], algorithm: Algorithm, seed: int, cut: int) -> None:
    case = random_case(seed, moved=0.3)
    settings_: dict[str, Any] = {"algorithm": algorithm, "normalizer": normalizer, "kl_threshold": 0.1}
    whole = case.run(**settings_)
    other_order = torch.arange(len(case.tokens.lengths)).flip(0)
    parts = case.run(other_order.split(cut), **settings_)  # other sizes, groups torn apart
    assert parts.loss == pytest.approx(whole.loss, abs=1e-12)
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-12, atol=1e-15)
    assert parts.keep == whole.keep[::-1]
    assert parts.metrics.approx_kl == pytest.approx(whole.metrics.approx_kl)
    assert parts.metrics.ratio_max == whole.metrics.ratio_max


@PROPERTY
@given(st.integers(0, 10_000))
def test_the_order_of_completions_within_a_group_makes_no_difference(seed: int) -> None:
    case = random_case(seed)
    order = torch.cat([torch.arange(int(s)).flip(0) + int(case.sizes[:i].sum()) for i, s in enumerate(case.sizes)])
    shuffled = Case(pick(case.tokens, order), case.sizes)
    places = places_of(case.tokens.lengths, order)
    torch.testing.assert_close(shuffled.run().gradient, case.run().gradient[places], rtol=1e-12, atol=1e-15)


def test_a_larger_group_weighs_no_more_than_a_smaller_one_except_under_dapo() -> None:
    lengths, sizes = torch.full((10,), 4), torch.tensor([2, 8])
    everything = torch.ones(10, dtype=torch.bool)
    for algorithm, expected in (("grpo", [0.5, 0.5]), ("dr-grpo", [0.5, 0.5]), ("dapo", [0.2, 0.8])):
        options = LearningOptions(algorithm=algorithm, constant_length=4)
        shares = (completion_weights(lengths, sizes, 2, everything, options) * lengths).split([2, 8])
        assert [share.sum().item() for share in shares] == pytest.approx(expected)


def test_normalizer_kept_averages_over_kept_completions_and_groups_that_have_one() -> None:
    keep = torch.tensor([True, False, False, False, True, True, True])
    weights = completion_weights(torch.ones(7, dtype=torch.long), torch.tensor([2, 2, 3]), 3, keep, LearningOptions(normalizer="kept"))
    # Two of three groups count; in them 1 and 3 completions.
    assert weights.tolist() == pytest.approx([1 / 2, 0, 0, 0, 1 / 6, 1 / 6, 1 / 6])


def test_weights_are_zero_and_not_nan_when_nothing_is_kept() -> None:
    for algorithm in ALGORITHMS:
        options = LearningOptions(algorithm=algorithm, normalizer="kept")
        none = torch.zeros(2, dtype=torch.bool)
        assert completion_weights(torch.tensor([1, 2]), torch.tensor([2]), 1, none, options).tolist() == [0, 0]


@PROPERTY
@given(st.integers(0, 10_000))
def test_leaving_out_groups_without_advantage_is_the_same_as_computing_them(seed: int) -> None:
    case = random_case(seed)
    tokens, count = case.tokens, len(case.tokens.theta)
    theta, gen, old = (torch.cat([part, part[:2]]) for part in (tokens.theta, tokens.gen, tokens.old))
    flat = batch(
        *(theta, gen, old),
        [*tokens.lengths.tolist(), 1, 1],
        [*tokens.advantages.tolist(), 0.0, 0.0],
        [*case.sizes.tolist(), 2],
    )
    computed = flat.run(filter="none").gradient
    skipped = case.run(filter="none", groups=len(case.sizes) + 1).gradient
    assert not computed[count:].any()
    torch.testing.assert_close(computed[:count], skipped, rtol=1e-12, atol=1e-15)


def test_extreme_log_ratios_stay_finite_in_float32() -> None:
    theta, gen = torch.tensor([-200.0, -0.1, -300.0, 0.0]), torch.tensor([-0.1, -200.0, 0.0, -300.0])
    case = batch(theta, gen, theta, [2, 2], [0.5, -0.5], [2])
    for mode in MODES:
        result = case.run(off_policy=mode, filter="none", **INFINITE)
        assert math.isfinite(result.loss)
        assert result.gradient.isfinite().all()
        assert math.isfinite(result.metrics.approx_kl_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_never_negative_however_far_the_policy_is(dtype: torch.dtype) -> None:
    apart = torch.tensor([0.0, 1.0, 20.0, 25.0, 6e8, 1e30], dtype=dtype)
    forth = kl_estimates(-apart, torch.zeros_like(apart), "k3")
    assert forth.tolist() == pytest.approx([0, math.e - 2, *[math.exp(20) - 21] * 4], rel=1e-6)
    back = kl_estimates(torch.zeros_like(apart[:5]), -apart[:5], "k3")
    assert back.tolist() == pytest.approx([0, 1 / math.e, 19, 24, 6e8], rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_completion_far_beyond_float32_is_filtered_and_an_infinite_one_dropped_under_every_estimator(estimator: Estimator) -> None:
    theta = torch.tensor([-1e9, -1e9, -math.inf, -1.0, -1.0, math.nan, -1.0])
    gen = torch.tensor([-1.0, -1.0, -1.0, -math.inf, -1.0, -1.0, -1.0])
    case = batch(theta, gen, theta, [1] * 7, [-0.5, 0.5, 0.5, 0.5, 0.5, 0.5, -0.5], [7])
    assert case.run(kl_estimator=estimator).keep == [False, True, False, False, True, False, True]
