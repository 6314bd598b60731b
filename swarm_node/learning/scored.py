"""What the learner trains on: groups with their prompts and locally computed rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Group


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group that this node may learn from: own, or admitted from a peer."""

    group: Group
    prompt: NDArray[np.int32]
    """Prompt token ids, shape (P,)."""
    rewards: tuple[float | None, ...]
    """One a completion, computed here; None where it could not be computed: that completion leaves the group."""
    sender: str
    """Peer id of the generator."""
    own: bool
    """Whether this node generated it."""
    arrived_step: int
    """This node's step when the group entered the pool."""
    body: bytes
    """The encoded group, as published or received: what a checkpoint stores."""
