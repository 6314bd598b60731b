"""Sampled accuracy of a policy on problems that nothing is trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Finish

from swarm_node.checkpoint import read_latest
from swarm_node.config import Config
from swarm_node.observe.metrics import EvalRow
from swarm_node.policy.loading import load_policy
from swarm_node.policy.policy import Policy
from swarm_node.prompts import Prompts
from swarm_node.rollout.engine import Engine, GroupRequest
from swarm_node.tasks.base import RewardError, Split, Task

COMPLETIONS_A_CALL = 512
"""Completions asked of the engine at once: enough to fill its batches, few enough to show progress."""


class EvaluationError(ValueError):
    """There is nothing to evaluate where the user pointed."""


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured."""

    task: str
    split: Split
    problems: int
    """Asked for; those left out are among them."""
    left_out: int
    """Problems whose prompt leaves no room for a completion, or which could not be made; they count nowhere."""
    left_out_why: str
    """Of the first of them."""
    samples: int
    """Completions a problem."""
    seed: int
    temperature: float
    accuracy: float
    """Mean over problems of the share of right answers."""
    standard_error: float
    """Of the accuracy, with problems as the independent draws; NaN for a single problem."""
    reward_mean: float
    length_mean: float
    """Completion tokens, the stop token included."""
    length_max: int
    truncated_share: float
    """Share of completions that ended at the token limit."""
    unscored: int
    """Completions whose reward could not be computed; they count nowhere."""
    tokens: int
    seconds: float
    per_problem: tuple[float, ...]
    """Share of right answers of every problem, in order; NaN where no completion could be graded, or none was sampled."""

    def compare(self, base: Evaluation) -> tuple[float, float]:
        """Accuracy minus that of `base`, and the standard error of this difference, paired by problem.

        Raises:
            ValueError: the two did not meet the same problems.
        """
        if (self.task, self.split, self.seed, self.problems) != (base.task, base.split, base.seed, base.problems):
            raise ValueError("evaluations of different problems cannot be compared by problem")
        differences = np.subtract(self.per_problem, base.per_problem)
        graded = differences[~np.isnan(differences)]
        return float(graded.mean()) if len(graded) else math.nan, _standard_error(graded)

    def row(self, step: int, time: float) -> EvalRow:
        """As a row of the metrics file, measured after `step` optimiser steps."""
        measured = {item.name: getattr(self, item.name) for item in fields(EvalRow) if item.name not in ("step", "time")}
        return EvalRow(step=step, time=time, **measured)


def evaluate(
    policy: Policy,
    engine: Engine,
    task: Task,
    split: Split,
    problems: int,
    samples: int,
    seed: int = 0,
    *,
    temperature: float,
    max_new_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Sample `samples` completions for the problems 0 .. `problems` - 1 of the split and grade them.

    Problems and noise follow from `seed` alone: two policies, or one before and after training, meet the same problems and the same
    random numbers, which makes their difference less noisy than either value. `progress` is called with the problems done so far.

    A problem that is left out, or of which no completion could be graded, counts nowhere.

    Raises:
        TaskError: every problem was left out.
    """
    started = time.monotonic()
    prompts = Prompts(policy, task, max_new_tokens, policy.context)
    accuracies = [math.nan] * problems
    rewards: list[float] = []
    lengths: list[int] = []
    truncated = unscored = 0
    step = max(1, COMPLETIONS_A_CALL // samples)
    for first in range(0, problems, step):
        last = min(first + step, problems)
        batch = list(filter(None, (prompts.draw(seed, index, split) for index in range(first, last))))
        requests = [GroupRequest(prompt, samples, problem.index) for problem, prompt in batch]
        if not requests:
            continue
        rollout = engine.generate(requests, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens, dense=True)
        for (problem, _), group in zip(batch, rollout.groups, strict=True):
            right: list[bool] = []
            for completion in group:
                lengths.append(len(completion))
                truncated += completion.finish == Finish.LENGTH
                try:
                    reward = task.reward(problem, policy.decode(completion.tokens))
                except RewardError:
                    unscored += 1
                    continue
                right.append(reward.correct)
                rewards.append(reward.value)
            accuracies[problem.index] = float(np.mean(right)) if right else math.nan
        if progress:
            progress(last)
    prompts.check()
    graded = np.array(accuracies)[~np.isnan(accuracies)]
    return Evaluation(
        task=task.name,
        split=split,
        problems=problems,
        left_out=prompts.left_out,
        left_out_why=prompts.why,
        samples=samples,
        seed=seed,
        temperature=temperature,
        accuracy=float(graded.mean()) if len(graded) else math.nan,
        standard_error=_standard_error(graded),
        reward_mean=float(np.mean(rewards)) if rewards else math.nan,
        length_mean=float(np.mean(lengths)),
        length_max=max(lengths),
        truncated_share=truncated / len(lengths),
        unscored=unscored,
        tokens=sum(lengths),
        seconds=time.monotonic() - started,
        per_problem=tuple(accuracies),
    )


def load_trained(config: Config) -> tuple[Policy, int]:
    """The policy of a node's latest checkpoint, and its step. The node may be running; nothing in its home is touched.

    Raises:
        EvaluationError: the home folder holds no checkpoint, or one of another model.
        ModelError: the model cannot be loaded.
    """
    checkpoint = read_latest(config.home / "checkpoints")
    if checkpoint is None:
        raise EvaluationError(
            f"{config.home} holds no checkpoint: name the home folder of a node that has trained, or a model with --model"
        )
    policy = load_policy(config.model)
    try:
        policy.load_weights(checkpoint.weights)
    except ValueError as error:
        raise EvaluationError(f"{config.home}: {error}") from error
    return policy, checkpoint.step


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
