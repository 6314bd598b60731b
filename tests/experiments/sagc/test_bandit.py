"""The controllers against problems whose best answer is known."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller
from swarm_node.experiments.sagc.bandit import CONTROLLERS as BANDIT_CONTROLLERS
from swarm_node.experiments.sagc.bandit import (
    EXTENSIONS,
    INSTANCE,
    bandit_study,
    budget_breaches,
    decision_us,
    feasible_instance,
    optimum_log2,
    play_events,
)
from swarm_node.experiments.sagc.lengths import LEVELS, TRACES, LengthTrace, straggler_probabilities
from swarm_node.experiments.sagc.traces import CONTROLLERS, LEVEL_CONTROLLERS, play_lengths, study


def _probabilities(low: float, high: float) -> st.SearchStrategy[dict[int, float]]:
    """Sizes 2, 4, 8, ... with rising straggler probabilities, of which the smallest lies within the bounds."""

    def build(first: float, rises: list[float]) -> dict[int, float]:
        found = [first]
        for rise in rises:
            found.append(found[-1] + rise * (1 - found[-1]))
        return {2 ** (index + 1): probability for index, probability in enumerate(found)}

    return st.builds(build, st.floats(low, high), st.lists(st.floats(0, 1), min_size=1, max_size=4))


# -- the optimum ------------------------------------------------------------------------------------------------------------------


def test_the_optimum_of_the_instance_mixes_four_and_eight() -> None:
    """.15 + x .25 = .35: a share of .8 at 8, so 2.8. With 16 in place of 8 it would be 2 + 2 / 3."""
    assert optimum_log2([INSTANCE], 0.35) == pytest.approx(2.8)
    assert optimum_log2([INSTANCE], 0.40) == pytest.approx(3.0)
    assert optimum_log2([INSTANCE], 0.80) == pytest.approx(4.0)
    assert optimum_log2([INSTANCE], 0.10) is None


def test_sizes_between_worse_ones_are_skipped() -> None:
    """8 straggles nearly as often as 16: mixing 4 with 16 beats it."""
    assert optimum_log2([{4: 0.0, 8: 0.7, 16: 0.8}], 0.4) == pytest.approx(3.0)


def test_a_size_for_each_kind_of_prompt_is_worth_more_than_one_for_all() -> None:
    kinds = [{4: 0.0, 16: 0.0}, {4: 0.2, 16: 1.0}]
    assert optimum_log2(kinds, 0.1) == pytest.approx((4 + 2) / 2)
    assert optimum_log2([{4: 0.1, 16: 0.5}], 0.1) == pytest.approx(2.0)


@given(_probabilities(0, 0.9), st.floats(0.01, 0.99))
@settings(deadline=None, derandomize=True)
def test_the_dual_equals_the_best_mixture_of_two_sizes(truth: dict[int, float], rate: float) -> None:
    best = None
    for low, p_low in truth.items():
        for high, p_high in truth.items():
            if p_low <= rate:
                share = 1.0 if p_high <= rate else (rate - p_low) / (p_high - p_low)
                best = max(best or 0, (1 - share) * math.log2(low) + share * math.log2(high))
    found = optimum_log2([truth], rate)
    assert (found is None) == (best is None)
    if best is not None:
        assert found == pytest.approx(best, abs=1e-6)


# -- the budget -------------------------------------------------------------------------------------------------------------------


@given(_probabilities(0, 0.35), st.integers(0, 10_000))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_a_feasible_instance_keeps_its_budget_from_step_500_on(truth: dict[int, float], seed: int) -> None:
    """Over 2,500 steps: lambda may still have to climb to its limit of 15, which takes an excess of 15 / eta = 75 straggling steps;
    spread over 2,500 that is 0.03. No straggler of a feasible instance is forgotten except in the step that reaches the limit."""
    controller = Controller(SagcOptions(candidates=tuple(truth)), seed)
    played = play_events(controller, truth, 3000, 4, seed)
    assert statistics.fmean(played.rates[500:]) <= 0.35 + 0.03
    assert all(0 <= multiplier <= 15 for multiplier in played.multipliers)


@given(_probabilities(0, 0.35), st.integers(0, 10_000))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_excess_over_the_budget_is_what_lambda_climbed(truth: dict[int, float], seed: int) -> None:
    """Below its limit, lambda is the account of the budget: rate - delta <= (rise of lambda) / (eta steps), on every path."""
    played = play_events(Controller(SagcOptions(candidates=tuple(truth)), seed), truth, 600, 2, seed)
    for start, stop in ((0, 600), (100, 350), (300, 600)):
        if max(played.multipliers[:stop]) < 15:
            before = played.multipliers[start - 1] if start else 0.0
            excess = statistics.fmean(played.rates[start:stop]) - 0.35
            assert excess <= (played.multipliers[stop - 1] - before) / (0.2 * (stop - start)) + 1e-9


@given(_probabilities(0.45, 1.0), st.integers(0, 10_000))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_an_infeasible_instance_is_reported_at_its_smallest_size_with_lambda_bounded(truth: dict[int, float], seed: int) -> None:
    """Even the smallest size is 0.1 over budget: lambda needs 15 / (.2 * .1) = 750 steps at most to say so."""
    controller = Controller(SagcOptions(candidates=tuple(truth)), seed)
    played = play_events(controller, truth, 1400, 4, seed)
    assert max(played.multipliers) <= 15
    late = played.log2_sizes[900:]
    assert late.count(1.0) / len(late) >= 0.9
    assert statistics.fmean(played.infeasible[900:]) >= 0.9


def test_random_feasible_instances_are_feasible() -> None:
    noise = random.Random(0)
    for _ in range(100):
        truth = feasible_instance(noise, 0.35)
        assert 2 <= len(truth) <= 5
        assert list(truth.values()) == sorted(truth.values())
        assert truth[2] <= 0.35


def test_retreat_is_what_keeps_a_hard_instance_within_budget() -> None:
    """The smallest size straggles at delta exactly and the others little more: lambda lives at its limit."""
    truth = {2: 0.35, 4: 0.46, 8: 0.54, 16: 0.61}

    def rate(retreat: bool) -> float:
        controller = Controller(SagcOptions(candidates=tuple(truth), retreat=retreat), 0)
        return statistics.fmean(play_events(controller, truth, 2000, 4, 0).rates[500:])

    assert rate(True) <= 0.38
    assert rate(False) >= 0.48


def test_breaches_are_counted_by_window() -> None:
    """At eta .02 lambda needs thousands of steps; at .5 none of these instances is late."""
    assert budget_breaches({"eta": 0.02}, windows=(200,), instances=8)[200] >= 0.25
    assert budget_breaches({"eta": 0.5}, windows=(500,), instances=8) == {500: 0.0}


# -- the bandit -------------------------------------------------------------------------------------------------------------------


def test_the_papers_controller_comes_within_eight_hundredths_of_the_optimum() -> None:
    papers = {name: BANDIT_CONTROLLERS[name] for name in ("paper", "paper, eta 0.1")}
    rows = {row.controller: row for row in bandit_study(papers, steps=500, seeds=20, groups=4)}
    for name in papers:
        assert rows[name].optimum_log2_g == pytest.approx(2.8)
        assert abs(rows[name].mean_log2_g - 2.8) <= 0.08
        assert rows[name].straggler_rate_second_half <= 0.37
    # The first half pays for lambda's climb, twice as much at half the step size.
    assert rows["paper"].straggler_rate == pytest.approx(0.396, abs=0.01)
    assert rows["paper, eta 0.1"].straggler_rate == pytest.approx(0.442, abs=0.01)


@pytest.mark.parametrize("table", [{}, EXTENSIONS], ids=["paper", "all extensions"])
def test_a_decision_is_timed(table: dict[str, object]) -> None:
    assert 0 < decision_us(SagcOptions.model_validate(table), rounds=50) < 1e6


# -- lengths ----------------------------------------------------------------------------------------------------------------------


def test_traces_have_the_mean_length_that_they_state() -> None:
    noise = np.random.default_rng(0)
    for trace in TRACES:
        for step in (0, 150, 10_000):
            assert trace.sample(noise, step, 100, 400).mean() == pytest.approx(trace.mean_length(step), rel=0.03)


def test_a_growing_trace_goes_from_a_quarter_of_its_median_and_a_third_of_its_spread() -> None:
    trace = LengthTrace("grows", 0.9, median=400.0, growth=100)
    assert trace.at(0) == pytest.approx((100.0, 0.3))
    assert trace.at(50) == pytest.approx((250.0, 0.6))
    assert trace.at(100) == trace.at(999) == pytest.approx((400.0, 0.9))


def test_two_modes_stand_for_the_bandits_instance() -> None:
    found = straggler_probabilities(TRACES[3], (4, 8, 16), 2.0)
    assert list(found.values()) == pytest.approx([0.15, 0.42, 0.74], abs=0.015)


def test_over_sampling_trains_on_short_answers_and_a_fixed_size_does_not() -> None:
    trace = TRACES[1]
    rows = {
        row.controller: row
        for row in study(
            trace.name, [trace], {name: CONTROLLERS[name] for name in ("fixed 8", "over-sampling 8 of 12")}, steps=200, seeds=2
        )
    }
    fixed, over = rows["fixed 8"], rows["over-sampling 8 of 12"]
    assert fixed.kept_length == pytest.approx(1.0, abs=0.03)
    assert over.kept_length is not None
    assert over.kept_length < 0.8
    assert over.straggler_rate < 0.05 < fixed.straggler_rate
    assert fixed.mean_log2_g == over.mean_log2_g == 3.0


def test_sizes_per_prompt_beat_one_size_for_all_at_the_same_budget() -> None:
    makers = {name: LEVEL_CONTROLLERS[name] for name in ("paper", "prompt_aware")}
    rows = {row.controller: row for row in study("levels", LEVELS, makers, steps=500, seeds=2)}
    paper, aware = rows["paper"], rows["prompt_aware"]
    assert aware.straggler_rate_second_half <= paper.straggler_rate_second_half + 0.01
    assert aware.mean_log2_g > paper.mean_log2_g + 0.2
    assert aware.information_per_second is not None
    assert paper.information_per_second is not None
    assert aware.information_per_second > 1.15 * paper.information_per_second


def test_a_run_is_a_function_of_its_seed() -> None:
    def run(seed: int) -> tuple[float, ...]:
        return play_lengths(Controller(SagcOptions(counterfactual=1.0), seed), [TRACES[2]], 2.0, 60, 3, seed).log2_sizes

    assert run(1) == run(1) != run(2)
