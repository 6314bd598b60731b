"""What is added to the paper's controller: subsets, isotonic means, sizes per prompt, step times, baselines, retreat."""

from __future__ import annotations

import json
import math
import random
from itertools import combinations, pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from swarm_node.control.arms import pool_adjacent_violators
from swarm_node.control.counterfactual import subset_straggler_probabilities
from swarm_node.control.decision import Cost
from swarm_node.control.events import straggles
from swarm_node.control.options import SagcOptions
from swarm_node.control.prompt_aware import MAX_FEATURES, FeatureTable, prompt_feature
from swarm_node.control.sagc import Controller
from swarm_node.control.steptime import MIN_REPORTS, WINDOW, StepTimeModel, rate_utilities
from swarm_node.experiments.sagc.over_sampling import OverSampling, first_to_finish

CALM = [10, 11, 12, 13]
STRAGGLING = [10, 10, 10, 90]

# -- counterfactual ---------------------------------------------------------------------------------------------------------------


def test_a_hand_counted_group_of_four() -> None:
    """1, 2, 4, 8: no pair exceeds twice its mean; of the four triples only 1-2-8 exceeds twice its median (the others are at
    twice it); all four: 8 > 2 * 3."""
    found = subset_straggler_probabilities([[8, 1, 4, 2]], (1, 2, 3, 4), 2.0)
    assert found.tolist() == [[0.0, 0.0, 0.25, 1.0]]


@pytest.mark.parametrize("ratio", [1.2, 2.0, 2.7])
def test_subset_probabilities_equal_enumeration(ratio: float) -> None:
    noise = random.Random(4)
    for count in range(1, 9):
        groups = [[noise.choice([1, 2, 3, 6, noise.randint(1, 50)]) for _ in range(count)] for _ in range(6)]
        sizes = tuple(range(1, count + 1))
        found = subset_straggler_probabilities(groups, sizes, ratio)
        for group, row in zip(groups, found, strict=True):
            for size, probability in zip(sizes, row, strict=True):
                subsets = list(combinations(group, size))
                expected = sum(straggles(subset, ratio) for subset in subsets) / len(subsets)
                assert probability == pytest.approx(expected, abs=1e-12), (group, size)


def test_subsets_of_sixteen_are_exact_too() -> None:
    noise = random.Random(1)
    group = [round(100 * math.exp(0.5 * noise.gauss(0, 1))) for _ in range(16)]
    subsets = list(combinations(group, 4))
    expected = sum(straggles(subset, 2.0) for subset in subsets) / len(subsets)
    assert subset_straggler_probabilities([group], (4,), 2.0)[0, 0] == pytest.approx(expected, abs=1e-12)
    assert 0.05 < expected < 0.95


def test_subset_probabilities_are_unbiased_for_the_smaller_group() -> None:
    """The mean over groups of 16 of what their subsets of 4 do is what groups of 4 do: that is why it may be counted."""
    noise = np.random.default_rng(0)
    lengths = np.rint(200 * np.exp(0.5 * noise.standard_normal((4000, 16)))).astype(int)
    cut = subset_straggler_probabilities(lengths.tolist(), (4, 8), 2.0)
    for column, size in enumerate((4, 8)):
        direct = [straggles(group[:size].tolist(), 2.0) for group in lengths]
        assert cut[:, column].mean() == pytest.approx(np.mean(direct), abs=0.02)
        assert cut[:, column].var() < np.var(direct) * size / 16  # and less noisy than one group: at most size / 16 of its variance


def test_a_subset_larger_than_its_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="group of 3"):
        subset_straggler_probabilities([[1, 2, 3]], (4,), 2.0)


def test_counterfactual_counts_reach_smaller_candidates_at_their_weight() -> None:
    controller = Controller(SagcOptions(candidates=(2, 3, 4), counterfactual=0.5, gamma=1.0), seed=0)
    controller.choose()
    controller.observe([[5, 5, 5]])  # at 3: calm, and so are all its pairs
    assert controller.state()["counts"] == [[0.0, 0.5], [0.0, 1.0], [0.0, 0.0]]
    assert controller.choose().size == 4
    observation = controller.observe([[8, 1, 4, 2], [3, 3, 3, 3]])
    assert observation.counterfactual == {2: 0.0, 3: 0.125}
    assert controller.state()["counts"] == [[0.0, 1.0], [0.0625, 1.4375], [0.5, 0.5]]


def test_counterfactual_learns_of_sizes_that_were_never_played() -> None:
    controller = Controller(SagcOptions(counterfactual=1.0, gamma=1.0, delta=0.9), seed=0)
    noise = np.random.default_rng(0)
    for _ in range(300):
        size = controller.choose().size
        controller.observe(np.rint(200 * np.exp(0.5 * noise.standard_normal((4, size)))).astype(int).tolist())
    assert size == 16
    assert controller.posterior[4] == pytest.approx(0.222, abs=0.03)  # Monte Carlo of groups of 4 and 8
    assert controller.posterior[8] == pytest.approx(0.463, abs=0.03)


