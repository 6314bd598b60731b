"""Evaluation: the numbers, which problems and noise are used, and reading a node that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from swarm_protocols.group import Completion, Finish

from swarm_node import evaluation
from swarm_node.checkpoint import Checkpoint, save_checkpoint
from swarm_node.config import Config
from swarm_node.evaluation import Evaluation, EvaluationError, evaluate, load_trained
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import Engine, GroupRequest, Rollout, RolloutReport
from swarm_node.tasks.base import Problem, Reward, RewardError, Split, Task, TaskError


class Parrot:
    """A policy whose text is its tokens. A prompt has one token, or as many as it says behind a colon."""

    context = 20

    def encode_prompt(self, prompt: str) -> np.ndarray:
        number, _, length = prompt.partition(":")
        return np.full(int(length or 1), int(number), dtype=np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))


class Scripted(Engine):
    """An engine that repeats its key: problem k gets completions of k + 1 tokens; the first of each group ends at the limit."""

    name = "scripted"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def generate(
        self, requests: Sequence[GroupRequest], *, seed: int, temperature: float, max_new_tokens: int, dense: bool = False
    ) -> Rollout:
        groups = []
        for request in requests:
            assert dense, "the policy itself is what an evaluation measures"
            self.asked.append((request.key, int(request.prompt[0]), seed))
            tokens = np.full(request.key + 1, request.key, dtype=np.int32)
            finishes = [Finish.LENGTH] + [Finish.STOP] * (request.size - 1)
            groups.append(tuple(Completion(tokens + slot, np.zeros(len(tokens), np.float32), end) for slot, end in enumerate(finishes)))
        return Rollout(tuple(groups), RolloutReport(0, 1.0, 0.0, 0.0))

    def policy_updated(self, step: int) -> None:
        raise AssertionError("an evaluation changes nothing")

    def state(self) -> dict[str, object]:
        raise AssertionError("an evaluation saves nothing")

    def load_state(self, state: dict[str, object]) -> None:
        raise AssertionError("an evaluation restores nothing")

    def _generate(self, *_: object) -> Rollout:
        raise AssertionError("it answers in `generate`")


class Multiples(Task):
    """A completion is right when its first token is a multiple of the problem's index + 1; 99 cannot be graded."""

    name = "multiples"

    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        return Problem(self.name, split, seed, index, prompt=str(1000 * seed + index), answer=index + 1)

    def reward(self, problem: Problem, completion: str) -> Reward:
        first = int(completion.split()[0])
        if first == 99:
            raise RewardError("no verdict")
        right = first % problem.answer == 0
        return Reward(0.1 + 0.9 * right, right)


def run(problems: int, samples: int, *, seed: int = 0, engine: Scripted | None = None, task: Task | None = None) -> Evaluation:
    policy = cast(Policy, Parrot())
    return evaluate(policy, engine or Scripted(), task or Multiples(), "eval", problems, samples, seed, temperature=1.0, max_new_tokens=8)


def test_accuracy_error_and_lengths_by_hand() -> None:
    # Problem 0: tokens 0 1 2, all multiples of 1: 3/3. Problem 1: tokens 1 2 3, multiples of 2: 1/3. Problem 2: 2 3 4 of 3: 1/3.
    result = run(3, 3)
    assert result.per_problem == pytest.approx((1.0, 1 / 3, 1 / 3))
    assert result.accuracy == pytest.approx(5 / 9)
    assert result.standard_error == pytest.approx(math.sqrt(((4 / 9) ** 2 + 2 * (2 / 9) ** 2) / 2) / math.sqrt(3))
    assert result.reward_mean == pytest.approx(0.1 + 0.9 * 5 / 9)
    assert (result.length_mean, result.length_max, result.tokens) == (2.0, 3, 18)
    assert result.truncated_share == pytest.approx(1 / 3)


def test_problems_and_noise_follow_from_the_seed_however_they_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split = Scripted(), Scripted()
    first = run(5, 2, seed=3, engine=whole)
    monkeypatch.setattr(evaluation, "COMPLETIONS_A_CALL", 4)
    second = run(5, 2, seed=3, engine=split)
    assert whole.asked == split.asked == [(index, 3000 + index, 3) for index in range(5)]
    assert first.per_problem == second.per_problem


