"""Beliefs per prompt feature: hard problems straggle at sizes at which easy ones do not.

A feature is what is known of a prompt before its rollout. Each keeps counts of its own; its prior is what all prompts together
showed, with a fixed strength, so that a new feature starts from the general experience and departs from it as its own arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lru import LRU

from swarm_node.control.arms import Arms, Beta, mean

MAX_FEATURES = 256
"""Features remembered; beyond them the one that was not seen for longest is forgotten."""
PRIOR_STRENGTH = 4.0
"""Groups that the general experience weighs in a feature's prior."""


def prompt_feature(task: str, level: int, prompt_tokens: int) -> str:
    """The feature of a prompt: task, difficulty level, and its length in powers of two (1, 2-3, 4-7, ...)."""
    return f"{task}|{level}|{prompt_tokens.bit_length()}"


class FeatureArms:
    """A feature's counts and where its group size stands."""

    def __init__(self, count: int, step: int) -> None:
        self.arms = Arms(count)
        self.index = 0
        self.age = 0
        self.step = step

    def advance(self, step: int, gamma: float) -> None:
        """Discount for the steps since the feature was last seen."""
        if step > self.step:
            self.arms.discount(gamma ** (step - self.step))
            self.step = step


class FeatureTable:
    """Features by name, the most recently seen ones."""

    def __init__(self, candidates: int, gamma: float) -> None:
        self._candidates = candidates
        self._gamma = gamma
        self._features: LRU[str, FeatureArms] = LRU(MAX_FEATURES)

    def __len__(self) -> int:
        return len(self._features)

    def get(self, name: str, step: int, start: int, age: int) -> FeatureArms:
        """The feature as of `step`; a new one stands at candidate `start`, for `age` steps."""
        found = self._features.get(name)
        if found is None:
            found = FeatureArms(self._candidates, step)
            found.index, found.age = start, age
            self._features[name] = found
        found.advance(step, self._gamma)
        return found

    def state(self) -> list[dict[str, Any]]:
        """JSON, the least recently seen first."""
        return [
            {"name": name, "index": found.index, "age": found.age, "step": found.step, "counts": [list(pair) for pair in found.arms.counts]}
            for name, found in reversed(self._features.items())
        ]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state()`. Anything else may be taken in part before it raises: `Controller.restore` tries it on a new one."""
        self._features.clear()
        for saved in state:
            found = FeatureArms(self._candidates, int(saved["step"]))
            found.index, found.age = int(saved["index"]), int(saved["age"])
            found.arms.counts = [[float(alpha), float(beta)] for alpha, beta in saved["counts"]]
            self._features[str(saved["name"])] = found


def feature_priors(general: Sequence[Beta]) -> list[Beta]:
    """Prior of a feature's arms from the posteriors over all prompts: the same means at `PRIOR_STRENGTH`."""
    return [(PRIOR_STRENGTH * mean(beta), PRIOR_STRENGTH * (1.0 - mean(beta))) for beta in general]
