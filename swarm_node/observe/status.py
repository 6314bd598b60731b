"""What the node does now, since when, and what it waits for: kept in one place, readable from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The named states of a node. After `checkpointing` it rolls out again, until it stops."""

    STARTING = "starting"
    FINDING_PEERS = "finding-peers"
    ROLLING_OUT = "rolling-out"
    EXCHANGING = "exchanging"
    LEARNING = "learning"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Snapshot:
    """The status at one moment."""

    state: State
    since: float
    """Unix seconds at which the state was entered."""
    waiting_for: str
    """What the node waits for, in words; empty when it waits for nothing."""
    step: int
    """Optimiser steps taken."""

    def describe(self, now: float) -> str:
        """One sentence, for example `exchanging for 3 s at step 12, waiting for peers`."""
        text = f"{self.state} for {max(0.0, now - self.since):.0f} s at step {self.step}"
        return f"{text}, waiting for {self.waiting_for}" if self.waiting_for else text


class Status:
    """The one mutable holder of the status. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds; a simulation passes its virtual time."""
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot = Snapshot(State.STARTING, clock(), "", 0)

    def enter(self, state: State, *, waiting_for: str = "", step: int | None = None) -> None:
        """Enter a state. Entering the state that the node is in already keeps its `since`."""
        with self._lock:
            old = self._snapshot
            since = old.since if state == old.state else self._clock()
            self._snapshot = Snapshot(state, since, waiting_for, old.step if step is None else step)

    def snapshot(self) -> Snapshot:
        """The status now, immutable."""
        with self._lock:
            return self._snapshot
