"""What is done with messages, whatever carries them."""

from __future__ import annotations

import random

import msgpack
import pytest
from swarm_protocols.codec import digest, encode_group
from swarm_protocols.messages import Announcement, GroupMessage, Hello, Message, encode_message
from swarm_protocols.reject import Rejected

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.intake import OTHER_HOLDERS, PULLS_WAITING, QUIET_MESSAGES, Held, Intake, Wanted, holders_to_ask
from swarm_node.network.options import NetworkOptions
from tests.support.group_samples import sample_group


def body_of(number: int) -> bytes:
    return encode_group(sample_group((5, 6), seed=number, sequence=number))


class Peer:
    """An intake with what it delivered."""

    def __init__(self, **options: int) -> None:
        self.admission = CheapAdmission(tasks={"chain-sum:2"}, assigned=lambda sender, problem, step: True)
        self.delivered: list[tuple[str, bytes]] = []
        self.intake = Intake(
            "me",
            NetworkOptions(**options),
            self.admission,
            lambda sender, body: self.delivered.append((sender, body)),
        )

    def hear(self, sender: str, message: Message) -> bool:
        return self.intake.hear(sender, "forwarder", encode_message(message))

    def announce(self, sender: str, body: bytes) -> bool:
        return self.hear(sender, Announcement(digest(body), len(body), 2, 11, ""))

    def begin(self) -> Wanted:
        wanted = self.intake.begin_pull()
        assert wanted is not None
        return wanted


def test_an_admitted_group_is_delivered_and_passed_on_and_another_is_neither() -> None:
    peer = Peer()
    assert peer.hear("alice", GroupMessage(body_of(1)))
    assert not peer.hear("ben", GroupMessage(body_of(1)))
    assert not peer.hear("ben", GroupMessage(b"no group"))
    assert not peer.intake.hear("ben", "ben", b"garbage")
    assert peer.delivered == [("alice", body_of(1))]
    assert peer.intake.received == 3  # garbage is no message with a group
    assert peer.admission.rejections == {"duplicate": 1, "unsupported_version": 1, "bad_encoding": 1}


def test_own_messages_that_come_back_are_passed_on_unjudged() -> None:
    peer = Peer()
    assert peer.hear("me", GroupMessage(body_of(1)))
    assert peer.intake.hear("me", "forwarder", b"garbage")
    assert (peer.intake.received, peer.delivered, peer.admission.rejections) == (0, [], {})


@pytest.mark.parametrize("quiet", [encode_message(Hello(1, "tiny")), msgpack.packb([0, "weather"])], ids=["hello", "unknown kind"])
def test_messages_without_a_group_are_passed_on_so_many_times_between_greetings(quiet: bytes) -> None:
    peer = Peer()
    outcomes = [peer.intake.hear("mallory", "forwarder", quiet) for _ in range(QUIET_MESSAGES + 5)]
    assert outcomes == [True] * QUIET_MESSAGES + [False] * 5
    assert peer.intake.hear("ben", "forwarder", quiet)
    assert peer.hear("mallory", GroupMessage(body_of(1)))  # groups have quotas of their own
    peer.intake.greeted()
    assert peer.intake.hear("mallory", "forwarder", quiet)
    assert peer.intake.received == 1


def test_a_small_body_travels_inline_and_a_larger_one_is_announced_and_held() -> None:
    body = body_of(1)
    peer = Peer(inline_limit=len(body))
    assert peer.intake.wrap(body, "tiny") == GroupMessage(body)
    assert len(peer.intake.held) == 0
    peer = Peer(inline_limit=len(body) - 1)
    assert peer.intake.wrap(body, "tiny") == Announcement(digest(body), len(body), 2, 11, "tiny")
    assert peer.intake.held.get(digest(body)) == body
    with pytest.raises(Rejected):
        peer.intake.wrap(b"\xff" * len(body), "tiny")
    assert len(peer.intake.held) == 1