def test_progress_counts_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "COMPLETIONS_A_CALL", 4)
    seen: list[int] = []
    policy = cast(Policy, Parrot())
    evaluate(policy, Scripted(), Multiples(), "ood", 5, 2, 0, temperature=1.0, max_new_tokens=8, progress=seen.append)
    assert seen == [2, 4, 5]


def test_a_completion_without_a_verdict_counts_nowhere_nor_does_a_problem_without_any() -> None:
    class Shifted(Multiples):
        def reward(self, problem: Problem, completion: str) -> Reward:
            return super().reward(problem, "99" if completion.startswith("1") else completion)

    result = run(1, 3, task=Shifted())
    assert (result.per_problem, result.unscored) == ((1.0,), 1)
    assert math.isnan(result.standard_error)
    second = run(2, 1, task=Shifted())
    assert math.isnan(second.per_problem[1])
    assert (second.accuracy, second.unscored) == (second.per_problem[0], 1)


class Wordy(Multiples):
    """The prompts of problems 1 and 4 are one token too long for 8 new ones; 2 cannot be made, and 3 just fits."""

    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        if index == 2:
            raise TaskError("no such problem")
        lengths = {1: ":13", 3: ":12", 4: ":13"}
        return replace(super().problem(seed, index, split), prompt=f"{1000 * seed + index}{lengths.get(index, '')}")


@pytest.mark.parametrize("together", [512, 2])
def test_an_over_long_problem_is_left_out_and_counted_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(evaluation, "COMPLETIONS_A_CALL", together)
    engine = Scripted()
    result, whole = run(6, 2, seed=3, engine=engine, task=Wordy()), run(6, 2, seed=3)
    assert engine.asked == [(index, 3000 + index, 3) for index in (0, 3, 5)]
    kept = [whole.per_problem[index] for index in (0, 3, 5)]
    assert [value for value in result.per_problem if not math.isnan(value)] == kept
    assert [math.isnan(value) for value in result.per_problem] == [False, True, True, False, True, False]
    assert (result.problems, result.left_out) == (6, 3)
    assert result.accuracy == pytest.approx(np.mean(kept))
    assert "a prompt of 13 tokens and max_new_tokens = 8 do not fit the context of 20" in result.left_out_why
    assert result.row(step=7, time=12.0).left_out == 3
    assert result.compare(replace(whole, task=result.task)) == pytest.approx((0.0, 0.0))


def test_an_evaluation_without_any_usable_problem_says_why() -> None:
    class Endless(Multiples):
        def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
            return replace(super().problem(seed, index, split), prompt="7:13")

    engine = Scripted()
    with pytest.raises(TaskError, match="none of 4 problems of multiples can be used with a context of 20 tokens: a prompt of 13"):
        run(4, 2, engine=engine, task=Endless())
    assert engine.asked == []


def test_a_comparison_is_paired_by_problem() -> None:
    base = run(4, 2)
    shifted = Evaluation(**{**vars(base), "per_problem": tuple(value - 0.25 for value in base.per_problem)})
    assert shifted.compare(base) == pytest.approx((-0.25, 0.0))
    with pytest.raises(ValueError, match="different problems"):
        run(4, 2, seed=1).compare(base)


def test_the_row_carries_the_evaluation() -> None:
    result = run(3, 3)
    row = result.row(step=7, time=12.0)
    assert (row.step, row.time, row.task, row.split, row.problems, row.samples) == (7, 12.0, "multiples", "eval", 3, 3)
    assert (row.accuracy, row.standard_error, row.length_max) == (result.accuracy, result.standard_error, 3)


def config_of(home: Path) -> Config:
    return Config.model_validate({"run": {"home": home}})


def test_a_running_nodes_newest_checkpoint_is_read_and_what_it_is_writing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(evaluation, "load_policy", lambda options: SimpleNamespace(load_weights=loaded.update))
    for step in (3, 12):
        save_checkpoint(tmp_path / "checkpoints", Checkpoint(step, {"w": torch.full((2,), float(step))}, {}, {}, []))
    writing = tmp_path / "checkpoints" / ".writing-step-00000020"
    writing.mkdir()
    assert load_trained(config_of(tmp_path))[1] == 12
    assert loaded["w"].tolist() == [12.0, 12.0]
    assert writing.is_dir()


def test_a_home_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=f"{tmp_path} holds no checkpoint"):
        load_trained(config_of(tmp_path))
