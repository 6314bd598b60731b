"""word-sum: the same sums as chain-sum, spelt."""

from __future__ import annotations

import pytest

from swarm_node.tasks.base import Split
from swarm_node.tasks.chain_sum import ChainSum
from swarm_node.tasks.registry import load_task
from swarm_node.tasks.word_sum import WordSum, spell


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (7, "seven"),
        (15, "fifteen"),
        (20, "twenty"),
        (41, "forty-one"),
        (100, "one hundred"),
        (999, "nine hundred ninety-nine"),
        (2345, "two thousand three hundred forty-five"),
        (120_016, "one hundred twenty thousand sixteen"),
    ],
)
def test_numbers_are_spelt(number: int, words: str) -> None:
    assert spell(number) == words


def test_all_numbers_that_a_level_can_hold_are_spelt_differently() -> None:
    assert len({spell(number) for number in range(3000)}) == 3000


@pytest.mark.parametrize("split", ["train", "eval", "ood"])
def test_a_problem_is_chain_sums_problem_in_words(split: Split) -> None:
    for index in range(50):
        digits, words = ChainSum(2).problem(4, index, split), WordSum(2).problem(4, index, split)
        assert words.prompt == " plus ".join(spell(int(term)) for term in digits.prompt.removesuffix("=").split("+")) + "="
        assert words.answer == digits.answer
        assert words.task == "word-sum:2"
        assert load_task("word-sum").reward(words, f"#{digits.answer}").correct
