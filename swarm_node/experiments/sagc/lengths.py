"""Completion lengths to drive controllers with, without a model: distributions whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Trace(Protocol):
    """Lengths by step, whose truth is known."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def settled(self) -> int:
        """The step from which nothing changes."""

    def mean_length(self, step: int) -> float:
        """Expected tokens of a completion."""

    def sample(self, noise: np.random.Generator, step: int, groups: int, size: int) -> NDArray[np.int64]:
        """Tokens a completion, shape (groups, size), at least 1."""


@dataclass(frozen=True)
class LengthTrace:
    """Lengths of a step's groups: a mixture of a narrow and a long mode, both log-normal; plain log-normal where `long_share` is 0.

    With `growth`, median and spread rise linearly over the first `growth` steps, from a quarter of `median` and a third of `sigma`,
    as reinforcement learning of reasoning makes them rise.
    """

    name: str
    sigma: float
    median: float = 200.0
    """Tokens, of the narrow mode."""
    long_share: float = 0.0
    long_factor: float = 1.0
    """Median of the long mode over that of the narrow one."""
    long_sigma: float = 0.0
    growth: int = 0

    @property
    def settled(self) -> int:
        """The step at which growth ends; 0 without growth."""
        return self.growth

    def at(self, step: int) -> tuple[float, float]:
        """Median and sigma of the narrow mode at `step`."""
        grown = min(step / self.growth, 1.0) if self.growth else 1.0
        return self.median * (1 + 3 * grown) / 4, self.sigma * (1 + 2 * grown) / 3

    def sample(self, noise: np.random.Generator, step: int, groups: int, size: int) -> NDArray[np.int64]:
        """Tokens a completion, shape (groups, size), at least 1."""
        median, sigma = self.at(step)
        normal = noise.standard_normal((groups, size))
        lengths = np.exp(sigma * normal)
        if self.long_share:
            long = self.long_factor * np.exp(self.long_sigma * normal)
            lengths = np.where(noise.random((groups, size)) < self.long_share, long, lengths)
        return np.maximum(np.rint(median * lengths), 1).astype(np.int64)

    def mean_length(self, step: int) -> float:
        """Expected tokens of a completion: exp(sigma^2 / 2) times the median, in each mode."""
        median, sigma = self.at(step)
        long = self.long_share * self.long_factor * math.exp(self.long_sigma**2 / 2)
        return median * ((1 - self.long_share) * math.exp(sigma**2 / 2) + long)


TRACES = (
    LengthTrace("log-normal 0.3", 0.3),
    LengthTrace("log-normal 0.5", 0.5),
    LengthTrace("log-normal 0.8", 0.8),
    LengthTrace("two modes", 0.062, long_share=0.302, long_factor=1.84, long_sigma=0.225),
    LengthTrace("growing", 0.8, growth=600),
)
"""Two modes: fitted so that groups of 4, 8, 16 straggle (ratio 2) with probability .15, .42, .74, close to the bandit's instance."""

LEVELS = (LengthTrace("easy", 0.25, 80.0), LengthTrace("medium", 0.5, 160.0), LengthTrace("hard", 0.8, 320.0))
"""A task whose lengths depend on the problem's level."""


def straggler_probabilities(trace: Trace, sizes: Sequence[int], ratio: float, *, groups: int = 20_000, seed: int = 0) -> dict[int, float]:
    """Size -> how often a group of it straggles, by Monte Carlo where the trace has settled (standard error at most 0.004)."""
    noise = np.random.default_rng(seed)
    found = {}
    for size in sizes:
        lengths = trace.sample(noise, trace.settled, groups, size)
        found[size] = float((lengths.max(axis=1) > ratio * np.median(lengths, axis=1)).mean())
    return found