def test_groups_too_small_for_a_candidate_weigh_nothing_for_it() -> None:
    controller = Controller(SagcOptions(candidates=(4, 8), counterfactual=0.5), seed=0)
    assert controller.choose().size == 8
    observed = controller.observe([[10] * 8, [10, 10, 10], [10, 10], [10] * 8])  # two lost completions whose reward failed
    assert observed.counterfactual == {4: 0.0}
    assert controller.state()["counts"] == [[0.0, 0.5 * 2 / 4], [0.0, 1.0]]


# -- monotone ---------------------------------------------------------------------------------------------------------------------


def test_violators_are_pooled_by_weight() -> None:
    assert pool_adjacent_violators([0.1, 0.5, 0.2, 0.9], [1, 1, 2, 1]) == pytest.approx([0.1, 0.3, 0.3, 0.9])
    assert pool_adjacent_violators([3.0, 2.0, 1.0], [1, 1, 1]) == pytest.approx([2.0, 2.0, 2.0])
    assert pool_adjacent_violators([], []) == []


def test_pooling_is_the_nearest_monotone_fit() -> None:
    """Against every way of cutting the sequence into blocks of equal value."""
    noise = random.Random(3)
    for _ in range(50):
        values, weights = [noise.random() for _ in range(5)], [noise.random() + 0.1 for _ in range(5)]

        def error(fit: list[float], values: list[float] = values, weights: list[float] = weights) -> float:
            return sum(w * (v - f) ** 2 for v, f, w in zip(values, fit, weights, strict=True))

        best = math.inf
        for cuts in range(16):
            edges = [0, *(i + 1 for i in range(4) if cuts >> i & 1), 5]
            fit: list[float] = []
            for low, high in pairwise(edges):
                mass = sum(weights[low:high])
                fit += [sum(v * w for v, w in zip(values[low:high], weights[low:high], strict=True)) / mass] * (high - low)
            if fit == sorted(fit):
                best = min(best, error(fit))
        assert error(pool_adjacent_violators(values, weights)) == pytest.approx(best)


def test_monotone_beliefs_never_fall_with_size_and_the_papers_may() -> None:
    def beliefs(monotone: bool) -> list[float]:
        controller = Controller(SagcOptions(monotone=monotone, gamma=1.0), seed=0)
        controller.choose()
        controller.observe([STRAGGLING])  # 8 straggled once
        controller.choose()
        controller.observe([CALM])  # 16 did not
        return list(controller.posterior.values())

    assert beliefs(False) == pytest.approx([1 / 2, 2 / 3, 1 / 3])
    assert beliefs(True) == pytest.approx([1 / 2, 1 / 2, 1 / 2])


# -- prompt-aware -----------------------------------------------------------------------------------------------------------------


def test_features_are_task_level_and_prompt_length_in_powers_of_two() -> None:
    assert prompt_feature("chain-sum:2", 3, 16) == prompt_feature("chain-sum:2", 3, 31) == "chain-sum:2|3|5"
    assert prompt_feature("chain-sum:2", 3, 32) != prompt_feature("chain-sum:2", 3, 31)


def _play_levels(controller: Controller, steps: int) -> tuple[list[dict[str, int]], list[float]]:
    """Easy groups never straggle, hard ones with probability .1, .3, .8 at 4, 8, 16."""
    noise, sizes, rates = random.Random(6), [], []
    for _ in range(steps):
        decision = controller.choose(["easy", "hard", "easy", "hard"])
        events = [noise.random() < {4: 0.1, 8: 0.3, 16: 0.8}[size] for size in decision.sizes]
        events[0] = events[2] = False
        sizes.append(dict(zip(["easy", "hard"], decision.sizes, strict=False)))
        rates.append(controller.observe_events(events).rate)
    return sizes, rates


def test_prompt_aware_gives_easy_prompts_large_groups_and_hard_ones_what_the_budget_leaves() -> None:
    """The budget of .1 leaves the hard half .2: sizes 4 and 8 by turns."""
    sizes, rates = _play_levels(Controller(SagcOptions(prompt_aware=True, delta=0.1), seed=1), 900)
    late = sizes[300:]
    assert np.mean([step["easy"] for step in late]) > 14
    assert 5 < np.mean([step["hard"] for step in late]) < 7
    assert sum(rates[300:]) / 600 == pytest.approx(0.1, abs=0.02)
    for before, after in pairwise(sizes):
        assert all(after[name] / before[name] in (0.5, 1, 2) for name in before)  # at most one candidate a step, for each feature


