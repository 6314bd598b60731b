"""The group-size controller: a scripted path worked by hand, and its invariants."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from pydantic import ValidationError

from swarm_node.control.decision import ControlStateError
from swarm_node.control.events import median, straggler_share, straggles
from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller

CALM = [10, 11, 12, 13]
"""Ratio 13 / 11.5."""
STRAGGLING = [10, 10, 10, 90]
"""Ratio 9."""


def test_the_median_of_an_even_count_is_the_mean_of_the_middle_two() -> None:
    assert median([4, 1, 3, 2]) == 2.5
    assert median([9, 1, 5]) == 5.0


def test_a_group_straggles_only_strictly_above_the_ratio() -> None:
    assert not straggles([1, 1, 3, 4], 2.0)  # median 2, ratio exactly 2
    assert straggles([1, 1, 3, 5], 2.0)
    assert not straggles([7], 2.0)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_an_empty_group_or_an_empty_completion_is_an_error(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        straggles(lengths, 2.0)


def test_the_share_of_a_step_is_the_mean_or_the_chance_of_any() -> None:
    assert straggler_share([True, False, False, True], "group") == 0.5
    assert straggler_share([True, False], "any") == 1.0
    assert straggler_share([0.5, 0.5], "any") == 0.75


def test_scripted_path_of_sizes_multiplier_and_counts() -> None:
    """eta .25, delta .4, gamma .5: numbers small enough for paper.

    While lambda < 1 a difference of probabilities cannot outweigh one doubling of G, so the path needs no luck: up, and stay.
    """
    controller = Controller(SagcOptions(eta=0.25, delta=0.4, gamma=0.5), seed=0)
    steps: list[tuple[tuple[list[int], list[int]], int, float, float, list[tuple[float, float]]]]
    steps = [  # lengths of the step's two groups; G; S; lambda after; counts (alpha, beta) of 4, 8, 16 after
        ((CALM, CALM), 8, 0.0, 0.0, [(0, 0), (0, 1), (0, 0)]),
        ((CALM, STRAGGLING), 16, 0.5, 0.025, [(0, 0), (0, 0.5), (0.5, 0.5)]),
        ((STRAGGLING, STRAGGLING), 16, 1.0, 0.175, [(0, 0), (0, 0.25), (1.25, 0.25)]),
        ((STRAGGLING, STRAGGLING), 16, 1.0, 0.325, [(0, 0), (0, 0.125), (1.625, 0.125)]),
        ((CALM, CALM), 16, 0.0, 0.225, [(0, 0), (0, 0.0625), (0.8125, 1.0625)]),
    ]
    for lengths, size, share, multiplier, counts in steps:
        decision = controller.choose()
        assert decision.size == size
        observation = controller.observe(lengths)
        assert observation.share == observation.rate == share
        assert observation.multiplier == controller.multiplier == pytest.approx(multiplier, abs=1e-12)
        assert controller.state()["counts"] == [pytest.approx(pair, abs=1e-12) for pair in counts]
    assert controller.posterior == pytest.approx({4: 0.5, 8: 1 / 2.0625, 16: 1.8125 / 3.875})


def test_the_choice_weighs_doublings_of_size_against_drawn_probabilities() -> None:
    """lambda 4: 8 with p .1 is worth 3 - .4, 4 with p .05 is worth 2 - .2, 16 with p .5 is worth 4 - 2."""
    controller = Controller(SagcOptions(lambda_0=4.0), seed=0)
    controller.observe_events([False])  # S = 0: lambda 4 - .2 * .35 = 3.93
    draws = iter([0.05, 0.1, 0.05, 0.1, 0.5, 0.05, 0.5, 0.05])
    controller._random.betavariate = lambda alpha, beta: next(draws)  # type: ignore[method-assign]
    first = controller.choose()
    assert (first.size, first.changed, first.sampled) == (8, True, {4: 0.05, 8: 0.1})  # 16 is out of reach from 4
    second = controller.choose()
    assert (second.size, second.changed, second.sampled) == (8, False, {4: 0.05, 8: 0.1, 16: 0.5})
    third = controller.choose()  # 16 at .05 is worth 3.80, 8 at .5 only 1.04
    assert third.size == 16
    assert third.multiplier == pytest.approx(3.93)


def test_any_charges_a_whole_step_for_one_straggler() -> None:
    controller = Controller(SagcOptions(event="any"), seed=0)
    controller.choose()
    observation = controller.observe([CALM, CALM, STRAGGLING])
    assert (observation.stragglers, observation.groups, observation.share) == (1, 3, 1.0)
    assert observation.multiplier == pytest.approx(0.2 * 0.65)


def test_without_stragglers_the_largest_size_is_reached_and_kept() -> None:
    controller = Controller(SagcOptions(candidates=(2, 4, 8, 16, 32)), seed=3)
    path = []
    for _ in range(50):
        path.append(controller.choose().size)
        assert controller.observe([CALM]).multiplier == 0.0
    assert path == [4, 8, 16] + [32] * 47


def test_when_every_group_straggles_the_smallest_size_is_kept_and_reported_infeasible() -> None:
    controller = Controller(SagcOptions(), seed=3)
    for step in range(400):
        size = controller.choose().size
        observation = controller.observe([STRAGGLING])
        assert 0.0 <= observation.multiplier <= 15.0
        if step >= 130:  # 15 / (.2 * .65) = 115.4 steps pin lambda
            assert size == 4
    assert observation.infeasible


def test_without_retreat_sizes_that_straggle_alike_let_the_largest_win() -> None:
    """Why `retreat` is on: equal probabilities cost alike at any lambda, and log2 G decides."""
    controller = Controller(SagcOptions(retreat=False), seed=3)
    sizes = []
    for _ in range(400):
        sizes.append(controller.choose().size)
        controller.observe([STRAGGLING])
    assert sizes[200:].count(16) > 100
    assert controller.infeasible


def test_retreat_changes_nothing_below_the_limit() -> None:
    def path(retreat: bool) -> list[int]:
        controller, noise = Controller(SagcOptions(retreat=retreat), seed=11), random.Random(5)
        sizes = []
        for _ in range(300):
            sizes.append(controller.choose().size)
            assert controller.observe_events([noise.random() < sizes[-1] / 32]).multiplier < 15
        return sizes

    assert path(True) == path(False)


def test_the_size_moves_at_most_one_candidate_a_step_and_lambda_stays_in_bounds() -> None:
    options = SagcOptions(candidates=(2, 3, 5, 8, 13), lambda_max=6.0, eta=1.0)
    controller, noise = Controller(options, seed=7), random.Random(2)
    index, moves = 0, 0
    for _ in range(2000):
        decision = controller.choose()
        now = options.candidates.index(decision.size)
        assert abs(now - index) <= 1
        assert decision.changed == (now != index)
        moves, index = moves + decision.changed, now
        controller.observe_events([noise.random() < 0.12 * (now + 1) for _ in range(3)])
        assert 0.0 <= controller.multiplier <= 6.0
    assert moves > 100


def test_hold_keeps_every_size_for_its_minimum_number_of_steps() -> None:
    controller, noise = Controller(SagcOptions(hold=5), seed=1), random.Random(4)
    sizes = []
    for _ in range(600):
        sizes.append(controller.choose().size)
        controller.observe_events([noise.random() < sizes[-1] / 20])
    changes = [step for step in range(1, 600) if sizes[step] != sizes[step - 1]]
    gaps = [after - before for before, after in pairwise(changes)]
    assert min(gaps) == 5
    assert sizes[:5] == [8] * 5  # the first step may move, and is then held


def test_a_fixed_size_is_never_left_and_is_only_counted() -> None:
    controller = Controller(SagcOptions(group_size=6), seed=0)
    for _ in range(20):
        decision = controller.choose()
        assert (decision.size, decision.changed) == (6, False)
        observation = controller.observe([STRAGGLING, CALM])
        assert (observation.rate, observation.multiplier, observation.infeasible) == (0.5, 0.0, False)


def test_groups_whose_event_the_token_limit_hides_are_counted() -> None:
    controller = Controller(SagcOptions(), seed=0)
    controller.choose()
    lengths = [[20, 20], [20, 5, 5, 6], [18, 20, 19, 17], [4, 5, 6, 7]]
    cut = [[True, True], [True, False, False, False], [False, True, False, False], [False] * 4]
    observation = controller.observe(lengths, cut)
    assert observation.stragglers == 1  # the second fired although it was cut: more tokens would only raise its ratio
    assert observation.truncated_groups == 1
    assert observation.censored_groups == 2


def test_a_drifting_straggler_probability_is_tracked() -> None:
    """8 and 16 straggle from step 1000 on, when the policy starts to ramble: sizes fall, and rise when it stops."""
    controller, noise = Controller(SagcOptions(), seed=5), random.Random(8)
    sizes, events = [], []
    for step in range(3000):
        size = controller.choose().size
        bad = 1000 <= step < 2000
        probability = {4: 0.2, 8: 0.8, 16: 0.95}[size] if bad else {4: 0.02, 8: 0.05, 16: 0.1}[size]
        event = noise.random() < probability
        controller.observe_events([event])
        sizes.append(size)
        events.append(event)
    assert sizes[500:1000].count(16) > 450
    assert sizes[1200:2000].count(4) > 500
    assert sum(events[1200:2000]) / 800 <= 0.38
    assert sizes[2300:].count(16) > 650


def test_same_seed_same_path_and_another_seed_another() -> None:
    def path(seed: int) -> list[int]:
        controller, noise = Controller(SagcOptions(), seed), random.Random(0)
        sizes = []
        for _ in range(200):
            sizes.append(controller.choose().size)
            controller.observe_events([noise.random() < sizes[-1] / 20])
        return sizes

    assert path(1) == path(1) != path(2)


@pytest.mark.parametrize("between", ["steps", "choice and lessons"])
def test_a_controller_restored_through_json_goes_on_as_if_never_stopped(between: str) -> None:
    options = SagcOptions(hold=3)
    noise = random.Random(9)
    uniform = [noise.random() for _ in range(400)]

    def walk(controller: Controller, start: int, stop: int) -> list[tuple[int, float]]:
        path = []
        for step in range(start, stop):
            size = controller.choose().size
            path.append((size, controller.observe_events([uniform[step] < size / 20]).multiplier))
        return path

    whole = Controller(options, seed=4)
    expected = walk(whole, 0, 400)
    first = Controller(options, seed=4)
    assert walk(first, 0, 137) == expected[:137]
    if between == "choice and lessons":
        size = first.choose().size
    saved = json.dumps(first.state())
    second = Controller(options, seed=999)
    second.restore(json.loads(saved))
    start = 137
    if between == "choice and lessons":
        assert (size, second.observe_events([uniform[137] < size / 20]).multiplier) == expected[137]
        start = 138
    assert walk(second, start, 400) == expected[start:]
    assert second.state() == whole.state()


def test_a_restored_controller_stands_where_it_stood() -> None:
    controller = Controller(SagcOptions(), seed=0)
    while controller.choose().size != 16:
        controller.observe([CALM])
    for candidates, size in [((4, 8, 16), 16), ((4, 8, 12), 12), ((20, 40), 20)]:  # the nearest that is not above it, or the smallest
        other = Controller(SagcOptions(candidates=candidates, hold=1000), seed=1)
        other.restore(controller.state())
        assert other.choose().size == size


def test_a_state_is_restored_into_other_candidates_by_size() -> None:
    old = Controller(SagcOptions(), seed=0)
    for _ in range(4):
        old.choose()
        old.observe([CALM])
    new = Controller(SagcOptions(candidates=(4, 12, 16)), seed=0)
    new.restore(old.state())
    of_4, of_8, of_16 = old.state()["counts"]
    assert of_8 != [0.0, 0.0]
    assert new.state()["counts"] == [of_4, [0.0, 0.0], of_16]
    assert new.choose().size == 16


@pytest.mark.parametrize("damage", [{"version": 99}, {"random": [3, [1, 2], None]}, {"counts": 7}, {"age": "old"}])
def test_a_state_that_cannot_be_read_is_refused_and_changes_nothing(damage: dict[str, object]) -> None:
    controller = Controller(SagcOptions(), seed=0)
    controller.choose()
    before = controller.state()
    with pytest.raises(ControlStateError, match="controller state"):
        controller.restore({**before, "multiplier": 3.0, **damage})
    assert controller.state() == before


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"candidates": (1, 4)}, "greater than or equal to 2"),
        ({"candidates": (8, 4)}, "strictly increasing"),
        ({"candidates": (4, 4)}, "strictly increasing"),
        ({"candidates": ()}, "strictly increasing"),
        ({"lambda_0": 20.0}, "above control.lambda_max"),
        ({"delta": 1.0}, "less than 1"),
        ({"gama": 0.9}, "Extra inputs"),
    ],
)
def test_bad_options_are_refused_with_the_limit_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SagcOptions.model_validate(table)


def test_a_step_without_groups_is_an_error() -> None:
    controller = Controller(SagcOptions(), seed=0)
    with pytest.raises(ValueError, match="at least one group"):
        controller.observe([])
