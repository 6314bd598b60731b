"""Advantages: what a completion earned beyond its group. Pure arithmetic on rewards, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from swarm_node.learning.scored import ScoredGroup

SAME_REWARD = 1e-6
"""Rewards that differ by no more than this are one reward: float noise must not be standardised into large advantages."""
STD_FLOOR = 1e-4
"""Added to the standard deviation before dividing by it."""


def group_advantages(rewards: NDArray[np.float64], kind: Literal["center", "standardize"]) -> NDArray[np.float64]:
    """Advantages of one group's completions, shape (G,), G >= 2.

    `center` subtracts the mean (Dr. GRPO, arXiv 2503.20783); `standardize` also divides by the sample standard deviation (n - 1) plus 1e-4
    (GRPO, arXiv 2402.03300). A group with one reward has advantage 0 throughout, exactly.

    Raises:
        ValueError: fewer than two rewards.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group needs at least 2 rewards to compare and has {len(rewards)}")
    if one_reward(rewards):
        return np.zeros(len(rewards))
    centered: NDArray[np.float64] = rewards - rewards.mean()
    return centered if kind == "center" else centered / (rewards.std(ddof=1) + STD_FLOOR)


def one_reward(rewards: NDArray[np.float64]) -> bool:
    """Whether a group's rewards are all the same, so that nothing can be learned from comparing them."""
    return bool(rewards.max() - rewards.min() <= SAME_REWARD)


def overlong_penalty(lengths: NDArray[np.int64], start: int, limit: int) -> NDArray[np.float64]:
    """What DAPO adds to rewards, in [-1, 0], shape (G,): 0 up to `start` tokens, then falling linearly to -1 at `limit`
    (arXiv 2503.14476, eq. 13)."""
    return -np.clip((lengths - start) / (limit - start), 0.0, 1.0)


def assemble(groups: Sequence[ScoredGroup]) -> list[tuple[ScoredGroup, ...]]:
    """Horizontal collaboration: the parts of each problem's group, which several nodes sampled, put together; order of first appearance."""
    parts: dict[object, list[ScoredGroup]] = {}
    for group in groups:
        parts.setdefault(group.group.problem, []).append(group)
    return [tuple(part) for part in parts.values()]
