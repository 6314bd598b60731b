"""What the node needs from a rollout engine: whole groups, sampled by the policy as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Completion


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and how many completions to sample for it."""

    prompt: NDArray[np.int32]
    """Token ids, shape (P,), P >= 1."""
    size: int
    """G, at least 1 (training asks for at least 2)."""
    key: int
    """Identifies the group in the noise stream: same seed, key, completion and position give the same random number."""


@dataclass(frozen=True)
class RolloutReport:
    """What a rollout cost."""

    tokens: int
    """Completion tokens sampled."""
    seconds: float
    slot_idle_share: float
    """Share of slot-steps in which a slot of the batch held a finished completion, in [0, 1]."""
    straggler_seconds: float
    """Summed over groups: time between the moment half of the group had finished and its last completion."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Rollout:
    """Completions in the order of the requests, and the report."""

    groups: tuple[tuple[Completion, ...], ...]
    report: RolloutReport


class Engine(Protocol):
    """Samples from softmax(logits / temperature) over the whole vocabulary; log-probs are float32 of exactly that distribution."""

    name: str
    """Stable name, sent in the policy tag: `reference`, `sparse`, `vllm`."""

    def generate(self, requests: Sequence[GroupRequest], *, seed: int, temperature: float, max_new_tokens: int) -> Rollout:
        """Sample every group to its end (stop token or `max_new_tokens`)."""

    def policy_updated(self, step: int) -> None:
        """The policy's weights changed; nothing computed with the old ones may be read again."""
