"""Which problems a node gets: a pure function of who it is and how far it has come, so nobody can pick easy ones.

`index = base(peer, step, task seed) * MAX_SLOTS + slot`: the slot can be read back from the index, so checking a claim is one hash.
"""

from __future__ import annotations

from swarm_node.tasks.draws import hash64

MAX_SLOTS = 1024
"""Prompts that a node may draw in one step at most (replacements of dynamic sampling included)."""

EVERYBODY = "*"
"""Stands for the peer id where all peers work on the same problems (horizontal collaboration)."""

INDEX_BITS = 53
"""Every assigned index is below 2**53, so that it survives JSON and float64."""

_BASE_BITS = INDEX_BITS - (MAX_SLOTS - 1).bit_length()


def assigned_index(peer_id: str, step: int, slot: int, task_seed: int) -> int:
    """The index of the problem that `peer_id` works on in `slot` of `step`, in [0, 2**53).

    Raises:
        ValueError: `slot` is not in [0, MAX_SLOTS).
    """
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot} is not in [0, {MAX_SLOTS}): draw at most {MAX_SLOTS} prompts in one step")
    return _base(peer_id, step, task_seed) * MAX_SLOTS + slot


def is_assigned(index: int, peer_id: str, step: int, task_seed: int) -> bool:
    """Whether `index` is one of the problems that `peer_id` was given for `step`. Never raises, whatever the index."""
    return index >= 0 and index // MAX_SLOTS == _base(peer_id, step, task_seed)


def _base(peer_id: str, step: int, task_seed: int) -> int:
    return hash64("assignment", peer_id, step, task_seed) >> (64 - _BASE_BITS)
