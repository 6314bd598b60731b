"""Advantages, the over-long penalty, and who stays in a batch."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError
from swarm_protocols.group import Finish

from swarm_node.learning.advantages import assemble, group_advantages, one_reward, overlong_penalty
from swarm_node.learning.options import LearningOptions
from swarm_node.learning.samples import micro_batches, prepare, split_one_reward
from tests.support.learning_groups import scored_group

PROPERTY = settings(max_examples=50, deadline=None, derandomize=True)
REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16).map(np.array)


def test_center_subtracts_the_mean() -> None:
    assert group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "center").tolist() == [0.75, -0.25, -0.25, -0.25]


def test_standardize_divides_by_the_sample_standard_deviation() -> None:
    # Mean 0.25; squares 0.5625 + 3 * 0.0625 = 0.75; over n - 1 = 3 that is 0.25, whose root is 0.5.
    expected = [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]
    assert group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "standardize") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["center", "standardize"])
def test_float_noise_in_equal_rewards_gives_exactly_no_advantage(kind: Literal["center", "standardize"]) -> None:
    assert group_advantages(np.array([0.1 + 0.2, 0.3, 0.3 + 9e-7]), kind).tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="at least 2 rewards"):
        group_advantages(np.array([1.0]), "center")


@PROPERTY
@given(REWARDS, st.floats(-5, 5))
def test_centered_advantages_sum_to_zero_and_ignore_a_common_shift(rewards: NDArray[np.float64], shift: float) -> None:
    advantages = group_advantages(rewards, "center")
    assert abs(advantages.sum()) < 1e-9
    if not one_reward(rewards) and not one_reward(rewards + shift):
        assert group_advantages(rewards + shift, "center") == pytest.approx(advantages, abs=1e-9)


@PROPERTY
@given(REWARDS)
def test_standardizing_keeps_order_and_sign(rewards: NDArray[np.float64]) -> None:
    centered, standardized = group_advantages(rewards, "center"), group_advantages(rewards, "standardize")
    assert (np.sign(centered) == np.sign(standardized)).all()
    assert (np.argsort(centered, kind="stable") == np.argsort(standardized, kind="stable")).all()


def test_overlong_penalty_falls_linearly_from_start_to_limit() -> None:
    assert overlong_penalty(np.array([5, 10, 12, 15, 20, 99]), start=10, limit=20).tolist() == [0, 0, -0.2, -0.5, -1, -1]


def test_the_overlong_penalty_changes_dapos_advantages_but_not_which_groups_have_one_reward() -> None:
    options = LearningOptions(algorithm="dapo", overlong_start=4, overlong_limit=8)
    batch = prepare([scored_group([1.0, 0.0], [6, 2]), scored_group([1.0, 1.0], [6, 2], index=1)], options)
    # Rewards become 1 - 0.5 and 0: the mean is 0.25. The group that is right throughout is left out although penalties differ.
    assert [sample.advantage for sample in batch.samples] == [0.25, -0.25]
    assert batch.zero_variance_groups == 1


def test_a_completion_without_reward_leaves_its_group_and_does_not_count_in_the_mean() -> None:
    batch = prepare([scored_group([1.0, None, 0.0], [1, 2, 3])], LearningOptions())
    assert [sample.advantage for sample in batch.samples] == [0.5, -0.5]
    assert [len(sample.completion) for sample in batch.samples] == [1, 3]
    assert batch.unscored == 1
    assert batch.group_sizes == (2,)


def test_groups_with_fewer_than_two_rewards_or_only_one_are_counted_and_left_out() -> None:
    groups = [scored_group([1.0, None]), scored_group([0.0, 0.0]), scored_group([0.0, 1.0]), scored_group([None, None])]
    batch = prepare(groups, LearningOptions())
    assert (batch.small_groups, batch.zero_variance_groups, len(batch.samples)) == (2, 1, 2)
    # The group without variance is part of GRPO's average over groups; DAPO replaces such groups, so its average is without them.
    assert batch.counted_groups == 2
    assert prepare(groups, LearningOptions(algorithm="dapo")).counted_groups == 1


def test_samples_carry_temperature_truncation_and_owner() -> None:
    batch = prepare([scored_group([0.0, 1.0], own=False, temperature=0.7, finish=Finish.LENGTH)], LearningOptions())
    assert {(sample.temperature, sample.truncated, sample.own) for sample in batch.samples} == {(0.7, True, False)}
    assert (batch.own_groups, batch.foreign_groups) == (0, 1)


def test_dynamic_sampling_splits_off_what_teaches_nothing() -> None:
    right, mixed, lone = scored_group([1.0, 1.0]), scored_group([1.0, 0.0], index=1), scored_group([1.0, None], index=2)
    usable, useless = split_one_reward([right, mixed, lone], LearningOptions(algorithm="dapo"))
    assert usable == [mixed]
    assert useless == [right, lone]


def test_horizontal_parts_of_one_problem_are_assembled_in_order() -> None:
    a, b, c = scored_group([1.0], index=5), scored_group([0.0], index=6), scored_group([0.0], index=5, sender="peer", own=False)
    assert assemble([a, b, c]) == [(a, c), (b,)]


def test_horizontal_advantages_are_taken_against_the_assembled_groups_mean() -> None:
    parts = [scored_group([1.0, 1.0], index=5), scored_group([0.0, 0.0], index=5, sender="peer", own=False)]
    horizontal = prepare(parts, LearningOptions(collaboration="horizontal"))
    assert [sample.advantage for sample in horizontal.samples] == [0.5, 0.5, -0.5, -0.5]
    assert horizontal.group_sizes == (4,)
    assert (horizontal.own_groups, horizontal.foreign_groups) == (1, 1)
    vertical = prepare(parts, LearningOptions())
    assert vertical.zero_variance_groups == 2
    assert not vertical.samples


@PROPERTY
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


def test_micro_batches_begin_with_the_longest() -> None:
    assert micro_batches([2, 9, 4, 3], budget=9) == [[1], [2, 3], [0]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"algorithm": "dr-grpo", "advantage": "standardize"}, "dr-grpo"),
        ({"algorithm": "dapo", "overlong_start": 5}, "belong together"),
        ({"algorithm": "dapo", "overlong_start": 5, "overlong_limit": 5}, "must be below"),
        ({"overlong_start": 5, "overlong_limit": 9}, "part of 'dapo'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearningOptions(**choices)


def test_clip_above_is_dapos_own_unless_set() -> None:
    assert LearningOptions().ratio_cap == 0.2
    assert LearningOptions(algorithm="dapo").ratio_cap == 0.28
    assert LearningOptions(algorithm="dapo", clip_high=0.1).ratio_cap == 0.1