def test_a_pulled_body_is_judged_as_its_announcers_and_held_for_others() -> None:
    peer = Peer()
    for number in (1, 2):
        assert peer.announce("alice", body_of(number))
    first, second = peer.begin(), peer.begin()
    assert (first.sender, first.forwarder, first.announcement.digest) == ("alice", "forwarder", digest(body_of(1)))
    peer.intake.end_pull(second, body_of(2))
    peer.hear("ben", GroupMessage(body_of(1)))  # meanwhile it came from somebody else
    peer.intake.end_pull(first, body_of(1))
    assert peer.delivered == [("alice", body_of(2)), ("ben", body_of(1))]
    assert peer.admission.rejections == {"duplicate": 1}
    assert (peer.intake.held.get(digest(body_of(1))), peer.intake.held.get(digest(body_of(2)))) == (None, body_of(2))
    assert (peer.intake.received, peer.intake.pulled) == (3, 2)
    assert not peer.announce("alice", body_of(2))  # known: not worth pulling
    assert peer.intake.begin_pull() is None


def test_four_bodies_are_pulled_at_once_and_two_of_one_announcer() -> None:
    peer = Peer()
    for number, sender in enumerate(["slow"] * 4 + ["one", "two", "three"]):
        peer.announce(sender, body_of(number))
    under_way = [peer.begin() for _ in range(4)]
    assert [wanted.sender for wanted in under_way] == ["slow", "slow", "one", "two"]
    assert peer.intake.begin_pull() is None
    peer.intake.end_pull(under_way[2], body_of(4))
    assert peer.begin().sender == "three"
    peer.intake.end_pull(under_way[0], None)  # wanted again, after what waits already
    again = peer.begin()
    assert (again.announcement.digest, again.tries) == (digest(body_of(2)), 1)


def test_a_body_that_nobody_delivers_is_given_up_after_three_pulls() -> None:
    peer = Peer()
    peer.announce("alice", body_of(1))
    pauses = []
    for _ in range(3):
        wanted = peer.begin()
        pauses.append(wanted.pause_s)
        assert peer.intake.begin_pull() is None
        peer.intake.end_pull(wanted, None)
    assert pauses == [0.5, 1.0, 0.0]  # nothing to wait for after the last one
    assert peer.intake.begin_pull() is None
    assert (peer.intake.pull_failures, peer.intake.pulled, peer.delivered) == (1, 0, [])


def test_of_too_many_wishes_the_oldest_is_dropped_and_counted() -> None:
    peer = Peer()
    for number in range(PULLS_WAITING + 2):
        peer.announce("alice", number.to_bytes(2, "big"))
    assert peer.intake.dropped == 2
    assert peer.begin().announcement.digest == digest(b"\0\2")


def test_the_announcer_is_asked_first_then_the_forwarder_then_some_others() -> None:
    wanted = Wanted("announcer", "forwarder", Announcement(bytes(32), 1, 2, 2, ""))
    others = [f"other-{number}" for number in range(10)]
    orders = [holders_to_ask(wanted, [*others, "forwarder", "announcer"], random.Random(seed)) for seed in range(50)]
    for order in orders:
        assert order[:2] == ["announcer", "forwarder"]
        assert len(set(order[2:]) & set(others)) == len(order[2:]) == OTHER_HOLDERS
    assert {holder for order in orders for holder in order[2:]} == set(others)
    rng = random.Random(0)
    assert holders_to_ask(Wanted("same", "same", wanted.announcement), ["same", "other"], rng) == ["same", "other"]
    assert holders_to_ask(wanted, ["forwarder"], rng) == ["forwarder"]  # whom this node is not connected to it cannot ask
    assert holders_to_ask(wanted, [], rng) == []


def test_held_bodies_are_bounded_and_the_oldest_go() -> None:
    held = Held(max_bytes=3000)
    for number in range(5):
        held.add(bytes([number]), bytes(1000))
        held.add(bytes([2]), bytes(1000))  # asked for again: stays
    assert held.bytes == 3000
    assert [held.get(bytes([number])) is not None for number in range(5)] == [False, False, True, True, True]
    held.add(b"large", bytes(9000))
    assert len(held) == 1
    assert held.get(b"large") is not None
