"""Bookkeeping of a batch that decodes together: what each slot has drawn, when and why it ended, which slots are still computed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish


class Slots:
    """One slot a completion. Slots leave the computed batch by `compact` some time after they finished."""

    def __init__(self, count: int, max_new_tokens: int, stop_ids: Iterable[int]) -> None:
        self.active: NDArray[np.int64] = np.arange(count)
        """The slots that the model still computes, in the order of its batch."""
        self.finished_at: NDArray[np.float64] = np.zeros(count)
        """`time.perf_counter` when each slot finished."""
        self.idle = 0
        """Slot-steps in which a finished slot was computed."""
        self.steps = 0
        """Slot-steps in all."""
        self._tokens = np.zeros((count, max_new_tokens), dtype=np.int32)
        self._logprobs = np.zeros((count, max_new_tokens), dtype=np.float32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._stopped = np.zeros(count, dtype=bool)
        self._limit = max_new_tokens
        self._stop_ids = np.array(sorted(stop_ids))

    @property
    def all_finished(self) -> bool:
        return bool(self._stopped.all())

    @property
    def finished_share(self) -> float:
        """Of the slots that are computed now, how many have finished."""
        return float(self._stopped[self.active].mean())

    def record(self, position: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Store what the active slots drew at `position`, unless they had finished before."""
        running = ~self._stopped[self.active]
        slots, tokens, logprobs = self.active[running], tokens[running], logprobs[running]
        self.steps += len(self.active)
        self.idle += len(self.active) - len(slots)
        self._tokens[slots, position] = tokens
        self._logprobs[slots, position] = logprobs
        self._lengths[slots] = position + 1
        stopped = np.isin(tokens, self._stop_ids)
        self._stopped[slots[stopped]] = True
        ended = slots if position + 1 == self._limit else slots[stopped]
        self.finished_at[ended] = time.perf_counter()

    def compact(self) -> NDArray[np.int64]:
        """Forget the finished slots; returns which rows of the batch stay."""
        alive = np.flatnonzero(~self._stopped[self.active])
        self.active = self.active[alive]
        return alive

    def completions(self) -> list[Completion]:
        """What every slot drew, in the order of the slots."""
        return [
            Completion(
                tokens=self._tokens[slot, :length].copy(),
                logprobs=self._logprobs[slot, :length].copy(),
                finish=Finish.STOP if self._stopped[slot] else Finish.LENGTH,
            )
            for slot, length in enumerate(self._lengths)
        ]
