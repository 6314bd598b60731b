"""The F-TIS loss: a worked example, and what must hold for every batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_node.learning.ftis import Loss, completion_weights, distances, ftis_loss, keep_mask, kl_estimates, partial_loss, row_statistics
from swarm_node.learning.options import LearningOptions
from swarm_node.learning.statistics import RowStatistics, summarise

PROPERTY = settings(max_examples=15, deadline=None, derandomize=True)
MODES = ["f-tis", "tis", "f-vis", "vis", "f-nois", "nois"]
ALGORITHMS = ["grpo", "dr-grpo", "dapo"]
INFINITE = {"truncation": math.inf, "kl_threshold": math.inf}


@dataclass
class Case:
    """Ragged inputs of the loss; float64, so that comparisons can be strict."""

    theta: Tensor
    gen: Tensor
    old: Tensor
    lengths: Tensor
    advantages: Tensor
    sizes: Tensor

    def run(self, truncated: Tensor | None = None, groups: int | None = None, **settings) -> tuple[Loss, Tensor]:
        """The loss and its gradient with respect to theta."""
        theta = self.theta.detach().clone().requires_grad_()
        options = LearningOptions(**settings)
        result = ftis_loss(
            theta, self.gen, self.old, self.lengths, self.advantages, self.sizes, options, truncated=truncated, groups=groups
        )
        result.loss.backward()
        assert theta.grad is not None
        return result, theta.grad

    def rows(self) -> list[slice]:
        ends = self.lengths.cumsum(0).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths.tolist(), strict=True)]


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
    return Case(theta, theta + drift * noise(tokens), theta + moved * noise(tokens), lengths, noise(len(lengths)), sizes)


# One prompt, two completions of two tokens, rewards 1 and 0, so A = +1/2 and -1/2.
#   completion 1: policy .6 .4, generator .4 .1, ratios 1.5 and 4; completion 2: policy .2 .1, generator .4 .2, ratios .5 and .5
EXAMPLE = Case(
    theta=torch.tensor([0.6, 0.4, 0.2, 0.1], dtype=torch.float64).log(),
    gen=torch.tensor([0.4, 0.1, 0.4, 0.2], dtype=torch.float64).log(),
    old=torch.tensor([0.6, 0.4, 0.2, 0.1], dtype=torch.float64).log(),
    lengths=torch.tensor([2, 2]),
    advantages=torch.tensor([0.5, -0.5], dtype=torch.float64),
    sizes=torch.tensor([2]),
)


def test_the_example_by_hand() -> None:
    result, gradient = EXAMPLE.run()
    # w = 1.5, min(4, 2) = 2, .5, .5 and R = 1 everywhere.
    # L = -1/2 [ 1/2 (1.5 * .5 + 2 * .5) + 1/2 (.5 * -.5 + .5 * -.5) ] = -1/2 [ .875 - .25 ] = -.3125
    assert result.loss.item() == pytest.approx(-0.3125, rel=1e-12)
    # dL/dtheta_t = -1/2 * 1/2 * w_t * A: -.25 * .75, -.25 * 1, +.25 * .25, +.25 * .25
    assert gradient.tolist() == pytest.approx([-0.1875, -0.25, 0.0625, 0.0625], rel=1e-12)


def test_the_examples_metrics_by_hand() -> None:
    metrics = EXAMPLE.run()[0].metrics
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
def test_the_example_filtered(settings, kept, loss) -> None:
    result, gradient = EXAMPLE.run(**settings)
    assert result.keep.tolist() == kept
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    assert [gradient[:2].any().item(), gradient[2:].any().item()] == kept


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        # Lengths 1 and 3, all ratios 1, A = +-1/2: per token +.5 | -.5 -.5 -.5
        ("grpo", -(0.5 / 1 - 1.5 / 3) / 2),
        ("dr-grpo", -(0.5 / 10 - 1.5 / 10) / 2),
        ("dapo", -(0.5 - 1.5) / 4),
    ],
)
def test_algorithms_differ_in_how_tokens_are_averaged(algorithm, loss) -> None:
    theta = torch.full((4,), -1.0, dtype=torch.float64)
    case = Case(theta, theta, theta, torch.tensor([1, 3]), torch.tensor([0.5, -0.5], dtype=torch.float64), torch.tensor([2]))
    assert case.run(algorithm=algorithm, constant_length=10)[0].loss.item() == pytest.approx(loss, abs=1e-12)


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
def test_corrections_differ_in_what_multiplies_a_tokens_gradient(mode, expected) -> None:
    per_token = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)
    for name in (mode, f"f-{mode}"):
        gradient = EXAMPLE.run(off_policy=name)[1]
        assert gradient.tolist() == pytest.approx((-per_token * torch.tensor(expected, dtype=torch.float64) / 4).tolist(), rel=1e-12)


def test_vis_keeps_the_whole_ratio_within_the_clip() -> None:
    case = replace(EXAMPLE, gen=EXAMPLE.theta - torch.tensor([1.1, 0.9, 1.1, 0.9], dtype=torch.float64).log())
    result, gradient = case.run(off_policy="vis")
    assert gradient.tolist() == pytest.approx([-1.1 / 8, -0.9 / 8, 1.1 / 8, 0.9 / 8], rel=1e-12)
    assert result.loss.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_only_f_modes_filter(mode) -> None:
    kept = EXAMPLE.run(off_policy=mode, filter="both", kl_threshold=0.3)[0].keep.tolist()
    assert kept == ([True, False] if mode.startswith("f-") else [True, True])


def test_estimators_on_a_known_log_ratio() -> None:
    theta, gen = torch.tensor([-2.0, -1.0], dtype=torch.float64), torch.tensor([-1.0, -2.0], dtype=torch.float64)
    assert kl_estimates(theta, gen, "k1").tolist() == [1.0, -1.0]
    assert kl_estimates(theta, gen, "k2").tolist() == [0.5, 0.5]
    assert kl_estimates(theta, gen, "k3").tolist() == pytest.approx([math.e - 2, 1 / math.e])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_distances_reduce_the_estimates_of_each_completion(estimator, reduction) -> None:
    case = random_case(3)
    options = LearningOptions(kl_estimator=estimator, kl_reduction=reduction)
    estimates = kl_estimates(case.theta, case.gen, estimator)
    expected = [getattr(estimates[row], reduction)().item() for row in case.rows()]
    assert distances(case.theta, case.gen, case.lengths, options).tolist() == pytest.approx(expected, rel=1e-12)


def test_k1_estimates_kl_and_k3_estimates_chi_square_minus_kl_on_samples_of_the_generator() -> None:
    gen, theta = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    kl, chi_square = (gen * (gen / theta).log()).sum(), (gen.square() / theta).sum() - 1
    # The expectation over the generator's three tokens, exactly.
    assert (gen * kl_estimates(theta.log(), gen.log(), "k1")).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    assert (gen * kl_estimates(theta.log(), gen.log(), "k3")).sum().item() == pytest.approx((chi_square - kl).item(), rel=1e-12)


@PROPERTY
@given(st.integers(0, 10_000))
def test_without_truncation_and_threshold_it_is_plain_importance_sampling(seed) -> None:
    case = random_case(seed, moved=0.0)
    result, gradient = case.run(**INFINITE)
    groups, expected = len(case.sizes), torch.zeros_like(case.theta)
    members = case.sizes.repeat_interleave(case.sizes)
    for i, row in enumerate(case.rows()):
        ratio = (case.theta[row] - case.gen[row]).exp()
        expected[row] = -ratio * case.advantages[i] / (groups * members[i] * case.lengths[i])
    assert result.keep.all()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@PROPERTY
@given(seed=st.integers(0, 10_000))
def test_on_policy_it_is_grpo_to_the_bit_of_the_gradient(algorithm, seed) -> None:
    case = random_case(seed, drift=0.0, moved=0.0)
    _, corrected = case.run(algorithm=algorithm)
    _, plain = case.run(algorithm=algorithm, off_policy="nois")
    assert torch.equal(corrected, plain)
    # And plain GRPO is what its definition says.
    weights = completion_weights(
        case.lengths, case.sizes, LearningOptions(algorithm=algorithm), torch.ones(len(case.lengths), dtype=torch.bool)
    )
    assert torch.equal(plain, -(weights * case.advantages).repeat_interleave(case.lengths))


@PROPERTY
@given(st.integers(0, 10_000))
def test_the_importance_weight_has_no_gradient(seed) -> None:
    case = random_case(seed, moved=0.0)
    # If d w / d theta were not 0, the gradient would also depend on R's value through w' R; with w constant it is w * A * weight exactly.
    _, gradient = case.run(off_policy="tis")
    weight = (case.theta - case.gen).exp().clamp(max=2.0)
    share = completion_weights(case.lengths, case.sizes, LearningOptions(), torch.ones(len(case.lengths), dtype=torch.bool))
    torch.testing.assert_close(gradient, -weight * (share * case.advantages).repeat_interleave(case.lengths), rtol=1e-12, atol=1e-15)


@PROPERTY
@given(st.integers(0, 10_000))
def test_gradient_agrees_with_finite_differences_of_the_ratio(seed) -> None:
    """With w frozen at theta, L(theta + h) - L(theta - h) over 2h is the gradient, clip included (away from its kinks)."""
    case = random_case(seed, moved=0.6)
    options = LearningOptions(off_policy="nois")
    step = 1e-6
    ratio = (case.theta - case.old).exp()
    assume(((ratio - 0.8).abs() >= 1e-4).all() and ((ratio - 1.2).abs() >= 1e-4).all())
    _, gradient = case.run(off_policy="nois")

    def loss(theta: Tensor) -> float:
        return ftis_loss(theta, case.gen, case.old, case.lengths, case.advantages, case.sizes, options).loss.item()

    for token in range(0, len(case.theta), 5):
        nudge = torch.zeros_like(case.theta)
        nudge[token] = step
        assert (loss(case.theta + nudge) - loss(case.theta - nudge)) / (2 * step) == pytest.approx(gradient[token].item(), abs=1e-7)


@PROPERTY
@given(st.integers(0, 10_000))
def test_clip_fraction_counts_exactly_the_tokens_without_gradient(seed) -> None:
    case = random_case(seed, moved=0.6)
    result, gradient = case.run(off_policy="tis")
    assert result.metrics.clip_fraction * len(case.theta) == pytest.approx((gradient == 0).sum().item())


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_filtered_rows_have_zero_gradient_and_their_nan_reaches_nobody(normalizer, algorithm, poison) -> None:
    case = random_case(11)
    broken = case.rows()[1]
    poisoned = replace(case, theta=case.theta.clone(), old=case.old.clone())
    poisoned.theta[broken] = poisoned.old[broken] = poison
    _, clean = case.run(truncated=torch.arange(len(case.lengths)) == 1, mask_truncated=True, normalizer=normalizer, algorithm=algorithm)
    result, gradient = poisoned.run(normalizer=normalizer, algorithm=algorithm)
    assert not gradient[broken].any()
    assert torch.equal(gradient, clean)  # the others are as if the broken completion had been masked
    assert result.loss.isfinite()
    assert (result.metrics.nonfinite, result.metrics.filtered) == (1, 1)
    assert math.isfinite(result.metrics.approx_kl)
    assert math.isfinite(result.metrics.ratio_mean)


@pytest.mark.parametrize("off_policy", MODES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalizer", ["all", "kept"])
def test_all_filtered_gives_loss_zero_and_no_nan(off_policy, algorithm, normalizer) -> None:
    case = random_case(5)
    truncated = torch.ones(len(case.lengths), dtype=torch.bool)
    result, gradient = case.run(truncated, off_policy=off_policy, algorithm=algorithm, normalizer=normalizer, mask_truncated=True)
    assert result.loss.item() == 0.0
    assert not gradient.any()
    assert result.metrics.kept_share == 0.0


def test_truncated_completions_are_masked_only_when_asked() -> None:
    truncated = torch.tensor([True, False])
    assert EXAMPLE.run(truncated)[0].keep.tolist() == [True, True]
    assert EXAMPLE.run(truncated, mask_truncated=True)[0].keep.tolist() == [False, True]


@PROPERTY
@given(st.integers(0, 10_000), st.sampled_from(["both", "either", "none"]))
def test_the_filter_decides_per_completion_by_its_definition(seed, kind) -> None:
    case = random_case(seed)
    options = LearningOptions(filter=kind, kl_threshold=0.2)
    keep = keep_mask(case.theta, case.gen, case.lengths, case.advantages, options)
    for i, row in enumerate(case.rows()):
        x = case.gen[row] - case.theta[row]
        far, no_gain = (x.exp() - x - 1).mean().item() > 0.2, case.advantages[i].item() <= 0
        assert keep[i].item() == {"both": not (far and no_gain), "either": not (far or no_gain), "none": True}[kind]


def test_no_advantage_at_all_counts_as_no_gain() -> None:
    case = replace(EXAMPLE, advantages=torch.tensor([0.5, 0.0], dtype=torch.float64))
    for kind in ("both", "either"):
        assert case.run(filter=kind, kl_threshold=0.31)[0].keep.tolist() == ([True, True] if kind == "both" else [False, False])
        assert case.run(filter=kind, kl_threshold=0.3)[0].keep.tolist() == ([True, False] if kind == "both" else [False, False])


def padded_gradient(case: Case, options: LearningOptions, side: str) -> Tensor:
    """An independent version on a padded rectangle with a mask, mean over tokens, group and groups, filter `both`."""
    width = int(case.lengths.max()) + 2
    rows = case.rows()
    places = [torch.arange(width - n, width) if side == "left" else torch.arange(n) for n in case.lengths.tolist()]
    theta = torch.full((len(rows), width), -7.0, dtype=torch.float64)
    gen, old, mask = theta.clone() + 1, theta.clone() - 1, torch.zeros_like(theta)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        theta[i, place], gen[i, place], old[i, place], mask[i, place] = case.theta[row], case.gen[row], case.old[row], 1.0
    theta.requires_grad_()
    x = gen - theta.detach()
    distance = ((x.exp() - x - 1) * mask).sum(1) / mask.sum(1)
    advantage = case.advantages[:, None]
    keep = ~((case.advantages <= 0) & (distance > options.kl_threshold))
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
def test_padding_makes_no_difference(side, seed) -> None:
    case = random_case(seed, moved=0.3)
    _, gradient = case.run(kl_threshold=0.1)
    torch.testing.assert_close(gradient, padded_gradient(case, LearningOptions(kl_threshold=0.1), side), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@PROPERTY
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 3))
def test_micro_batches_add_up_to_the_batch(normalizer, algorithm, seed, cut) -> None:
    case = random_case(seed, moved=0.3)
    settings_ = {"algorithm": algorithm, "normalizer": normalizer, "kl_threshold": 0.1}
    options = LearningOptions(**settings_)
    whole, expected = case.run(**settings_)
    weights = completion_weights(case.lengths, case.sizes, options, whole.keep)
    theta = case.theta.clone().requires_grad_()
    total, statistics = 0.0, []
    for rows in torch.arange(len(case.lengths)).flip(0).split(cut):  # other order, other sizes, groups torn apart
        tokens = torch.cat([torch.arange(len(case.theta))[case.rows()[row]] for row in rows.tolist()])
        part = (theta[tokens], case.gen[tokens], case.old[tokens], case.lengths[rows], case.advantages[rows])
        loss = partial_loss(*part, weights[rows], whole.keep[rows], options)
        loss.backward()
        total += loss.item()
        statistics.append(row_statistics(part[0].detach(), *part[1:], whole.keep[rows], options))
    assert total == pytest.approx(whole.loss.item(), abs=1e-12)
    assert theta.grad is not None
    torch.testing.assert_close(theta.grad, expected, rtol=1e-12, atol=1e-15)
    metrics = summarise(RowStatistics.concatenate(statistics))
    assert metrics.kept == whole.metrics.kept
    assert metrics.approx_kl == pytest.approx(whole.metrics.approx_kl)
    assert metrics.ratio_max == whole.metrics.ratio_max


@PROPERTY
@given(st.integers(0, 10_000))
def test_the_order_of_completions_within_a_group_makes_no_difference(seed) -> None:
    case = random_case(seed)
    order = torch.cat([torch.arange(int(s)).flip(0) + int(case.sizes[:i].sum()) for i, s in enumerate(case.sizes)])
    tokens = torch.cat([torch.arange(len(case.theta))[case.rows()[row]] for row in order.tolist()])
    shuffled = Case(case.theta[tokens], case.gen[tokens], case.old[tokens], case.lengths[order], case.advantages[order], case.sizes)
    torch.testing.assert_close(shuffled.run()[1], case.run()[1][tokens], rtol=1e-12, atol=1e-15)


def test_a_larger_group_weighs_no_more_than_a_smaller_one_except_under_dapo() -> None:
    lengths, sizes = torch.full((10,), 4), torch.tensor([2, 8])
    everything = torch.ones(10, dtype=torch.bool)
    for algorithm, expected in (("grpo", [0.5, 0.5]), ("dr-grpo", [0.5, 0.5]), ("dapo", [0.2, 0.8])):
        options = LearningOptions(algorithm=algorithm, constant_length=4)
        shares = (completion_weights(lengths, sizes, options, everything) * lengths).split([2, 8])
        assert [share.sum().item() for share in shares] == pytest.approx(expected)


def test_normalizer_kept_averages_over_kept_completions_and_groups_that_have_one() -> None:
    keep = torch.tensor([True, False, False, False, True, True, True])
    weights = completion_weights(torch.ones(7, dtype=torch.long), torch.tensor([2, 2, 3]), LearningOptions(normalizer="kept"), keep)
    # Two of three groups count; in them 1 and 3 completions.
    assert weights[keep].tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


def test_weights_are_finite_when_nothing_is_kept() -> None:
    for algorithm in ALGORITHMS:
        options = LearningOptions(algorithm=algorithm, normalizer="kept")
        assert completion_weights(torch.tensor([1, 2]), torch.tensor([2]), options, torch.zeros(2, dtype=torch.bool)).isfinite().all()


@PROPERTY
@given(st.integers(0, 10_000))
def test_leaving_out_groups_without_advantage_is_the_same_as_computing_them(seed) -> None:
    case = random_case(seed)
    tokens = int(case.lengths.sum())
    assume(tokens >= 3)
    flat = Case(
        torch.cat([case.theta, case.theta[:3]]),
        torch.cat([case.gen, case.gen[:3]]),
        torch.cat([case.old, case.old[:3]]),
        torch.cat([case.lengths, torch.tensor([1, 2])]),
        torch.cat([case.advantages, torch.zeros(2, dtype=torch.float64)]),
        torch.cat([case.sizes, torch.tensor([2])]),
    )
    _, computed = flat.run(filter="none")
    _, skipped = case.run(filter="none", groups=len(case.sizes) + 1)
    assert not computed[tokens:].any()
    torch.testing.assert_close(computed[:tokens], skipped, rtol=1e-12, atol=1e-15)


def test_extreme_log_ratios_stay_finite_in_float32() -> None:
    theta, gen = torch.tensor([-200.0, -0.1, -300.0, 0.0]), torch.tensor([-0.1, -200.0, 0.0, -300.0])
    case = Case(theta, gen, theta, torch.tensor([2, 2]), torch.tensor([0.5, -0.5]), torch.tensor([2]))
    for mode in MODES:
        result, gradient = case.run(off_policy=mode, filter="none", **INFINITE)
        assert result.loss.isfinite()
        assert gradient.isfinite().all()
        assert math.isfinite(result.metrics.approx_kl_sum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_never_negative_however_far_the_policy_is(dtype) -> None:
    apart = torch.tensor([0.0, 1.0, 20.0, 25.0, 6e8, 1e30], dtype=dtype)
    forth = kl_estimates(-apart, torch.zeros_like(apart), "k3")
    assert forth.tolist() == pytest.approx([0, math.e - 2, *[math.exp(20) - 21] * 4], rel=1e-6)
    back = kl_estimates(torch.zeros_like(apart[:5]), -apart[:5], "k3")
    assert back.tolist() == pytest.approx([0, 1 / math.e, 19, 24, 6e8], rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_completion_far_beyond_float32_is_filtered_and_an_infinite_one_dropped_under_every_estimator(estimator) -> None:
    theta = torch.tensor([-1e9, -1e9, -math.inf, -1.0, -1.0, math.nan, -1.0])
    gen = torch.tensor([-1.0, -1.0, -1.0, -math.inf, -1.0, -1.0, -1.0])
    lengths, advantages = torch.ones(7, dtype=torch.long), torch.tensor([-0.5, 0.5, 0.5, 0.5, 0.5, 0.5, -0.5])
    keep = keep_mask(theta, gen, lengths, advantages, LearningOptions(kl_estimator=estimator))
    assert keep.tolist() == [False, True, False, False, True, False, True]
