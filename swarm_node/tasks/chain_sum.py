"""`chain-sum:LEVEL`: sums of several terms, worked step by step.

    prompt       7+15+9=
    completion   7+15=22,22+9=31#31

Only what follows the last `#` is graded, and it must end the completion. How the policy gets there is its own affair, so the lengths
of one prompt's completions differ: a bare `#31`, a chain of partial sums, or a chain followed by any number of checks (`?22+9=31`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from swarm_node.tasks.base import Problem, Reward, Split, Task, TaskError
from swarm_node.tasks.draws import Draws, hash64


class Level(NamedTuple):
    """How many terms, and how large: both ranges include their ends."""

    min_terms: int
    max_terms: int
    max_term: int


LEVELS = {
    1: Level(2, 3, 9),
    2: Level(3, 4, 29),
    3: Level(4, 6, 49),
    4: Level(6, 8, 99),
    5: Level(8, 12, 999),
}
DEFAULT_LEVEL = 2

HOLDOUT = 8
"""One in HOLDOUT of all sums is held out for `eval`, chosen by the hash of its sorted terms: an order of the same terms is the same sum."""

_ANSWER = re.compile(r"#([0-9]{1,12})\Z")


class ChainSum(Task):
    """Sums of one level. `train` and `eval` share the level's ranges and no sum; `ood` has more terms, some of them larger."""

    kind = "chain-sum"

    def __init__(self, level: int = DEFAULT_LEVEL) -> None:
        if level not in LEVELS:
            raise TaskError(
                f"{self.kind} has no level {level}: choose one of {', '.join(map(str, LEVELS))}, for example {self.kind}:{DEFAULT_LEVEL}"
            )
        self.level = level
        self.name = f"{self.kind}:{level}"

    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        """The sum at `index`; `answer` is its value as an int."""
        terms = draw_terms(self.level, seed, index, split)
        return Problem(self.name, split, seed, index, self.prompt(terms), sum(terms), self.level)

    def prompt(self, terms: tuple[int, ...]) -> str:
        """The terms in digits: `7+15+9=`."""
        return "+".join(map(str, terms)) + "="

    def reward(self, problem: Problem, completion: str) -> Reward:
        """1 for the right sum behind the last `#`, else 0; `format` tells whether there was a final answer at all."""
        match = _ANSWER.search(completion)
        correct = match is not None and int(match[1]) == problem.answer
        return Reward(float(correct), correct, {"answer": float(correct), "format": float(match is not None)})


def draw_terms(level: int, seed: int, index: int, split: Split) -> tuple[int, ...]:
    """The terms of one sum, drawn until they fit `split`; `ood` means one or two terms more than the level has, and at least one larger."""
    low, high, largest = LEVELS[level]
    draws = Draws("chain-sum", level, seed, index, split)
    while True:
        if split == "ood":
            terms = _draw(draws, high + 1, high + 2, 2 * largest)
            if max(terms) > largest:
                return terms
        else:
            terms = _draw(draws, low, high, largest)
            if is_held_out(terms) == (split == "eval"):
                return terms


def _draw(draws: Draws, low: int, high: int, largest: int) -> tuple[int, ...]:
    return tuple([draws.between(1, largest) for _ in range(draws.between(low, high))])


def is_held_out(terms: tuple[int, ...]) -> bool:
    """Whether a sum belongs to `eval`. Levels share the rule, so training on one level never shows another's `eval`."""
    return hash64("chain-sum", *sorted(terms)) % HOLDOUT == 0
