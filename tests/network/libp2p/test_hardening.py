"""A live node against a peer that plays by no rule: it keeps running, keeps its other peers, and keeps delivering."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest
import trio
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_uvarint, encode_varint_prefixed
from swarm_protocols.codec import digest
from swarm_protocols.messages import Announcement, GroupMessage, encode_message

from swarm_node.network.gossip import Received
from swarm_node.network.libp2p.pull import PULL_PROTOCOL
from swarm_node.network.live import Libp2pGossip
from swarm_node.network.swarm_id import topic
from tests.support import hostile_peer
from tests.support.hostile_peer import MESH, open_stream, rpc, send, until, wait_for_end
from tests.support.live_network import SWARM, await_bodies, await_peers, exchange, listening, make_body, node
from tests.support.waiting import HANG_S, await_condition

TOPIC = topic(SWARM)
Pair = tuple[Libp2pGossip, Libp2pGossip]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A node that will be attacked and an honest peer of it."""
    folder = tmp_path_factory.mktemp("pair")
    options: dict[str, Any] = {"ping_s": 1.0, "stream_timeout_s": 1.0, "remember": False, "max_peers": 8}
    with node(folder / "alice", **options) as alice, node(folder / "bob", peers=listening(alice), **options) as bob:
        await_peers(bob, alice)
        await_peers(alice, bob)
        yield alice, bob


@pytest.fixture
def unharmed(pair: Pair) -> Iterator[Libp2pGossip]:
    """The attacked node; afterwards it must run in the same process, and exchange with its honest peer over the same connection."""
    alice, bob = pair
    process = alice.pids["network"]
    yield alice
    assert alice.pids["network"] == process
    assert alice.report().restarts == 0
    exchange(alice, bob)
    exchange(bob, alice)
    await_condition(lambda: alice.report().peer_ids == (bob.peer_id,), "nothing of the attacker is left")


def attack(gossip: Libp2pGossip, behave: Callable[[IHost, Any], Awaitable[None]]) -> None:
    """Connect a stock host to the node and let it misbehave; `behave` gets the host and the node's peer id."""
    hostile_peer.attack(gossip.report().addresses[0], behave)


def signed(host: IHost, data: bytes, sequence: int = 1) -> rpc_pb2.Message:
    return hostile_peer.signed(host, TOPIC, data, sequence)


# Item 1: nothing that escapes a handler, a validator or the reader of the mesh cancels the host.


def test_garbage_on_the_mesh_protocol_ends_that_stream_only(unharmed: Libp2pGossip) -> None:
    garbage = [encode_varint_prefixed(secrets.token_bytes(size)) for size in (1, 7, 300)]
    before = sum(unharmed.report().confined.values())

    async def behave(host: IHost, peer: Any) -> None:
        await send(host, peer, *garbage, encode_varint_prefixed(b"\x0a\xff\xff\xff\xff\x0f"))
        await until(lambda: sum(unharmed.report().confined.values()) > before, "the error is confined and counted")

    attack(unharmed, behave)


def test_a_varint_that_never_ends_is_given_up(unharmed: Libp2pGossip) -> None:
    async def behave(host: IHost, peer: Any) -> None:
        await send(host, peer, b"\xff" * 64, encode_uvarint(2**63), encode_uvarint(2**40) + b"x")

    attack(unharmed, behave)


def test_messages_with_garbage_keys_are_dropped(unharmed: Libp2pGossip) -> None:
    before = unharmed.report().confined.get("task push_msg", 0)
    messages = [
        rpc_pb2.Message(data=b"x", topicIDs=[TOPIC], from_id=sender, seqno=secrets.token_bytes(8), key=key, signature=b"s" * 64)
        for sender in (b"\x12\x20" + secrets.token_bytes(32), b"")  # an RSA-style peer id, whose key has to travel in the message; and none
        for key in (b"", b"\xff" * 40, b"\x08\x01\x12\x20" + b"\xff" * 32, b"\x08\x00\x12\x02ab")
    ]

    async def behave(host: IHost, peer: Any) -> None:
        await send(host, peer, rpc(*messages), patience_s=0.3)
        await until(lambda: unharmed.report().confined.get("task push_msg", 0) > before, "the errors are confined and counted")

    attack(unharmed, behave)


