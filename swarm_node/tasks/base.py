"""What a task is: a pure function from (split, seed, index) to a problem, and a verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval", "ood"]
"""`train` feeds rollouts; `eval` is held out (no problem of it occurs in `train`); `ood` is harder than anything trained on."""


@dataclass(frozen=True)
class Problem:
    """One prompt with a verifiable answer."""

    task: str
    """The task's canonical name, as `load_task` accepts it."""
    split: Split
    seed: int
    index: int
    prompt: str
    """The text put before the policy; the policy's chat template is applied around it where it has one."""
    answer: Any
    """What the verifier needs; opaque outside the task."""
    level: int = 0
    """Difficulty, known before the rollout."""


@dataclass(frozen=True)
class Reward:
    """What a completion earned."""

    value: float
    """The reward that training uses, in [0, 1]."""
    correct: bool
    """Whether the answer itself is right: what accuracy counts."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components (for example `format` and `answer`) before they were combined."""


class RewardError(Exception):
    """The reward could not be computed. Not the same as a wrong answer: the completion leaves its group."""


class TaskError(ValueError):
    """The task cannot be loaded: unknown name, missing data, bad level. The message says what to do."""


class Task(ABC):
    """Problems and their verifier. Instances are immutable and safe to share."""

    name: str
    """Canonical name, for example `chain-sum:2`; part of the wire's problem reference."""

    @abstractmethod
    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        """The problem at `index` of the stream `seed`: a pure function of its arguments, on every machine."""

    @abstractmethod
    def reward(self, problem: Problem, completion: str) -> Reward:
        """Score a completion's text (without prompt and stop token).

        Raises:
            RewardError: the reward could not be computed.
        """
