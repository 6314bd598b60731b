"""Times dense and sparse steps in turn over one prefilled batch: a schedule that switches between the two, and looks at the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from swarm_node.rollout.sparsity.schedule import DENSE, Schedule

Mode = Literal["dense", "sparse"]


@dataclass
class Blocks:
    """What the steps of one mode took."""

    seconds: list[float] = field(default_factory=list)
    """Of each block."""
    contexts: list[float] = field(default_factory=list)
    """Of each step: mean tokens of its sequences, the new one included."""
    budgets: list[float] = field(default_factory=list)
    """Of each step: mean pages that it might read besides the reserved three."""

    @property
    def context(self) -> float:
        """Mean tokens of a sequence, over all steps."""
        return statistics.fmean(self.contexts)

    @property
    def budget(self) -> float:
        """Mean pages besides the reserved three, over all steps."""
        return statistics.fmean(self.budgets)


class Pacemaker:
    """Counts the steps of a full batch: blocks of as many steps in every mode, round by round; the first round warms up and is dropped."""

    def __init__(
        self,
        modes: Sequence[Mode],
        *,
        batch: int,
        steps: int,
        rounds: int,
        between: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            modes: In their order within a round.
            batch: Sequences of a full batch; smaller steps, while it fills, do not count.
            steps: Of a block.
            rounds: That count.
            between: Called after each round, the dropped one included, while the clock stands still: time for others.
            clock: Seconds.
        """
        self.blocks: dict[Mode, Blocks] = {mode: Blocks() for mode in modes}
        self._turns = [mode for _ in range(rounds + 1) for mode in modes]
        self._modes, self._batch, self._steps = len(modes), batch, steps
        self._between, self._clock = between, clock
        self._turn, self._done = -1, 0
        self._began = 0.0

    @property
    def finished(self) -> bool:
        """Whether all blocks of all rounds are measured."""
        return self._turn == len(self._turns)

    def start_step(self, positions: NDArray[np.int64], schedule: Schedule) -> NDArray[np.int32]:
        """The budgets (B,) of a step that starts now, at these positions (B,)."""
        dense = np.full(positions.shape, DENSE, dtype=np.int32)
        if self.finished or len(positions) != self._batch:
            return dense
        if self._turn < 0 or self._done == self._steps:
            self._next_block()
            if self.finished:
                return dense
        self._done += 1
        mode = self._turns[self._turn]
        budgets = dense if mode == "dense" else schedule.budgets_at(positions)
        if self._turn >= self._modes:
            self.blocks[mode].contexts.append(float(positions.mean()) + 1)
            self.blocks[mode].budgets.append(float(budgets.mean()))
        return budgets

    def _next_block(self) -> None:
        now = self._clock()
        if self._turn >= self._modes:
            self.blocks[self._turns[self._turn]].seconds.append(now - self._began)
        self._turn += 1
        self._done = 0
        if self._turn and self._turn % self._modes == 0:
            self._between()
        self._began = self._clock()


@dataclass(frozen=True)
class PacedSchedule(Schedule):
    """A schedule for an engine that is being timed. The engine asks once a step, so the time between two questions is a whole step."""

    pacemaker: Pacemaker = field(default_factory=lambda: Pacemaker((), batch=0, steps=0, rounds=0))

    def budgets_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Dense or the schedule's own, as the pacemaker says; every call counts as a step."""
        return self.pacemaker.start_step(positions, Schedule(self.pages, self.threshold, self.source, self.model))
