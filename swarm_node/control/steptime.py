"""How long a step's sampling takes at each group size, learned from the engine's own reports.

A decode step reads the weights once, whatever the batch, and does some work for every slot: seconds = fixed * steps + per_slot *
slot_steps, with steps = the longest completion and slot_steps = tokens / (1 - idle share). Both coefficients are non-negative and
fitted by discounted least squares. What a size would cost follows from the lengths seen lately: tokens from their mean, the longest of
N completions from their empirical distribution, P(max <= x) = P(length <= x)^N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_node.control.decision import Cost

WINDOW = 256
"""Completion lengths remembered."""
DISCOUNT = 0.98
MIN_REPORTS = 8
"""Reports before a prediction is made."""


class StepTimeModel:
    """Online; a step's report costs microseconds."""

    def __init__(self) -> None:
        self._lengths: NDArray[np.float64] = np.empty(0)
        self._moments = [0.0] * 5  # discounted sums: steps^2, steps * slots, slots^2, steps * seconds, slots * seconds
        self._waste = [0.0, 0.0]  # discounted sums: idle slot-steps, idle slot-steps if no slot were ever freed
        self._groups = 0.0
        self._reports = 0

    def observe(self, lengths: Sequence[Sequence[int]], cost: Cost) -> None:
        """Learn from a step: its groups' completion lengths in tokens, and what sampling them cost.

        Raises:
            ValueError: `slot_idle_share` is not in [0, 1) or `seconds` is negative.
        """
        if not (0 <= cost.slot_idle_share < 1 and cost.seconds >= 0):
            raise ValueError(f"a cost needs 0 <= slot_idle_share < 1 and seconds >= 0, got {cost}")
        flat = [length for group in lengths for length in group]
        tokens, steps = float(sum(flat)), float(max(flat))
        slots = tokens / (1.0 - cost.slot_idle_share)
        fresh = (steps * steps, steps * slots, slots * slots, steps * cost.seconds, slots * cost.seconds)
        self._moments = [DISCOUNT * old + new for old, new in zip(self._moments, fresh, strict=True)]
        static = steps * len(flat) - tokens
        self._waste = [DISCOUNT * self._waste[0] + min(slots - tokens, static), DISCOUNT * self._waste[1] + static]
        self._groups = len(lengths)
        self._lengths = np.concatenate((self._lengths, np.array(flat, dtype=np.float64)))[-WINDOW:]
        self._reports += 1

    @property
    def coefficients(self) -> tuple[float, float]:
        """Seconds a decode step, and seconds a slot-step; both >= 0. (0, 0) before any report."""
        xx, xy, yy, xt, yt = self._moments
        determinant = xx * yy - xy * xy
        if determinant > 1e-9 * xx * yy:
            fixed, per_slot = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
            if fixed >= 0 and per_slot >= 0:
                return fixed, per_slot
        # One of the two explains nothing, or they never varied apart: whichever alone leaves the smaller error.
        by_steps, by_slots = (xt / xx if xx else 0.0), (yt / yy if yy else 0.0)
        return (by_steps, 0.0) if by_steps * xt >= by_slots * yt else (0.0, by_slots)

    def predict(self, sizes: Sequence[int]) -> dict[int, float] | None:
        """Seconds of a step at each group size, with as many groups as the last step had. None before `MIN_REPORTS` reports."""
        if self._reports < MIN_REPORTS:
            return None
        ordered = np.sort(self._lengths)
        below = np.arange(1, len(ordered)) / len(ordered)
        gaps = ordered[1:] - ordered[:-1]
        average = float(ordered.sum()) / len(ordered)
        fixed, per_slot = self.coefficients
        waste = self._waste[0] / self._waste[1] if self._waste[1] > 0 else 0.0
        seconds = {}
        for size in sizes:
            completions = self._groups * size
            longest = float(ordered[-1] - gaps @ below**completions)  # E max = x_n - sum of (x_i+1 - x_i) P(max <= x_i)
            tokens = completions * average
            seconds[size] = fixed * longest + per_slot * (tokens + waste * (completions * longest - tokens))
        return seconds

    def state(self) -> dict[str, Any]:
        """As JSON: the window of lengths, and the discounted sums that the fit is made of."""
        return {
            "lengths": [int(length) for length in self._lengths],
            "moments": list(self._moments),
            "waste": list(self._waste),
            "groups": self._groups,
            "reports": self._reports,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Anything else may be taken in part before it raises, see `FeatureTable.restore`."""
        self._lengths = np.array(state["lengths"], dtype=np.float64)[-WINDOW:]
        self._moments = [float(value) for value in state["moments"]]
        self._waste = [float(value) for value in state["waste"]]
        self._groups, self._reports = float(state["groups"]), int(state["reports"])


def rate_utilities(sizes: Sequence[int], seconds: Mapping[int, float] | None) -> list[float]:
    """Value of each size as log2 of variance reduction per second.

    The advantage's baseline costs one completion of G, so a group's gradient estimate has variance in proportion to 1 / (G - 1): the
    value is log2((G - 1) / seconds), in the doublings of `log2 G`. Without predictions it is log2 G.
    """
    if seconds is None or min(seconds.values()) <= 0:
        return [math.log2(size) for size in sizes]
    return [math.log2((size - 1) / seconds[size]) for size in sizes]
