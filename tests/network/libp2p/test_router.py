"""The router's settings and bounds, and pulls, without a network."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import struct
import time
from collections.abc import Callable

import pytest
import trio
import trio.testing
from google.protobuf.message import DecodeError
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import MessageTooLarge
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamEOF, StreamReset
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.exceptions import MuxedStreamError
from swarm_protocols.messages import Announcement, encode_message

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.intake import Held, Intake
from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.hardening import is_breakage
from swarm_node.network.libp2p.pull import CHUNK_BYTES, PullError, Server, fetch
from swarm_node.network.libp2p.puller import Puller
from swarm_node.network.libp2p.router import BoundedMessageCache, Router
from swarm_node.network.options import NetworkOptions
from tests.support.waiting import HANG_S


def message(number: int, size: int = 1000) -> rpc_pb2.Message:
    return rpc_pb2.Message(from_id=b"peer", seqno=number.to_bytes(8, "big"), data=bytes(size), topicIDs=["t"])


def test_the_router_has_the_settings_that_were_measured_to_deliver() -> None:
    router = Router(NetworkOptions(degree=4, heartbeat_s=0.5), PeerGuard())
    assert router.get_protocols() == [PROTOCOL_ID_V11]  # IDONTWANT of v1.2 doubles the CPU time
    assert (router.degree, router.degree_low, router.degree_high) == (4, 3, 8)
    assert router.heartbeat_interval == 0.5  # stock: 120
    assert not router.adaptive_gossip_enabled  # would reset the heartbeat to 30
    assert router._check_spam_protection(None, message(1)) is True  # type: ignore[arg-type]  # stock: 10 a second, the rest not forwarded
    assert not router.eclipse_protection_enabled
    grafts: dict[object, list[str]] = {}
    assert router._perform_opportunistic_grafting("t", grafts) == 0
    assert grafts == {}


def test_control_messages_about_other_topics_leave_nothing_behind() -> None:
    router = Router(NetworkOptions(), PeerGuard())
    router.mesh["t"] = set()
    peer = ID(b"peer")

    async def flood() -> None:
        for number in range(100):
            topic = f"made up {number}"
            await router.handle_prune(rpc_pb2.ControlPrune(topicID=topic, backoff=2**62), peer)
            await router.handle_graft(rpc_pb2.ControlGraft(topicID=topic), peer)
            await router.handle_ihave(rpc_pb2.ControlIHave(topicID=topic, messageIDs=[b"m"]), peer)
        await router.handle_prune(rpc_pb2.ControlPrune(topicID="t", backoff=2**62, peers=[rpc_pb2.PeerInfo(peerID=b"victim")]), peer)

    trio.run(flood)  # would raise if it dialled the victim: nothing is attached
    assert list(router.back_off) == ["t"]
    assert router.back_off["t"][peer] <= time.time() + 600
    assert "made up 1" not in router.ihave_message_limits[peer]


def test_bodies_are_not_kept_to_compare_them() -> None:
    router = Router(NetworkOptions(), PeerGuard())
    for number in range(100):
        assert router._check_equivocation(message(number))
    assert router.equivocation_detection == {}


def test_the_message_cache_lets_the_oldest_bodies_go() -> None:
    cache = BoundedMessageCache(3, 5, max_bytes=10_000)
    for number in range(30):
        cache.put(message(number))
        cache.put(message(number))  # the same one again costs nothing
    assert cache.bytes == 10_000
    assert [mid[-1] for mid in cache.msgs] == list(range(20, 30))
    assert len(cache.window("t")) == 10
    for _ in range(5):
        cache.shift()
    assert cache.bytes == 0
    assert cache.msgs == {}


def test_an_error_in_one_heartbeat_does_not_end_the_beating() -> None:
    guard = PeerGuard()
    router = Router(NetworkOptions(heartbeat_s=0.1), guard)  # not attached to anything: every beat with a topic raises
    router.mesh["t"] = set()

    async def beat() -> None:
        with trio.move_on_after(HANG_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(router.heartbeat)
                while guard.counts["heartbeat"] < 3:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(beat)
    assert guard.counts["heartbeat"] >= 3


def test_the_guard_lets_cancellation_and_exits_through() -> None:
    guard = PeerGuard()

    async def cancelled() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            with guard.watch("here"):
                await trio.sleep(1)
        return scope.cancelled_caught

    assert trio.run(cancelled)
    with pytest.raises(KeyboardInterrupt), guard.watch("here"):
        raise KeyboardInterrupt
    assert guard.counts["here"] == 0
    with pytest.raises(BaseExceptionGroup) as left, guard.watch("here", "peer"):
        raise BaseExceptionGroup("both", [ValueError("theirs"), SystemExit(1)])
    assert [type(error) for error in left.value.exceptions] == [SystemExit]
    with guard.watch("here") as watch:
        raise ExceptionGroup("only theirs", [ValueError("deep")])
    assert watch.failed
    assert guard.counts["here"] == 2
    assert guard.latest == "here: ValueError: deep"


@pytest.mark.parametrize(
    ("error", "breakage"),
    [
        (StreamReset(), True),
        (StreamEOF(), True),
        (RawConnError("connection closed"), True),
        (MuxedStreamError("Timed out waiting for window update"), True),
        (trio.TooSlowError(), True),
        (ConnectionResetError(), True),
        (PullError("the stream ended"), True),
        (ExceptionGroup("both", [StreamEOF(), trio.BrokenResourceError()]), True),
        (ParseError("varint"), False),
        (MessageTooLarge("a stream holds too much"), False),
        (DecodeError("protobuf"), False),
        (ValueError("a bug"), False),
        (ExceptionGroup("both", [StreamEOF(), KeyError("x")]), False),
    ],
)
def test_a_broken_connection_is_nobodys_fault(error: Exception, breakage: bool) -> None:
    guard, blamed = PeerGuard(), []
    guard.is_breakage = is_breakage
    guard.on_error = lambda where, peer: blamed.append(peer)
    with guard.watch("stream handler", "peer") as watch:
        raise error
    assert watch.failed  # confined in either case
    assert blamed == ([] if breakage else ["peer"])
    assert sum(guard.counts.values()) == len(blamed)


class Pipe:
    """A stream whose other end is a function of everything written so far; the answer is what may be read."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = functools.cache(answer)
        self.written = b""
        self.given = 0
        self.closed = False

    async def write(self, data: bytes) -> None:
        self.written += data

    async def read(self, n: int | None = None) -> bytes:
        answer = self._answer(self.written)
        part = answer[self.given : self.given + min(n or 1, 10_000)]
        if not part and not self.closed:
            await trio.sleep(math.inf)
        self.given += len(part)
        return part

    async def close(self) -> None:
        self.closed = True


