"""Bodies that wait for the learner."""

from __future__ import annotations

from swarm_node.network.gossip import Received
from swarm_node.network.inbox import Inbox, newest_of_each


def test_the_inbox_drops_the_oldest_and_counts_them() -> None:
    inbox = Inbox(max_bodies=3, max_bytes=1000)
    for number in range(5):
        inbox.put(Received("peer", bytes([number])))
    assert [received.body for received in inbox.drain()] == [b"\2", b"\3", b"\4"]
    assert inbox.dropped == 2
    assert inbox.drain() == []
    for _ in range(3):
        inbox.put(Received("peer", bytes(400)))
    assert len(inbox.drain()) == 2
    inbox.put(Received("peer", bytes(5000)))  # larger than everything, and alone: still delivered
    assert len(inbox.drain()) == 1
    dropped = inbox.dropped
    for _ in range(2):  # what was drained takes no room
        inbox.put(Received("peer", bytes(400)))
    assert len(inbox.drain()) == 2
    assert inbox.dropped == dropped


def test_of_a_flood_only_the_newest_are_judged_and_every_sender_gets_its_turn() -> None:
    flood = [Received("mallory", bytes([number])) for number in range(100)]
    arrived = [Received("ben", b"b0"), *flood, Received("ben", b"b1"), Received("cyd", b"c0")]
    chosen = newest_of_each(arrived, 6)
    assert [(received.sender, received.body) for received in chosen] == [
        ("ben", b"b1"), ("mallory", bytes([99])), ("cyd", b"c0"), ("ben", b"b0"), ("mallory", bytes([98])), ("mallory", bytes([97])),
    ]  # fmt: skip
    assert newest_of_each([], 6) == []
