"""Who is dialled when: known peers for ever, with back-off and jitter."""

from __future__ import annotations

import random

from swarm_node.network.addresses import Address
from swarm_node.network.identity import Identity
from swarm_node.network.libp2p.dialler import FIRST_PAUSE_S, FORGET_AFTER, MAX_TARGETS, Dialler, Source

OWN = Identity(bytes(32)).peer_id
PEERS = [Identity(bytes([seed]) * 32).peer_id for seed in range(1, 10)]


def address(peer: int | None, port: int = 1) -> Address:
    return Address("ip4", "192.0.2.1", port, "" if peer is None else PEERS[peer])


def dialler(longest: float = 60.0) -> Dialler:
    return Dialler(OWN, longest, random.Random(1))


def test_pauses_double_up_to_the_longest_and_never_end() -> None:
    plan = dialler(longest=8)
    plan.add(address(0), Source.CONFIGURED, 0)
    now, pauses = 1.0, []
    for _ in range(40):
        (target,) = plan.due(now, (), 8)
        plan.failed(target, "refused", now)
        due = plan.next_due(())
        assert due is not None
        pauses.append(due - now)
        assert plan.due(due - 0.001, (), 8) == []
        now = due
    for number, pause in enumerate(pauses):
        expected = min(8, FIRST_PAUSE_S * 2**number)
        assert 0.75 * expected <= pause <= 1.25 * expected
    assert len({round(pause, 6) for pause in pauses[10:]}) > 20  # jitter: nodes that lost the same peer do not come in step


def test_a_target_is_dialled_once_at_a_time_and_not_while_connected() -> None:
    plan = dialler()
    plan.add(address(0), Source.FOUND, 0)
    (target,) = plan.due(1, (), 8)
    assert plan.due(1, (), 8) == []
    plan.succeeded(target, PEERS[0], 1)
    assert plan.due(100, {PEERS[0]}, 8) == []
    assert plan.next_due({PEERS[0]}) is None


def test_one_address_of_a_peer_at_a_time_configured_ones_first() -> None:
    plan = dialler()
    plan.add(address(0, 1), Source.FOUND, 0)
    plan.add(address(0, 2), Source.FOUND, 0)
    plan.add(address(1, 3), Source.CONFIGURED, 0)
    first = plan.due(1, (), 8)
    assert [target.address.peer for target in first] == [PEERS[1], PEERS[0]]
    assert len(plan.due(1, (), 8)) == 1  # the other address, if the caller asks again


def test_a_lost_peer_is_dialled_within_a_second() -> None:
    plan = dialler()
    plan.add(address(0), Source.CONFIGURED, 0)
    (target,) = plan.due(1, (), 8)
    for _ in range(10):
        plan.failed(target, "refused", 1)
    plan.lost(PEERS[0], 2)
    assert plan.due(3.01, (), 8) == [target]


def test_isolation_cuts_every_pause_short() -> None:
    plan = dialler(longest=600)
    for peer in range(3):
        plan.add(address(peer, peer + 1), Source.REMEMBERED, 0)
    for attempt in range(1, 10):
        for target in plan.due(1_000 * attempt + 1_000, (), 8):
            plan.failed(target, "refused", 1_000 * attempt + 1_000)
    assert plan.due(10_010, (), 8) == []
    plan.isolated(10_010)
    assert len(plan.due(10_015.1, (), 8)) == 3


def test_addresses_that_nobody_configured_are_forgotten_in_the_end() -> None:
    plan = dialler()
    plan.add(address(0), Source.FOUND, 0)
    plan.add(address(1, 2), Source.CONFIGURED, 0)
    for attempt in range(FORGET_AFTER):
        for target in plan.due(1e6 * (attempt + 1), (), 8):
            plan.failed(target, "refused", 1e6 * (attempt + 1))
    assert [target.address.peer for target in plan.due(1e9, (), 8)] == [PEERS[1]]


def test_an_address_without_a_peer_id_is_that_of_whoever_answered() -> None:
    plan = dialler()
    plan.add(address(None), Source.CONFIGURED, 0)
    (target,) = plan.due(1, (), 8)
    plan.succeeded(target, PEERS[3], 1)
    assert plan.due(100, {PEERS[3]}, 8) == []
    assert plan.due(100, (), 8) == [target]


def test_a_node_never_dials_itself() -> None:
    plan = dialler(longest=60)
    plan.add(Address("ip4", "192.0.2.1", 1, OWN), Source.CONFIGURED, 0)
    assert plan.next_due(()) is None
    plan.add(address(None), Source.CONFIGURED, 0)  # a name that turns out to be this node's
    (target,) = plan.due(1, (), 8)
    plan.succeeded(target, OWN, 1)
    assert plan.due(60, (), 8) == []
    assert plan.due(61.1, (), 8) == [target]  # it may lead elsewhere by then
    assert "knows no address" in plan.waiting_for(2)


def test_the_table_is_bounded_and_configured_addresses_stay() -> None:
    plan = dialler()
    plan.add(address(0), Source.CONFIGURED, 0)
    for port in range(2, 2 * MAX_TARGETS):
        plan.add(address(1, port), Source.FOUND, 0)
    known = [target for _ in range(2 * MAX_TARGETS) for target in plan.due(1, (), 8)]  # each once, busy from then on
    assert len(known) == MAX_TARGETS
    assert known[0].source is Source.CONFIGURED


def test_in_a_full_table_only_an_address_that_failed_makes_room() -> None:
    plan = dialler()
    for port in range(MAX_TARGETS):
        plan.add(address(1, port), Source.FOUND, 0)
    plan.add(address(2), Source.FOUND, 0)
    assert all(target.address.peer == PEERS[1] for target in plan._targets.values())
    (target,) = plan.due(1, (), 1)
    plan.add(address(2), Source.FOUND, 1)  # it is being dialled
    plan.failed(target, "refused", 1)
    plan.add(address(2), Source.FOUND, 1)
    assert [other.address for other in plan._targets.values() if other.address.peer != PEERS[1]] == [address(2)]
    assert target not in plan._targets.values()
    assert len(plan._targets) == MAX_TARGETS


def test_words_say_what_is_waited_for() -> None:
    plan = dialler()
    assert "waits for others" in plan.waiting_for(0)
    plan.add(address(0), Source.CONFIGURED, 0)
    assert plan.waiting_for(0) == f"no peers yet: dialling {address(0)}"
    (target,) = plan.due(1, (), 8)
    plan.failed(target, "connection refused", 1)
    words = plan.waiting_for(1)
    assert str(address(0)) in words
    assert "once (connection refused)" in words
