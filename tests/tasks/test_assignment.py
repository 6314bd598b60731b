"""Who works on which problem: checkable by anyone, choosable by nobody."""

from __future__ import annotations

import pytest

from swarm_node.tasks.assignment import MAX_SLOTS, assigned_index, is_assigned


def test_every_slot_of_a_step_is_recognised_as_assigned() -> None:
    for slot in (0, 1, 17, MAX_SLOTS - 1):
        assert is_assigned(assigned_index("peer-a", 12, slot, 7), "peer-a", 12, 7)


@pytest.mark.parametrize(("peer", "step", "seed"), [("peer-b", 12, 7), ("peer-a", 13, 7), ("peer-a", 12, 8)])
def test_another_peer_step_or_seed_has_other_problems(peer: str, step: int, seed: int) -> None:
    mine = {assigned_index("peer-a", 12, slot, 7) for slot in range(MAX_SLOTS)}
    theirs = {assigned_index(peer, step, slot, seed) for slot in range(MAX_SLOTS)}
    assert len(mine) == len(theirs) == MAX_SLOTS
    assert mine.isdisjoint(theirs)
    assert not any(is_assigned(index, peer, step, seed) for index in mine)


def test_indices_fit_into_53_bits_and_never_change_between_releases() -> None:
    assert all(0 <= assigned_index(f"peer-{i}", i, i, i) < 2**53 for i in range(500))
    assert assigned_index("12D3KooW", 0, 3, 0) == 8367507594266627


@pytest.mark.parametrize("index", [-1, 0, 2**53, 2**200])
def test_a_made_up_index_is_not_assigned(index: int) -> None:
    assert not is_assigned(index, "peer-a", 12, 7)


@pytest.mark.parametrize("slot", [-1, MAX_SLOTS])
def test_a_slot_beyond_the_limit_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} is not in"):
        assigned_index("peer-a", 0, slot, 0)
