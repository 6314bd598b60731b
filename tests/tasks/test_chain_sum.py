"""chain-sum: what it asks, what it accepts, and that evaluation never leaks into training."""

from __future__ import annotations

import pytest

from swarm_node.tasks.base import TaskError
from swarm_node.tasks.chain_sum import LEVELS, ChainSum, is_held_out
from swarm_node.tasks.registry import load_task


def terms_of(prompt: str) -> tuple[int, ...]:
    return tuple(map(int, prompt.removesuffix("=").split("+")))


def test_the_prompt_is_the_sum_and_the_answer_its_value() -> None:
    problem = ChainSum(2).problem(seed=1, index=5)
    assert problem.prompt.endswith("=")
    assert problem.answer == sum(terms_of(problem.prompt))
    assert (problem.task, problem.split, problem.seed, problem.index, problem.level) == ("chain-sum:2", "train", 1, 5, 2)


def test_problems_never_change_between_releases() -> None:
    # Peers of different versions regenerate each other's prompts: these may only change together with the protocol's major version.
    task = ChainSum(2)
    assert [task.problem(0, index).prompt for index in range(3)] == ["25+20+28=", "11+9+29+9=", "9+18+7+22="]
    assert task.problem(2**53 - 1, 2**53 - 1, "eval").prompt == "18+21+6+21="


@pytest.mark.parametrize("level", LEVELS)
def test_terms_stay_in_the_levels_ranges(level: int) -> None:
    low, high, max_term = LEVELS[level]
    for split in ("train", "eval"):
        drawn = [terms_of(ChainSum(level).problem(3, index, split).prompt) for index in range(300)]
        assert {len(terms) for terms in drawn} == set(range(low, high + 1))
        assert all(1 <= term <= max_term for terms in drawn for term in terms)
    for index in range(100):
        terms = terms_of(ChainSum(level).problem(3, index, "ood").prompt)
        assert high < len(terms) <= high + 2
        assert max_term < max(terms) <= 2 * max_term


def test_no_evaluation_sum_occurs_in_training_at_any_level_or_in_another_order() -> None:
    held_out = {
        tuple(sorted(terms_of(ChainSum(level).problem(seed, index, "eval").prompt)))
        for level in (1, 2)
        for seed in (0, 1)
        for index in range(400)
    }
    trained = {
        tuple(sorted(terms_of(ChainSum(level).problem(seed, index).prompt))) for level in (1, 2) for seed in (0, 1) for index in range(2000)
    }
    assert held_out.isdisjoint(trained)
    assert is_held_out((3, 1, 2)) == is_held_out((1, 2, 3))


def test_seeds_and_indices_give_different_streams() -> None:
    task = ChainSum(3)
    first = [task.problem(0, index).prompt for index in range(50)]
    assert first == [task.problem(0, index).prompt for index in range(50)]
    assert len(set(first)) == 50
    assert first != [task.problem(1, index).prompt for index in range(50)]


@pytest.mark.parametrize(
    ("completion", "value", "form"),
    [
        ("7+15=22,22+9=31#31", 1.0, 1.0),
        ("#31", 1.0, 1.0),
        ("#30#31", 1.0, 1.0),
        ("#031", 1.0, 1.0),
        ("#32", 0.0, 1.0),
        ("#31 ", 0.0, 0.0),
        ("#31,", 0.0, 0.0),
        ("#31\n", 0.0, 0.0),
        ("31", 0.0, 0.0),
        ("#", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("#-31", 0.0, 0.0),
        ("#٣١", 0.0, 0.0),
        ("#" + "9" * 100_000, 0.0, 0.0),
    ],
)
def test_only_the_final_answer_counts(completion: str, value: float, form: float) -> None:
    task = ChainSum(2)
    problem = task.problem(0, 0)
    assert problem.answer != 31
    asked = type(problem)(task.name, "train", 0, 0, "7+15+9=", 31, 2)
    reward = task.reward(asked, completion)
    assert (reward.value, reward.correct, reward.parts) == (value, value == 1.0, {"answer": value, "format": form})


def test_a_level_that_does_not_exist_is_named_with_the_choices() -> None:
    with pytest.raises(TaskError, match=r"no level 9: choose one of 1, 2, 3, 4, 5"):
        load_task("chain-sum:9")