def test_without_prompt_aware_every_group_gets_the_steps_size() -> None:
    sizes, _ = _play_levels(Controller(SagcOptions(delta=0.2), seed=1), 50)
    assert all(step["easy"] == step["hard"] for step in sizes)


def test_prompt_aware_restored_between_choice_and_lesson_goes_on_alike() -> None:
    options = SagcOptions(prompt_aware=True, counterfactual=1.0, monotone=True, utility="rate", hold=2)
    noise = np.random.default_rng(2)

    def lesson(sizes: tuple[int, ...]) -> list[list[int]]:
        return [np.rint(50 * np.exp(0.6 * noise.standard_normal(size)) + 1).astype(int).tolist() for size in sizes]

    first = Controller(options, seed=3)
    for step in range(40):
        first.observe(lesson(first.choose(["a", "b", f"c{step % 3}"]).sizes), cost=Cost(0.5 + step % 4, 0.1))
    sizes = first.choose(["b", "a", "b"]).sizes
    second = Controller(options, seed=77)
    second.restore(json.loads(json.dumps(first.state())))
    lengths = lesson(sizes)
    assert first.observe(lengths) == second.observe(lengths)
    for _ in range(20):
        decision = first.choose(["a", "c1", "new"])
        assert second.choose(["a", "c1", "new"]) == decision
        lengths = lesson(decision.sizes)
        assert first.observe(lengths) == second.observe(lengths)
    assert first.state() == second.state()


def test_all_groups_of_a_step_together_are_one_for_the_general_experience() -> None:
    controller = Controller(SagcOptions(prompt_aware=True), seed=0)
    controller.choose(["a", "b", "b", "c"])
    controller.observe_events([True, False, False, False])
    straggled, calm = map(sum, zip(*controller.state()["counts"], strict=True))
    assert (straggled, calm) == (0.25, 0.75)


def test_another_number_of_groups_than_decided_is_an_error() -> None:
    controller = Controller(SagcOptions(prompt_aware=True), seed=0)
    controller.choose(["a", "b"])
    with pytest.raises(ValueError, match="2 groups were decided and 1 observed"):
        controller.observe([CALM])


def test_forgotten_features_are_the_ones_not_seen_for_longest() -> None:
    table = FeatureTable(3, gamma=0.5)
    for name in range(MAX_FEATURES):
        table.get(str(name), 0, start=1, age=1)
    table.get("0", 0, start=1, age=1).arms.add(2, 1.0)
    table.get("one more", 0, start=1, age=1)
    assert len(table) == MAX_FEATURES
    assert table.get("0", 2, start=0, age=0).arms.counts[2] == [0.25, 0.0]  # kept, and discounted for the two steps it was not seen
    assert table.get("1", 2, start=0, age=0).index == 0  # forgotten: begins where it is told to


def test_prompt_aware_needs_the_group_event() -> None:
    with pytest.raises(ValidationError, match=r"control\.prompt_aware"):
        SagcOptions(prompt_aware=True, event="any")


# -- step time --------------------------------------------------------------------------------------------------------------------


def test_the_step_time_model_recovers_an_engines_two_costs() -> None:
    model, noise = StepTimeModel(), random.Random(0)
    for step in range(60):
        groups = [[noise.randint(20, 80 + step) for _ in range(noise.choice([4, 8]))] for _ in range(4)]
        tokens, longest = sum(map(sum, groups)), max(map(max, groups))
        model.observe(groups, Cost(0.004 * longest + 0.0001 * tokens / 0.8, 0.2))
    assert model.coefficients == pytest.approx((0.004, 0.0001), rel=1e-6)


def test_predictions_price_the_longest_of_more_completions() -> None:
    """Lengths 1 or 3 with equal chance: the longest of N is 3 - 2 * .5^N. The engine pays a second a step and none for slots."""
    model = StepTimeModel()
    assert model.predict([2]) is None
    for _ in range(MIN_REPORTS):
        model.observe([[1, 3, 1, 3]], Cost(3.0, 0.0))
    found = model.predict([2, 4])
    assert found == pytest.approx({2: 2.5, 4: 2.875})


def test_an_engine_that_keeps_finished_slots_busy_is_charged_for_them() -> None:
    """Static batch: every slot runs as long as the longest. A second a slot-step: 4 slots * 3 steps."""
    model = StepTimeModel()
    for groups in ([[1, 3, 1, 3]], [[1, 1, 1, 1]], [[3, 3, 3, 3]], [[1, 3, 3, 1]]) * MIN_REPORTS:
        longest, tokens = max(groups[0]), sum(groups[0])
        model.observe(groups, Cost(4.0 * longest, 1 - tokens / (4 * longest)))
    fixed, per_slot = model.coefficients
    assert 4 * per_slot + fixed == pytest.approx(4.0)
    predicted = model.predict([4, 8])
    assert predicted is not None
    assert predicted[4] == pytest.approx((4 * per_slot + fixed) * (3 - 2 * 0.5**4), rel=0.02)


