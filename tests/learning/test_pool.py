"""The pool: who is drawn, who leaves unused, and that a checkpoint brings it back."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_node.learning.options import PoolOptions
from swarm_node.learning.pool import Pool, PoolState
from swarm_node.learning.scored import ScoredGroup
from tests.support.learning_groups import scored_group

MANY = PoolOptions(foreign_share=1.0, foreign_per_step=100, peer_share=1.0)


def foreign(sender: str, index: int, step: int = 0, length: int = 3) -> ScoredGroup:
    return scored_group([1.0, 0.0], [length, length], sender=sender, index=index, own=False, step=step)


def own(index: int, step: int = 0) -> ScoredGroup:
    return scored_group([1.0, 0.0], index=index, step=step)


def names(groups: list[ScoredGroup]) -> list[str]:
    return [group.body.decode() for group in groups]


def filled(options: PoolOptions, *groups: ScoredGroup) -> Pool:
    pool = Pool(options)
    for group in groups:
        pool.add(group)
    return pool


def test_each_group_is_used_once() -> None:
    pool = filled(MANY, own(0), foreign("a", 1))
    assert names(pool.draw(0)) == ["me/0", "a/1"]
    assert pool.draw(0) == []


def test_foreign_groups_come_newest_first_one_peer_after_the_other() -> None:
    pool = filled(MANY, *(foreign("a", i) for i in range(3)), foreign("b", 0), foreign("c", 0), foreign("b", 1))
    assert names(pool.draw(0)) == ["a/2", "b/1", "c/0", "a/1", "b/0", "a/0"]


def test_another_peer_begins_each_step() -> None:
    options = PoolOptions(foreign_share=1.0, foreign_per_step=1)
    pool = filled(options, *(foreign(peer, i) for peer in "abc" for i in range(2)))
    assert [names(pool.draw(step)) for step in range(3)] == [["a/1"], ["b/1"], ["c/1"]]


def test_alone_the_pool_gives_the_own_groups() -> None:
    assert names(filled(PoolOptions(), own(0), own(1)).draw(0)) == ["me/0", "me/1"]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.2, 1), (0.5, 4), (0.6, 6), (0.75, 12), (1.0, 16)])
def test_the_foreign_share_is_of_the_whole_step(share: float, expected: int) -> None:
    pool = filled(PoolOptions(foreign_share=share, peer_share=1.0), *(own(i) for i in range(4)), *(foreign("a", i) for i in range(20)))
    drawn = pool.draw(0)
    assert sum(not group.own for group in drawn) == expected


def test_one_peer_fills_at_most_its_share_but_always_one_place() -> None:
    groups = [*(own(i) for i in range(4)), *(foreign("a", i) for i in range(9))]
    assert len(filled(PoolOptions(peer_share=0.5), *groups).draw(0)) == 4 + 2
    assert len(filled(PoolOptions(peer_share=0.01), *groups).draw(0)) == 4 + 1
    assert len(filled(PoolOptions(peer_share=0.7), *groups).draw(0)) == 4 + 2  # 2.8 places of 4 are two whole ones


def test_foreign_tokens_are_bounded_and_what_does_not_fit_waits() -> None:
    options = MANY.model_copy(update={"foreign_tokens_per_step": 100})
    pool = filled(options, foreign("a", 0, length=20), foreign("a", 1, length=51), foreign("b", 0, length=25), foreign("b", 1, length=6))
    # With two completions each: a/1 has 102 tokens, which never fit, and b/1, a/0 and b/0 have 12, 40 and 50.
    assert names(pool.draw(0)) == ["b/1", "a/0"]
    assert names(pool.draw(1)) == ["b/0"]
    assert pool.report().peers == {"a": 1}


def test_a_replaced_foreign_group_gives_its_tokens_back() -> None:
    options = MANY.model_copy(update={"foreign_tokens_per_step": 10, "foreign_per_step": 1})
    pool = filled(options, *(foreign("a", i, length=5) for i in range(3)))
    first = pool.draw(0)
    assert names(first) == ["a/2"]
    assert names(pool.replace(0, first)) == ["a/1"]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    counts=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 12), max_size=5),
    mine=st.integers(0, 6),
    share=st.floats(0, 0.95),
    per_step=st.integers(0, 10),
    peer_share=st.floats(0.05, 1),
    step=st.integers(0, 9),
)
def test_a_draw_never_breaks_a_cap(counts: dict[str, int], mine: int, share: float, per_step: int, peer_share: float, step: int) -> None:
    options = PoolOptions(foreign_share=share, foreign_per_step=per_step, peer_share=peer_share, max_age_steps=9)
    pool = filled(options, *(own(i) for i in range(mine)), *(foreign(peer, i) for peer, count in counts.items() for i in range(count)))
    drawn = pool.draw(step)
    by_peer = Counter(group.sender for group in drawn if not group.own)
    assert len(drawn) - by_peer.total() == mine
    assert by_peer.total() <= per_step
    assert by_peer.total() <= share * len(drawn) + 1e-6
    slots = min(per_step, int(mine * share / (1 - share) + 1e-9))
    assert all(count <= max(1, peer_share * slots + 1e-6) for count in by_peer.values())
    assert len(pool) == sum(counts.values()) - by_peer.total()
    # Fair: a peer got one more than another only if that other had no more to give.
    for peer, count in counts.items():
        assert by_peer[peer] >= min(count, max(by_peer.values(), default=0) - 1)


def test_groups_grow_too_old_in_own_steps_and_their_lengths_are_told() -> None:
    pool = filled(PoolOptions(max_age_steps=2), foreign("a", 0, step=0, length=5), foreign("a", 1, step=1, length=9))
    pool.draw(2)
    assert len(pool) == 2
    pool.draw(3)
    report = pool.report()
    assert (report.groups, report.peers) == (1, {"a": 1})
    assert (report.too_old.groups, report.too_old.completions, report.too_old.mean_length) == (1, 2, 5.0)
    pool.draw(4)
    assert pool.report().too_old.histogram == {4: 2, 8: 2}
    assert pool.report().too_old.longest == 9


def test_a_flood_pushes_out_the_flooder_and_no_one_else() -> None:
    quiet, mine = foreign("quiet", 0), own(0)
    pool = filled(PoolOptions(max_groups=5), quiet, mine, *(foreign("flood", i) for i in range(50)))
    assert pool.report().peers == {"quiet": 1, "flood": 3}
    assert pool.report().own == 1
    assert pool.report().too_many.groups == 47
    assert names(pool.draw(0)) == ["me/0", "flood/49"]


def test_tokens_are_bounded_too() -> None:
    pool = filled(PoolOptions(max_tokens=100), *(foreign("a", i, length=15) for i in range(9)))
    assert pool.report().tokens == 90
    assert pool.report().groups == 3


def test_own_groups_leave_only_when_nothing_else_is_held() -> None:
    pool = filled(PoolOptions(max_groups=2), own(0), own(1), foreign("a", 0), own(2))
    assert names(pool.draw(0)) == ["me/1", "me/2"]


def test_parts_of_one_problem_are_drawn_together_a_step_after_the_own_one() -> None:
    pool = filled(PoolOptions(), own(1, step=0), foreign("a", 1, step=1), foreign("b", 1, step=1), foreign("a", 2, step=1), own(2, step=1))
    assert pool.draw_parts(0) == []
    assert sorted(names(pool.draw_parts(1))) == sorted(["me/1", "a/1", "b/1"])
    assert sorted(names(pool.draw_parts(2))) == sorted(["me/2", "a/2"])


def test_dynamic_sampling_replaces_foreign_groups_within_the_caps() -> None:
    options = PoolOptions(foreign_share=0.5, peer_share=1.0)
    pool = filled(options, own(0), own(1), *(foreign("a", i) for i in range(6)))
    mine, theirs = pool.draw(0)[:2], pool.report()
    assert theirs.peers == {"a": 4}
    useless = [mine[0], foreign("a", 5)]
    assert names(pool.replace(0, useless)) == ["a/3"]  # one place freed; the own group's place is not a foreign one
    assert pool.replace(0, []) == []


def test_state_survives_json_and_comes_back_as_it_was() -> None:
    pool = filled(
        PoolOptions(max_groups=4),
        *(foreign("a", i, length=i + 1) for i in range(4)),
        foreign("b", 9),
        scored_group([None, 0.5, 1.0], index=7),
    )
    pool.draw(0)
    pool.add(foreign("c", 3, step=1))
    held = {group.body: group.group for group in pool._groups}
    state = pool.state()
    copy = Pool(pool.options)
    copy.restore(PoolState(list(state.bodies), json.loads(json.dumps(state.metadata))), lambda body: held[body])
    assert copy.report() == pool.report()
    assert copy.state() == state
    assert [group.rewards for group in copy._groups] == [group.rewards for group in pool._groups]
    for step in range(1, 4):
        copy.add(own(step, step))
        pool.add(own(step, step))
        assert names(copy.draw(step)) == names(pool.draw(step))


def test_a_state_with_missing_bodies_is_refused() -> None:
    state = filled(MANY, foreign("a", 0)).state()
    with pytest.raises(ValueError, match="not whole"):
        Pool(MANY).restore(PoolState([], state.metadata), lambda body: foreign("a", 0).group)
