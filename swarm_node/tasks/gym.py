"""`reasoning-gym:NAME` and `reasoning-gym:NAME?option=value&…`: any dataset of the reasoning-gym package, with its own scorer.

    reasoning-gym:gsm_symbolic
    reasoning-gym:chain_sum?max_terms=2&max_digits=1

The datasets generate their problems. One question in HOLDOUT belongs to `eval`, decided by a hash of its text alone, so that no option,
seed or index brings it into training. There is no `ood` split: evaluate on harder options of the same dataset for that.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import numpy as np

from swarm_node.tasks.answers import combine, last_line, last_number, parse_number, tagged
from swarm_node.tasks.base import Problem, Reward, RewardError, Split, Task, TaskError
from swarm_node.tasks.draws import Draws, hash64
from swarm_node.tasks.gym_guards import may_score

KIND = "reasoning-gym"

HOLDOUT = 4
"""One in HOLDOUT questions is held out for `eval`: an evaluation problem costs HOLDOUT draws on average."""

MAX_DRAWS = 100
"""Draws until a question falls on the side of its split; a dataset of a few questions may have none there."""

_PROMPT = "{question}\n\nPut only the final answer between <answer> and </answer>, for example: <answer>...</answer>"

_REFUSED = {
    **dict.fromkeys(
        ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"),
        "draws other problems in every process (it iterates over sets of texts), so peers cannot regenerate its prompts",
    ),
    "game_of_life_halting": "scores every answer as right, so there is nothing to learn",
    "composite": "mixes datasets by a configuration of its own: choose one of them",
    "intermediate_integration": "scores with symbolic simplification of the answer, which one hostile answer can keep busy for hours",
}
# They draw at construction, as many problems as asked for; all others draw a problem when it is asked for, from seed + index.
_DRAWN_AT_CONSTRUCTION = frozenset({"acre", "gsm_symbolic", "list_functions"})


class Gym(Task):
    """One dataset with options. The text in the last `<answer>…</answer>` that holds any is scored.

    Without the tags the last number is scored where a number is asked for, and the last line elsewhere: small models answer long before
    they write tags (SmolLM2-135M at temperature 0.5: half of one-digit products right, no tag in any). They lose the format's share.
    """

    def __init__(self, dataset: str, options: str = "") -> None:
        """
        Args:
            dataset: Name in reasoning-gym, for example `chain_sum`.
            options: Fields of its configuration, `name=value` joined by `&`.

        Raises:
            TaskError: no such dataset or option, a value that the dataset refuses, or a dataset that cannot be shared with peers.
        """
        self._dataset_name = dataset
        self._options = _parse_options(dataset, options)
        self._dataset = self._create(0, 1)
        query = "&".join(f"{name}={_show(value)}" for name, value in self._options.items())
        self.name = f"{KIND}:{dataset}" + (f"?{query}" if query else "")

    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        """The problem at `index`; `answer` is the dataset's whole entry, which its scorer needs.

        Raises:
            TaskError: the split is `ood`, no question falls into it, or the dataset fails.
        """
        if split == "ood":
            raise TaskError(f"{self.name} has no ood split: evaluate on harder options of {self._dataset_name} instead")
        draws = Draws(KIND, self._dataset_name, seed, index, split)
        for _ in range(MAX_DRAWS):
            entry = self._generate(draws.below(2**32))
            question = entry["question"]
            if (hash64(KIND, self._dataset_name, question) % HOLDOUT == 0) == (split == "eval"):
                return Problem(self.name, split, seed, index, _PROMPT.format(question=question), entry)
        raise TaskError(
            f"{self.name} has too few different questions to hold some out: none for {split} in {MAX_DRAWS} draws. Loosen its options"
        )

    def reward(self, problem: Problem, completion: str) -> Reward:
        """0.1 for an answer between the tags, 0.9 times the dataset's own score; `correct` is a full score, with tags or without."""
        entry, stated = problem.answer, tagged(completion)
        form = float(stated is not None)
        answer = _unmarked(completion, entry["answer"]) if stated is None else stated
        if not answer or not may_score(self._dataset_name, answer, entry["answer"]):
            return combine(form, 0.0, correct=False)
        try:
            score = float(self._dataset.score_answer(answer, entry))
        except Exception as error:
            raise RewardError(f"the scorer of {self.name} failed on an answer of {len(answer)} characters: {error!r}") from error
        if not (math.isfinite(score) and 0 <= score <= 1 + 1e-9):
            raise RewardError(f"the scorer of {self.name} gave {score}, which is not in [0, 1]")
        return combine(form, min(score, 1.0), correct=score >= 1 - 1e-9)

    def _generate(self, number: int) -> dict[str, Any]:
        """Entry `number` of the dataset, in [0, 2**32)."""
        try:
            with _own_randomness(number):
                drawn = self._dataset_name in _DRAWN_AT_CONSTRUCTION
                entry: dict[str, Any] = self._create(number, 1)[0] if drawn else self._dataset[number]
                return entry
        except Exception as error:  # a hundred generators of others; peers name problems, and may name one at which a generator fails
            raise TaskError(f"{self.name} failed to generate entry {number}: {error!r}. Choose other options") from error

    def _create(self, seed: int, size: int) -> Any:
        from reasoning_gym import create_dataset

        try:
            with _own_randomness(seed):
                return create_dataset(self._dataset_name, seed=seed, size=size, **self._options)
        except (AssertionError, ValueError) as error:
            raise TaskError(f"{KIND}:{self._dataset_name} refuses its options {self._options}: {error}") from error


def load_gym(argument: str) -> Gym:
    """The task from what follows `reasoning-gym:`.

    Raises:
        TaskError: as `Gym`.
    """
    dataset, _, options = argument.partition("?")
    return Gym(dataset, options)


def _unmarked(completion: str, expected: object) -> str | None:
    if parse_number(str(expected)) is not None:
        return last_number(completion)
    return last_line(completion)


def _parse_options(dataset: str, text: str) -> dict[str, bool | int | float]:
    """The options that differ from their defaults, sorted: equal tasks have equal names."""
    # Takes seconds and half the size of torch's import; only this task needs it.
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        near = get_close_matches(dataset, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"write {KIND}:NAME, for example {KIND}:gsm_symbolic or {KIND}:chain_sum"
        raise TaskError(f"reasoning-gym has no dataset {dataset!r}: {hint}")
    if dataset in _REFUSED:
        raise TaskError(f"{KIND}:{dataset} cannot be a task: it {_REFUSED[dataset]}")
    defaults = {
        field.name: field.default
        for field in fields(DATASETS[dataset][1])
        if isinstance(field.default, bool | int | float) and field.name not in ("seed", "size")
    }
    options: dict[str, bool | int | float] = {}
    for part in filter(None, text.split("&")):
        name, _, value = part.partition("=")
        if name not in defaults or name in options:
            raise TaskError(f"{KIND}:{dataset} has no option {name!r}, or has it twice: choose from {', '.join(sorted(defaults))}")
        options[name] = _parse_value(f"{dataset}?{part}", value, defaults[name])
    return {name: value for name, value in sorted(options.items()) if value != defaults[name]}


def _parse_value(shown: str, text: str, default: bool | int | float) -> bool | int | float:
    if isinstance(default, bool):
        if text in ("true", "false"):
            return text == "true"
        raise TaskError(f"{KIND}:{shown}: write true or false")
    kind = type(default)
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= 10**9:
        raise TaskError(f"{KIND}:{shown}: write {'an integer' if kind is int else 'a number'} of at most 10^9")
    return value


def _show(value: bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Some datasets draw from the process's generators or print: give them seeded ones, and leave ours as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