def test_slots_that_no_completion_would_have_taken_are_no_waste() -> None:
    """Tokens 4, longest 3: a static batch of two wastes 2 slot-steps. The engine says 6, of slots that stood empty all the time."""
    model = StepTimeModel()
    model.observe([[1, 3]], Cost(1.0, 0.6))
    assert model.state()["waste"] == [2.0, 2.0]


def test_the_lengths_of_lately_are_remembered() -> None:
    model = StepTimeModel()
    for length in (100, 10):
        for _ in range(WINDOW):
            model.observe([[length]], Cost(1.0, 0.0))
    assert model.state()["lengths"] == [10] * WINDOW


def test_coefficients_are_never_negative() -> None:
    model = StepTimeModel()
    for longest, seconds in [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)]:
        model.observe([[longest, 5]], Cost(seconds, 0.0))
        assert min(model.coefficients) >= 0


def test_rate_utility_is_log2_of_information_per_second() -> None:
    assert rate_utilities([4, 8], None) == [2.0, 3.0]
    assert rate_utilities([3, 9], {3: 1.0, 9: 4.0}) == pytest.approx([1.0, 1.0])  # 2 per second, 8 per 4 seconds


@pytest.mark.parametrize(
    ("a_step", "a_slot", "worth"),
    [(0.01, 0.0, math.log2(15 / 3)), (0.0, 0.01, math.log2(15 / 3) - 2.0)],  # the same seconds for any size; four times the seconds
)
def test_a_larger_group_is_worth_what_its_engine_charges(a_step: float, a_slot: float, worth: float) -> None:
    """Equal lengths: 16 completions tell 15 / 3 as much as 4 do, in as many steps, with four times the slots."""
    controller = Controller(SagcOptions(utility="rate"), seed=0)
    for _ in range(30):
        size = controller.choose().size
        controller.observe([[10] * size], cost=Cost(a_step * 10 + a_slot * 10 * size, 0.0))
    four, sixteen = rate_utilities([4, 16], controller.step_time.predict([4, 16]))
    assert sixteen - four == pytest.approx(worth)
    assert size == 16


@pytest.mark.parametrize("cost", [Cost(1.0, 1.0), Cost(-1.0, 0.0)])
def test_an_impossible_cost_is_an_error(cost: Cost) -> None:
    with pytest.raises(ValueError, match="slot_idle_share"):
        Controller(SagcOptions(), seed=0).observe([CALM], cost=cost)


# -- baselines --------------------------------------------------------------------------------------------------------------------


def test_the_first_to_finish_are_the_shortest_in_their_own_order() -> None:
    assert first_to_finish([9, 2, 7, 2, 5], 3) == (1, 3, 4)
    assert first_to_finish([4, 4, 4], 2) == (0, 1)
    with pytest.raises(ValueError, match="cannot keep 4 of 3"):
        first_to_finish([1, 2, 3], 4)


def test_over_sampling_hides_stragglers_by_dropping_long_answers() -> None:
    controller = OverSampling(SagcOptions(group_size=3), seed=0, extra=1)
    decision = controller.choose(["a"])
    assert (decision.size, decision.sizes, decision.extra) == (3, (3,), 1)
    kept = [STRAGGLING[index] for index in first_to_finish(STRAGGLING, decision.size)]
    assert kept == [10, 10, 10]
    assert controller.observe([kept]).rate == 0.0
    other = OverSampling(SagcOptions(group_size=3), seed=5, extra=1)
    other.restore(controller.state())
    assert other.state() == controller.state()


def test_over_sampling_needs_a_fixed_size() -> None:
    with pytest.raises(ValueError, match="fixed group_size"):
        OverSampling(SagcOptions(), seed=0, extra=4)


# -- retreat ----------------------------------------------------------------------------------------------------------------------


def test_a_retreat_lasts_until_lambda_is_below_nine_tenths_of_its_limit() -> None:
    """eta 1, delta .5: S moves lambda by half a unit."""
    controller = Controller(SagcOptions(lambda_0=10.0, lambda_max=10.0, eta=1.0, delta=0.5), seed=0)
    for _ in range(3):
        assert controller.choose().size == 4
        assert controller.observe([STRAGGLING]).infeasible
    for multiplier in (9.5, 9.0, 8.5):
        assert controller.choose().size == 4
        assert controller.observe([CALM]).multiplier == multiplier
    controller.choose()
    assert controller.state()["retreating"] is False
    assert not controller.infeasible