@pytest.mark.parametrize("seeds", [range(4), range(4, 8), range(8, 12)])  # an attacker each: one that trips five handlers is shut out
def test_fuzzed_rpcs_change_nothing(unharmed: Libp2pGossip, seeds: range) -> None:
    async def behave(host: IHost, peer: Any) -> None:
        honest = bytearray(rpc(signed(host, encode_message(GroupMessage(make_body(str(host.get_id())))))))
        control = rpc_pb2.RPC(control=rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID=TOPIC)]))
        control.control.ihave.append(rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=[b"\xff\x00", b"odd"] * 50))
        control.control.prune.append(rpc_pb2.ControlPrune(topicID=TOPIC, backoff=2**63))
        honest += encode_varint_prefixed(control.SerializeToString())
        payloads = []
        for seed in seeds:
            fuzzed = bytearray(honest)
            for place in range(3, len(fuzzed), 1 + seed):
                fuzzed[place] ^= (seed * 37 + place) & 0xFF
            payloads.append(bytes(fuzzed))
        await send(host, peer, *payloads, patience_s=0.05)

    attack(unharmed, behave)


def test_well_signed_nonsense_is_refused_with_a_reason(unharmed: Libp2pGossip) -> None:
    before = dict(unharmed.report().rejections)
    grown = {"bad_encoding", "bad_schema"}

    async def behave(host: IHost, peer: Any) -> None:
        stream = await open_stream(host, peer, MESH)
        await stream.write(rpc(signed(host, secrets.token_bytes(100))))
        await until(
            lambda: any(unharmed.report().rejections.get(reason, 0) > before.get(reason, 0) for reason in grown), "the refusal is counted"
        )

    attack(unharmed, behave)


def test_a_forged_signature_delivers_nothing(pair: Pair, unharmed: Libp2pGossip) -> None:
    _, bob = pair
    honest = make_body(bob.peer_id)

    async def behave(host: IHost, peer: Any) -> None:
        body = make_body(bob.peer_id)
        message = signed(host, encode_message(GroupMessage(body)))
        message.from_id = ID.from_string(bob.peer_id).to_bytes()
        await send(host, peer, rpc(message), patience_s=0.3)

    attack(unharmed, behave)
    bob.publish(honest)
    assert await_bodies(unharmed, 1) == [Received(bob.peer_id, honest)]


def test_nonsense_in_negotiation_identify_and_pulls_ends_the_stream_only(unharmed: Libp2pGossip) -> None:
    async def behave(host: IHost, peer: Any) -> None:
        raw = await host.get_network().new_stream(peer)
        await raw.write(encode_uvarint(2**50) + b"/multistream")  # a negotiation line of a petabyte
        assert await wait_for_end(raw, HANG_S)
        raw = await host.get_network().new_stream(peer)
        await raw.write(encode_varint_prefixed(b"\xff\xfe\n"))  # not UTF-8
        await wait_for_end(raw)
        await send(host, peer, b"short", secrets.token_bytes(32), secrets.token_bytes(5000), protocol=PULL_PROTOCOL)
        await send(host, peer, b"\xff" * 40, protocol="/ipfs/ping/1.0.0")
        await send(host, peer, b"\xff" * 40, protocol="/ipfs/id/push/1.0.0")

    attack(unharmed, behave)


def test_a_peer_that_stops_reading_does_not_hold_the_others(pair: Pair, unharmed: Libp2pGossip) -> None:
    alice, bob = pair
    exchange(alice, bob, tokens=32_000)
    body = make_body(alice.peer_id, tokens=32_000)
    alice.publish(body)  # held for pulls from now on

    async def behave(host: IHost, peer: Any) -> None:
        for _ in range(2):
            stream = await open_stream(host, peer, PULL_PROTOCOL)
            await stream.write(digest(body))  # and never a read: the server's write blocks on the window
        await trio.to_thread.run_sync(exchange, alice, bob)
        await trio.to_thread.run_sync(exchange, bob, alice)

    attack(unharmed, behave)