BODY = bytes(range(256)) * 4096  # 1 MiB
NAME = hashlib.sha256(BODY).digest()


def framed(body: bytes, end: bytes = bytes(4)) -> bytes:
    chunks = [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)]
    return b"".join(struct.pack(">I", len(chunk)) + chunk for chunk in chunks) + end


def pull(pipe: Pipe, size: int = len(BODY)) -> bytes:
    async def run() -> bytes:
        return await fetch(pipe, NAME, size, timeout_s=0.2)

    return trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_body_is_pulled_whole() -> None:
    pipe = Pipe(lambda asked: framed(BODY) if asked == NAME else b"")
    assert pull(pipe) == BODY


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (bytes(4), "has not got it"),
        (framed(BODY[:-1] + b"x"), "not the 1048576 bytes that were announced"),
        (framed(BODY[:-1]), "sent 1048575 bytes"),
        (framed(BODY + b"x"), "more than the 1048576 bytes"),
        (struct.pack(">I", 2**32 - 1), "more than the 1048576 bytes"),
        (framed(BODY, end=b""), "silent for 0 s after 1048576"),
        (framed(BODY)[:5000], "silent for 0 s after 0"),
        (b"", "silent for 0 s after 0"),
    ],
)
def test_a_holder_that_does_not_deliver_is_given_up(answer: bytes, why: str) -> None:
    with pytest.raises(PullError, match=why):
        pull(Pipe(lambda _: answer))


def test_the_first_byte_too_many_ends_the_pull() -> None:
    pipe = Pipe(lambda _: framed(BODY + BODY))
    with pytest.raises(PullError, match="more than"):
        pull(pipe)
    assert pipe.given <= len(framed(BODY))


