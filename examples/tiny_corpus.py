"""What the tiny models are raised on: problems with completions in several styles, from hasty guesses to sums checked over and over.

A policy that imitates this mixture solves only some problems when it samples, and its completions of one prompt differ in length with a
heavy tail. Reinforcement learning finds the reliable styles in it.
"""

from __future__ import annotations

from collections.abc import Callable

from swarm_node.tasks.chain_sum import draw_terms
from swarm_node.tasks.draws import Draws
from swarm_node.tasks.word_sum import WordSum

PERCENT = 100
DOUBT = 46
"""Percent of the step-by-step sums that get a check, of those the ones that get another, and so on."""
MAX_CHECKS = 14
Sample = tuple[str, str]


def sum_sample(draws: Draws, level: int) -> Sample:
    """A training problem of `chain-sum:LEVEL`, worked in one of the styles."""
    terms = _terms(draws, level)
    return "+".join(map(str, terms)) + "=", work(draws, terms)


def word_sum_sample(draws: Draws, level: int) -> Sample:
    """The same in words; the completion first writes the sum in digits."""
    terms = _terms(draws, level)
    return WordSum(level).prompt(terms), "+".join(map(str, terms)) + "=" + work(draws, terms)


def work(draws: Draws, terms: tuple[int, ...]) -> str:
    """One of three ways to a sum. The first character commits to the way."""
    way = draws.below(PERCENT)
    if way < 10:
        return f"#{_slip(draws, sum(terms), 85)}"
    return "~" + _hasty(draws, terms) if way < 40 else _steps(draws, terms)


def _hasty(draws: Draws, terms: tuple[int, ...]) -> str:
    """Sums the terms in two lumps, and is mostly wrong."""
    cut = 2 if len(terms) <= 3 else len(terms) // 2 + 1
    head = _slip(draws, sum(terms[:cut]), 60)
    total = _slip(draws, head + sum(terms[cut:]), 60)
    return f"{'+'.join(map(str, terms[:cut]))}={head},{'+'.join(map(str, (head, *terms[cut:])))}={total}#{total}"


def _steps(draws: Draws, terms: tuple[int, ...]) -> str:
    """One partial sum after another, the last one checked any number of times.

    Each check has a third of the slips of the one before it, so long completions earn more. Otherwise learning would soon cut the tail of
    the lengths off: a loss that averages over a completion's tokens favours short ones among equals.
    """
    steps = []
    total = terms[0]
    for term in terms[1:-1]:
        before, total = total, _slip(draws, total + term, 8)
        steps.append(f"{before}+{term}={total}")
    slip, last = 64, terms[-1]
    final = _slip(draws, total + last, slip)
    text = ",".join([*steps, f"{total}+{last}={final}"])
    checks = 0
    while draws.below(PERCENT) < DOUBT and checks < MAX_CHECKS:
        checks, slip = checks + 1, slip // 3
        final = _slip(draws, total + last, slip)
        text += f"?{total}+{last}={final}"
    return f"{text}#{final}"


def _slip(draws: Draws, value: int, percent: int) -> int:
    """`value`, or, with the given probability, something near it."""
    if draws.below(PERCENT) >= percent:
        return value
    return abs(value + (1, -1, 10, -10, 2, -2)[draws.below(6)])


def _terms(draws: Draws, level: int) -> tuple[int, ...]:
    return draw_terms(level, 0x7117, draws.below(2**32), "train")


def copy_sample(draws: Draws) -> Sample:
    """3 to 8 letters to be repeated, so that a model learns to read its prompt."""
    text = _letters(draws)
    return f"copy {text}=", f"#{text}"


def reverse_sample(draws: Draws) -> Sample:
    """3 to 8 letters to be written backwards."""
    text = _letters(draws)
    return f"reverse {text}=", f"#{text[::-1]}"


def sort_sample(draws: Draws) -> Sample:
    """3 to 8 letters to be put in alphabetical order."""
    text = _letters(draws)
    return f"sort {text}=", f"#{''.join(sorted(text))}"


def _letters(draws: Draws) -> str:
    return "".join(chr(ord("a") + draws.below(26)) for _ in range(draws.between(3, 8)))


Mix = tuple[tuple[int, Callable[[Draws], Sample]], ...]
"""Weights in percent, and what they weigh."""

SUMS: Mix = (
    (15, lambda draws: sum_sample(draws, 1)),
    (70, lambda draws: sum_sample(draws, 2)),
    (15, lambda draws: sum_sample(draws, 3)),
)
WORDS: Mix = (
    (45, lambda draws: sum_sample(draws, 2)),
    (10, lambda draws: sum_sample(draws, 1)),
    (30, lambda draws: word_sum_sample(draws, 2)),
    (5, copy_sample),
    (5, reverse_sample),
    (5, sort_sample),
)


def draw(mix: Mix, draws: Draws) -> Sample:
    """One (prompt, completion) pair of the mix."""
    ticket = draws.below(PERCENT)
    for weight, sample in mix:
        if ticket < weight:
            return sample(draws)
        ticket -= weight
    raise ValueError(f"the weights of a mix sum to {PERCENT}, these end at {PERCENT - 1 - ticket}")
