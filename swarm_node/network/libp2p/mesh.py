"""The node as its peers see it: gossip in and out; runs inside the network process."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from swarm_protocols.messages import Hello, encode_message
from swarm_protocols.reject import Rejected

from swarm_node.network.intake import Intake
from swarm_node.network.libp2p.config import MeshConfig
from swarm_node.network.libp2p.connections import Connections
from swarm_node.network.libp2p.dialler import Source
from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.host import Host
from swarm_node.network.libp2p.pull import PULL_PROTOCOL, Server
from swarm_node.network.libp2p.puller import Puller
from swarm_node.network.libp2p.router import Router
from swarm_node.network.swarm_id import topic

OUTBOX_BODIES = 64
"""Own bodies that wait for a mesh; the oldest are dropped, they would be stale."""
HELLO_EVERY_S = 30.0
RENEW_EVERY_S = 3.0
BUSY_QUEUE = 32
"""A neighbour's queue with more messages than this makes the publisher wait."""
PATIENCE_S = 5.0
"""How long the publisher waits for a slow neighbour."""


class Mesh:
    """Ties host, router, intake and pulls together. `deliver` gets (signer's peer id, body) of every admitted group."""

    def __init__(self, config: MeshConfig, guard: PeerGuard, deliver: Callable[[str, bytes], None]) -> None:
        """To be made inside a running trio loop."""
        self.config = config
        self.guard = guard
        self.step, self.policy = 0, ""
        self._topic = topic(config.swarm)
        self._published = self._dropped = 0
        self._admission = config.rules.build()
        self._intake = Intake(config.identity.peer_id, config.options, self._admission, deliver)
        self._server = Server(self._intake.held, config.options.stream_timeout_s)
        self._rng = random.Random()
        self._host = Host(config.identity, config.options)
        self._router = Router(config.options, guard)
        self._pubsub = Pubsub(
            self._host.host, self._router, strict_signing=True, allowed_topics={self._topic}, max_subscriptions_per_peer=8
        )
        self._pubsub.counter = time.time_ns()  # from seconds, messages after a restart are dropped as seen
        self._pubsub.set_topic_validator(self._topic, self._judge, is_async_validator=False)
        self._puller = Puller(self._host, guard, self._rng, config.options.stream_timeout_s, self._intake)
        self._connections = Connections(self._host, config, guard, self._rng)
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = trio.Event()

    def publish(self, body: bytes) -> None:
        """Queue an own body for the mesh."""
        self._outbox.append(body)
        while len(self._outbox) > OUTBOX_BODIES:
            self._outbox.popleft()
            self._dropped += 1
        self._outbox_filled.set()

    def learn(self, address: str) -> None:
        """Take an address that somebody found; nonsense is ignored."""
        self._connections.learn(address, Source.FOUND)

    def report(self) -> dict[str, Any]:
        """State and totals, as msgpack can carry them."""
        connected = self._host.peers()
        members = {str(peer) for peer in self._pubsub.peer_topics.get(self._topic, ())}
        peers = [peer for peer in connected if peer in members]
        trouble = "" if peers else self._connections.waiting_for()
        if connected and not peers:
            trouble = f"no peers yet: {len(connected)} connected, but none of them is in this swarm"
        return {
            "peers": peers,
            "mesh": len(self._neighbours),
            "addresses": [str(address) for address in self._host.addresses()],
            "published": self._published,
            "received": self._intake.received,
            "pulled": self._intake.pulled,
            "pull_failures": self._intake.pull_failures,
            "dropped": self._dropped + self._intake.dropped,
            "rejections": dict(self._admission.rejections),
            "ignored": dict(self._admission.ignored),
            "confined": dict(self.guard.counts),
            "confined_latest": self.guard.latest,
            "notices": list(self._host.notices),
            "trouble": trouble,
        }

    async def run(self, started: Callable[[], None]) -> None:
        """Listen, join and serve for ever; `started` is called once the sockets are open."""
        self._host.host.set_stream_handler(TProtocol(PULL_PROTOCOL), self._serve_pull)
        async with self._host.run(), background_trio_service(self._pubsub), background_trio_service(self._router):
            await self._pubsub.wait_until_ready()
            subscription = await self._pubsub.subscribe(self._topic)  # before anybody is dialled
            started()
            async with trio.open_nursery() as nursery:
                for task in (self._publish_outbox, self._greet_for_ever, self._renew_for_ever, self._puller.run, self._connections.run):
                    nursery.start_soon(task)
                while True:  # bodies are taken in the validator; the subscription's 32 places only have to stay free
                    await subscription.get()

    @property
    def _neighbours(self) -> set[ID]:
        return self._router.mesh.get(self._topic, set())

    # -- in

    def _judge(self, forwarder: ID, message: Any) -> bool:
        """Validate one signed message; what is refused here is neither delivered nor passed on."""
        passed_on = self._intake.hear(str(ID(message.from_id)), str(forwarder), message.data)
        self._puller.wake()
        return passed_on

    async def _serve_pull(self, stream: INetStream) -> None:
        await self._server.serve(stream, str(stream.muxed_conn.peer_id))

    # -- out

    async def _publish_outbox(self) -> None:
        while True:
            while not self._outbox:
                self._outbox_filled = trio.Event()
                await self._outbox_filled.wait()
            if not self._neighbours:  # published into no mesh, it would be lost
                await trio.sleep(0.05)
                continue
            await self._let_neighbours_catch_up()
            if self._outbox:
                await self._publish(self._outbox.popleft())

    async def _publish(self, body: bytes) -> None:
        try:
            message = self._intake.wrap(body, self.policy)
        except Rejected as rejected:
            self._dropped += 1
            self.guard.latest = f"own group of {len(body)} bytes cannot be published: {rejected}"
            return
        with self.guard.watch("publish"):
            await self._pubsub.publish(self._topic, encode_message(message))
            self._published += 1

    async def _let_neighbours_catch_up(self) -> None:
        """Pace bursts: a full queue drops without a word."""
        with trio.move_on_after(PATIENCE_S):
            while True:
                queues = [self._pubsub.peer_queues.get(peer) for peer in self._neighbours]
                if all(queue is None or len(queue) < BUSY_QUEUE for queue in queues):
                    return
                await trio.sleep(0.02)

    async def _renew_for_ever(self) -> None:
        """Subscribe again and again. Two connections of one peer overlap whenever both sides dial; when the older one ends, libp2p forgets
        the peer's subscription, which the peer has no reason to repeat, or goes on writing to the older one's stream."""
        while True:
            await trio.sleep(RENEW_EVERY_S * self._rng.uniform(0.8, 1.2))
            with self.guard.watch("renewal"):
                await self._pubsub.message_all_peers(self._pubsub.get_hello_packet().SerializeToString())
            async with trio.open_nursery() as nursery:
                for peer in self._host.peers():
                    nursery.start_soon(self._ensure_stream, peer)

    async def _ensure_stream(self, peer: str) -> None:
        with self.guard.watch("renewal", peer):
            await self._pubsub.ensure_peer_stream(ID.from_string(peer), timeout=RENEW_EVERY_S)

    async def _greet_for_ever(self) -> None:
        while True:
            if self._neighbours:
                hello = Hello(self.step, self.policy, self.config.rules.tasks)
                with self.guard.watch("hello"):
                    await self._pubsub.publish(self._topic, encode_message(hello))
            self._intake.greeted()
            await trio.sleep(HELLO_EVERY_S * self._rng.uniform(0.8, 1.2))
