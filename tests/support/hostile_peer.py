"""A stock libp2p host that misbehaves, for tests of what a node bears."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from tests.support.waiting import HANG_S, await_condition

MESH = "/meshsub/1.1.0"


def attack(address: str, behave: Callable[[IHost, Any], Awaitable[None]]) -> None:
    """Connect a stock host to the node and let it misbehave; `behave` gets the host and the node's peer id."""

    async def run() -> None:
        host = hostile_host()
        async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            target = info_from_p2p_addr(Multiaddr(address))
            await host.connect(target)
            await behave(host, target.peer_id)
            with trio.move_on_after(1):
                await host.close()  # stock leaves its sockets open otherwise

    trio.run(run)


def hostile_host() -> IHost:
    pair = create_new_key_pair(secrets.token_bytes(32))
    return new_host(key_pair=pair, sec_opt={NOISE: Noise(pair, noise_privkey=create_noise_key_pair().private_key)})


async def open_stream(host: IHost, peer: Any, protocol: str) -> INetStream:
    return await host.new_stream(peer, [TProtocol(protocol)])


async def send(host: IHost, peer: Any, *payloads: bytes, protocol: str = MESH, patience_s: float = 3.0) -> None:
    """Write payloads, each on a stream of its own; the node may hang up because of any of them, and is dialled again then."""
    address = host.get_peerstore().addrs(peer)[0]
    for payload in payloads:
        refused_until = trio.current_time() + HANG_S
        while trio.current_time() < refused_until:
            try:
                await host.connect(PeerInfo(peer, [address]))
                stream = await open_stream(host, peer, protocol)
                await stream.write(payload)
            except Exception:  # noqa: BLE001  # hung up on, in whatever way
                await trio.sleep(0.2)
                continue
            await wait_for_end(stream, patience_s)
            break
        else:
            raise AssertionError(f"the node no longer lets {host.get_id()} in")


async def until(condition: Callable[[], object], what: str) -> None:
    """Stay until the misdeed has had its effect: what was written just before a connection's end may never be read."""
    await trio.to_thread.run_sync(await_condition, condition, what)


async def wait_for_end(stream: INetStream, limit_s: float = 3.0) -> bool:
    """Whether the other side ended the stream in that time: patience before the next misdeed, and nothing to assert."""
    with trio.move_on_after(limit_s):
        try:
            while await stream.read(1024):
                pass
        except Exception:  # noqa: BLE001  # whatever way the stream ends is fine
            return True
        return True
    return False


def rpc(*messages: rpc_pb2.Message) -> bytes:
    return encode_varint_prefixed(rpc_pb2.RPC(publish=list(messages)).SerializeToString())


def signed(host: IHost, topic: str, data: bytes, sequence: int = 1) -> rpc_pb2.Message:
    message = rpc_pb2.Message(data=data, topicIDs=[topic], from_id=host.get_id().to_bytes(), seqno=sequence.to_bytes(8, "big"))
    message.signature = host.get_private_key().sign(PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString())
    message.key = host.get_public_key().serialize()
    return message