def test_a_validator_that_raises_ends_one_message_and_a_missing_attribute_ends_the_process() -> None:
    program = """
import secrets, time, trio
import libp2p.pubsub.pubsub as pubsub
from importlib import metadata
from multiaddr import Multiaddr
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from swarm_node.network.libp2p import hardening
from swarm_node.network.identity import Identity
from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.host import Host
from swarm_node.network.libp2p.router import Router
from swarm_node.network.options import NetworkOptions

guard = PeerGuard()
options = NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",))

for name, replacement in [("EXPECTED_VERSION", "0.0.0")]:
    kept = getattr(hardening, name)
    setattr(hardening, name, replacement)
    try:
        hardening.harden(guard)
    except hardening.HardeningError as error:
        print(error)
    setattr(hardening, name, kept)
try:
    hardening._replace(pubsub.Pubsub, "no_such_method", lambda old: old)
except hardening.HardeningError as error:
    print(error)

hardening.harden(guard)
hosts = [Host(Identity(secrets.token_bytes(32)), options) for _ in range(2)]
routers = [Router(options, guard) for _ in hosts]
meshes = [Pubsub(host.host, router, strict_signing=True) for host, router in zip(hosts, routers)]

def raising(forwarder, message):
    if message.data == b"bad":
        raise ZeroDivisionError("a bug in a check")
    return True

async def main():
    with trio.fail_after(600):
        async with hosts[0].run(), hosts[1].run(), background_trio_service(meshes[0]), background_trio_service(meshes[1]):
            async with background_trio_service(routers[0]), background_trio_service(routers[1]):
                heard = await meshes[1].subscribe("t")
                await meshes[0].subscribe("t")
                meshes[1].set_topic_validator("t", raising, is_async_validator=False)
                await hosts[0].dial(hosts[1].addresses()[0])
                await meshes[0].wait_for_mesh(hosts[1].host.get_id(), "t", timeout=600)
                for data in (b"bad", b"good"):
                    await meshes[0].publish("t", data)
                print((await heard.get()).data, dict(guard.counts), guard.latest)

trio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    wrong_version, missing, heard = done.stdout.splitlines()
    assert "0.8.1" in wrong_version
    assert "0.0.0" in wrong_version
    assert "Pubsub.no_such_method is gone" in missing
    assert heard.startswith("b'good'")
    assert "ZeroDivisionError: a bug in a check" in heard


def test_a_peer_that_trips_handlers_again_and_again_is_shut_out(unharmed: Libp2pGossip) -> None:
    async def behave(host: IHost, peer: Any) -> None:
        address = host.get_peerstore().addrs(peer)[0]
        refused = 0
        with trio.fail_after(HANG_S):
            while refused < 3:  # in a row: one misdeed ends one connection, and the next is welcome
                try:
                    await host.connect(PeerInfo(peer, [address]))
                    ping = await open_stream(host, peer, "/ipfs/ping/1.0.0")
                    await ping.write(bytes(32))
                    assert await ping.read(32) == bytes(32)
                except Exception:  # noqa: BLE001  # hung up on, in whatever way
                    refused += 1
                    await trio.sleep(0.2)
                    continue
                refused = 0
                await send(host, peer, encode_varint_prefixed(b"\xff" * 20), patience_s=0.5)

    attack(unharmed, behave)


# Item 2: Noise, and nothing else.


@pytest.mark.parametrize(
    ("protocol", "answer"), [("/plaintext/2.0.0", "na"), ("/secio/1.0.0", "na"), ("/tls/1.0.0", "na"), ("/noise", "/noise")]
)
def test_only_noise_is_spoken(pair: Pair, protocol: str, answer: str) -> None:
    port = int(pair[0].report().addresses[0].split("/")[4])
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as raw, raw.makefile("rwb") as file:
        for line in ("/multistream/1.0.0", protocol):
            file.write(encode_varint_prefixed(line.encode() + b"\n"))
            file.flush()
        answers = [file.read(file.read(1)[0]).decode().strip() for _ in range(2)]
    assert answers == ["/multistream/1.0.0", answer]


# Item 3: what GossipSub would lose silently is announced and pulled (test_libp2p_gossip); the puller trusts no holder.


def test_a_holder_that_sends_other_bytes_is_not_believed_and_the_next_one_is_asked(pair: Pair, unharmed: Libp2pGossip) -> None:
    alice, bob = pair

    async def behave(host: IHost, peer: Any) -> None:
        name = str(host.get_id())
        real = make_body(name, tokens=30_000)
        asked = trio.Event()

        async def serve(stream: INetStream) -> None:
            await stream.read(32)
            asked.set()
            chunk = struct.pack(">I", 4096) + secrets.token_bytes(4096)
            try:
                while True:  # far more than was announced
                    await stream.write(chunk)
            except Exception:  # noqa: BLE001  # the puller hangs up
                return

        host.set_stream_handler(TProtocol(PULL_PROTOCOL), serve)
        stream = await open_stream(host, peer, MESH)
        await stream.write(rpc(signed(host, encode_message(Announcement(digest(real), len(real), 4, 120_000, "liar")))))
        with trio.fail_after(HANG_S):
            await asked.wait()
        await wait_for_end(stream, 1.0)

    attack(unharmed, behave)
    assert alice.drain() == []
    assert bob.drain() == []


# Item 7: a peer that falls silent is noticed, without a word from its kernel.


def test_a_silent_peer_is_noticed_and_welcome_again(pair: Pair) -> None:
    alice, bob = pair
    frozen = bob.pids["network"]
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    try:
        await_condition(lambda: bob.peer_id not in alice.report().peer_ids, "the silent peer is dropped")
        assert "no peers yet" in alice.report().trouble
    finally:
        os.kill(frozen, signal.SIGCONT)
    await_peers(alice, bob)
    await_peers(bob, alice)
    exchange(alice, bob)
    assert bob.pids["network"] == frozen


# Item 9: windows that the sender ignores, and streams without end.


def test_a_sender_that_ignores_the_window_fills_no_memory(unharmed: Libp2pGossip) -> None:
    process = psutil.Process(unharmed.pids["network"])
    before = process.memory_info().rss
    sent = 0

    async def behave(host: IHost, peer: Any) -> None:
        nonlocal sent
        stream = await open_stream(host, peer, PULL_PROTOCOL)
        muxed = stream.muxed_stream  # type: ignore[attr-defined]
        await muxed.write(bytes(32))
        await wait_for_end(stream)  # the answer that there is no such body; the other direction stays open
        muxed.send_window = 2**40
        for _ in range(1024):
            await muxed.write(bytes(64 * 1024))
            sent += 64 * 1024
        ping = await open_stream(host, peer, "/ipfs/ping/1.0.0")
        await ping.write(bytes(32))
        assert await ping.read(32) == bytes(32)  # so the node has read what came before it on the connection
        assert process.memory_info().rss - before < 24 * 1024 * 1024

    attack(unharmed, behave)
    assert sent == 64 * 1024 * 1024


def test_a_peer_cannot_open_streams_without_end(unharmed: Libp2pGossip) -> None:
    async def behave(host: IHost, peer: Any) -> None:
        with trio.fail_after(HANG_S):
            while not unharmed.report().confined.get("too many streams"):
                with trio.move_on_after(1):  # a stream that is refused is waited for in vain
                    try:
                        await host.get_network().new_stream(peer)
                    except Exception:  # noqa: BLE001  # the node may hang up at any stream
                        await trio.sleep(0.01)

    attack(unharmed, behave)


# Item 11: connections that are gone leave nothing behind.


def test_many_short_connections_use_up_no_place(unharmed: Libp2pGossip) -> None:
    # Stock keeps a place of the inbound limit, here 8, for every connection that ever came in.
    port = int(unharmed.report().addresses[0].split("/")[4])
    for _ in range(50):
        socket.create_connection(("127.0.0.1", port), timeout=HANG_S).close()
    for _ in range(12):

        async def behave(host: IHost, peer: Any) -> None:
            await send(host, peer, secrets.token_bytes(32), protocol=PULL_PROTOCOL)

        attack(unharmed, behave)