def test_a_holder_that_dribbles_is_given_up_on_the_whole() -> None:
    class Dribble(Pipe):
        async def read(self, n: int | None = None) -> bytes:
            await trio.sleep(0.9)
            return await super().read(n)

    # Chunks of one byte, each well within its own second: the whole MiB would take 22 days.
    pipe = Dribble(lambda _: b"".join(struct.pack(">I", 1) + BODY[at : at + 1] for at in range(1000)))

    async def run() -> float:
        began = trio.current_time()
        with pytest.raises(PullError, match=r"sent \d+ of 1048576 bytes in whole chunks in 17 s"):
            await fetch(pipe, NAME, len(BODY), timeout_s=1)
        return trio.current_time() - began

    assert trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0)) == pytest.approx(17)


class Neighbours:
    """A host that is connected to these peers, by one name each."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def peers(self) -> list[str]:
        return self.names


def run_puller(
    monkeypatch: pytest.MonkeyPatch, announcers: list[str], seconds: float, deliver: Callable[[str], float | None]
) -> tuple[Intake, list[tuple[str, float]]]:
    """Announce a body of each announcer to a puller and let time pass; `deliver` says after how many seconds a holder does, if it does.

    Returns the intake, and who was asked when.
    """
    admission = CheapAdmission(tasks=(), assigned=lambda sender, problem, step: True)
    intake = Intake("me", NetworkOptions(), admission, lambda sender, body: None)
    asked: list[tuple[str, float]] = []
    start = 0.0

    async def pull_from(holder: str, announcement: Announcement) -> bytes:
        asked.append((holder, trio.current_time() - start))
        if (needed := deliver(holder)) is None:
            raise PullError("the holder has not got it")
        await trio.sleep(needed)
        return b""

    async def run() -> None:
        nonlocal start
        puller = Puller(Neighbours(*dict.fromkeys(announcers)), PeerGuard(), random.Random(0), 1.0, intake)  # type: ignore[arg-type]
        monkeypatch.setattr(puller, "_pull_from", pull_from)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(puller.run)
            await trio.testing.wait_all_tasks_blocked()
            start = trio.current_time()
            for number, sender in enumerate(announcers):
                assert intake.hear(sender, sender, encode_message(Announcement(bytes([number]) * 32, 1, 2, 2, "")))
                puller.wake()
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    return intake, asked


def test_four_bodies_are_pulled_at_once_and_two_of_one_announcer(monkeypatch: pytest.MonkeyPatch) -> None:
    announcers = ["slow"] * 5 + ["one", "two", "three"]
    intake, asked = run_puller(monkeypatch, announcers, 150, lambda holder: 100 if holder == "slow" else 1)
    assert sorted(asked[:4]) == [("one", 0), ("slow", 0), ("slow", 0), ("two", 0)]
    assert asked[4:] == [("three", 1), ("slow", 100), ("slow", 100)]
    assert intake.pulled == 5


def test_who_does_not_deliver_is_asked_again_after_pauses_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    intake, asked = run_puller(monkeypatch, ["alice"], 10, lambda holder: None)
    assert asked == [("alice", 0), ("alice", 0.5), ("alice", 1.5)]
    assert (intake.pull_failures, intake.pulled) == (1, 0)


def test_the_next_holder_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    intake, asked = run_puller(monkeypatch, ["gone", "there"], 10, lambda holder: None if holder == "gone" else 1)
    assert sorted(asked) == [("gone", 0), ("there", 0), ("there", 0)]
    assert (intake.pull_failures, intake.pulled) == (0, 2)


def serve(held: Held, request: bytes, **options: int) -> Pipe:
    pipe = Pipe(lambda _: request)

    async def run() -> None:
        await Server(held, timeout_s=0.2, **options).serve(pipe, "peer")

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    return pipe


def test_the_server_answers_in_chunks_and_closes() -> None:
    held = Held(2**22)
    held.add(NAME, BODY)
    assert serve(held, NAME).written == framed(BODY)
    other = serve(held, bytes(32))
    assert other.written == bytes(4)
    assert other.closed
    with pytest.raises(trio.TooSlowError):
        serve(held, NAME[:31])
    assert serve(held, NAME, per_peer=0).written == bytes(4)
