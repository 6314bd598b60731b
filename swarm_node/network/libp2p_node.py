"""The node as its peers see it: gossip in and out, pulls, dialling; runs inside the network process."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr
from swarm_protocols.codec import decode_header, digest
from swarm_protocols.messages import Announcement, GroupMessage, Hello, encode_message
from swarm_protocols.reject import Rejected

from swarm_node.network.addresses import Address, AddressError, parse_address, parse_peer
from swarm_node.network.dialler import Dialler, Source, Target
from swarm_node.network.libp2p_guard import PeerGuard
from swarm_node.network.libp2p_host import DialError, Host
from swarm_node.network.libp2p_peers import ask, peers_protocol, tell
from swarm_node.network.libp2p_pull import PULL_PROTOCOL, Held, PullError, Server, fetch
from swarm_node.network.libp2p_router import Router
from swarm_node.network.node_config import NodeConfig
from swarm_node.network.peers_file import read_peers, write_peers
from swarm_node.network.swarm_id import topic

OUTBOX_BODIES = 64
"""Own bodies that wait for a mesh; the oldest are dropped, they would be stale."""
PULLS_AT_ONCE = 4
PULLS_WAITING = 256
DIALS_AT_ONCE = 8
ENOUGH_PEERS = 3
"""Times the mesh's degree: with more peers than that, only configured addresses are dialled."""
HELLO_EVERY_S = 30.0
QUIET_PER_MINUTE = 60
"""Messages of one signer a minute that carry no group and are passed on."""
STRIKES = 5
BAN_S = 600.0
"""A peer that trips handlers so many times within this time is not let in until the time is over."""
MAX_STRICKEN = 1024
BUSY_QUEUE = 32
"""A neighbour's queue with more messages than this makes the publisher wait."""
PATIENCE_S = 5.0
"""How long the publisher waits for a slow neighbour."""


@dataclass
class Counts:
    """Totals since the process started."""

    published: int = 0
    received: int = 0
    pulled: int = 0
    pull_failures: int = 0
    dropped: int = 0


@dataclass
class Wanted:
    """An announced body that is to be pulled."""

    sender: str
    forwarder: str
    announcement: Announcement
    tries: int = field(default=0)


class Node(INotifee):
    """Ties host, router, admission and dialler together. `deliver` gets (signer's peer id, body) of every admitted group."""

    def __init__(self, config: NodeConfig, guard: PeerGuard, deliver: Callable[[str, bytes], None]) -> None:
        self.config = config
        self.guard = guard
        self.counts = Counts()
        self.step, self.policy = 0, ""
        self._deliver = deliver
        self._host = Host(config.identity, config.options)
        self._own = config.identity.peer_id
        self._topic = topic(config.swarm)
        self._peers_protocol = TProtocol(peers_protocol(config.swarm))
        self._admission = config.rules.build()
        self._held = Held(config.options.held_bytes)
        self._server = Server(self._held, config.options.stream_timeout_s)
        self._router = Router(config.options, guard)
        # Bodies are bounded by ours; a full RPC may pack several of them, as stock neighbours do.
        self._pubsub = Pubsub(
            self._host.host, self._router, strict_signing=True, allowed_topics={self._topic}, max_subscriptions_per_peer=8
        )
        self._pubsub.counter = time.time_ns()  # from seconds, messages after a restart are dropped as seen
        self._pubsub.set_topic_validator(self._topic, self._judge, is_async_validator=False)
        self._rng = random.Random()
        self._dialler = Dialler(self._own, config.options.redial_max_s, self._rng)
        self._outbox: deque[bytes] = deque()
        self._wanted: deque[Wanted] = deque()
        self._outbox_filled, self._wanted_filled, self._dial_now = trio.Event(), trio.Event(), trio.Event()
        self._dialling = 0
        self._quiet: Counter[str] = Counter()
        self._remembered: dict[str, list[str]] = {}
        self._strikes: dict[str, list[float]] = {}
        guard.on_error = self._on_error

    # -- what the parent asks for

    def publish(self, body: bytes) -> None:
        """Queue an own body for the mesh."""
        self._outbox.append(body)
        while len(self._outbox) > OUTBOX_BODIES:
            self._outbox.popleft()
            self.counts.dropped += 1
        self._outbox_filled.set()

    def learn(self, text: str, source: Source) -> None:
        """Take an address to dial; nonsense is ignored."""
        try:
            self._dialler.add(parse_peer(text), source, trio.current_time())
        except AddressError:
            return
        self._dial_now.set()

    def report(self) -> dict[str, Any]:
        """State and totals, as msgpack can carry them."""
        connected = self._host.peers()
        members = {str(peer) for peer in self._pubsub.peer_topics.get(self._topic, ())}
        peers = [peer for peer in connected if peer in members]
        trouble = ""
        if not peers:
            trouble = self._dialler.waiting_for(trio.current_time())
            if connected:
                trouble = f"no peers yet: {len(connected)} connected, but none of them is in this swarm"
        return {
            "peers": peers,
            "mesh": len(self._router.mesh.get(self._topic, ())),
            "addresses": [str(address) for address in self._host.addresses()],
            "published": self.counts.published,
            "received": self.counts.received,
            "pulled": self.counts.pulled,
            "pull_failures": self.counts.pull_failures,
            "dropped": self.counts.dropped,
            "rejections": dict(self._admission.rejections),
            "ignored": dict(self._admission.ignored),
            "confined": dict(self.guard.counts),
            "confined_latest": self.guard.latest,
            "notices": list(self._host.notices),
            "trouble": trouble,
        }

    # -- running

    async def run(self, started: Callable[[], None]) -> None:
        """Listen, join and serve for ever; `started` is called once the sockets are open."""
        self._host.host.set_stream_handler(TProtocol(PULL_PROTOCOL), self._serve_pull)
        self._host.host.set_stream_handler(self._peers_protocol, self._tell_peers)
        self._host.swarm.register_notifee(self)
        async with self._host.run(), background_trio_service(self._pubsub), background_trio_service(self._router):
            await self._pubsub.wait_until_ready()
            subscription = await self._pubsub.subscribe(self._topic)  # before anybody is connected
            for text in self.config.options.peers:
                self.learn(text, Source.CONFIGURED)
            for address in read_peers(self.config.home) if self.config.options.remember else ():
                self._remembered.setdefault(address.peer, []).append(str(address))
                self.learn(str(address), Source.REMEMBERED)
            for text in self.config.known:
                self.learn(text, Source.FOUND)
            started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drain, subscription)
                nursery.start_soon(self._publish_outbox)
                nursery.start_soon(self._dial_for_ever, nursery)
                nursery.start_soon(self._ping_for_ever)
                nursery.start_soon(self._greet_for_ever)
                for _ in range(PULLS_AT_ONCE):
                    nursery.start_soon(self._pull_for_ever)

    async def _drain(self, subscription: Any) -> None:
        # Bodies are taken in the validator; the subscription's 32 places only have to stay free.
        while True:
            await subscription.get()

    # -- gossip in

    def _judge(self, forwarder: ID, message: Any) -> bool:
        """Validate one signed message; what is refused here is neither delivered nor passed on."""
        sender = str(ID(message.from_id))
        if sender == self._own:
            return True
        try:
            opened = self._admission.open(message.data)
            if isinstance(opened, GroupMessage):
                self.counts.received += 1
                self._admission.admit(sender, opened.body)
                self._deliver(sender, opened.body)
                return True
            if isinstance(opened, Announcement):
                self.counts.received += 1
                self._admission.admit_announcement(sender, opened)
                self._want(Wanted(sender, str(forwarder), opened))
                return True
        except Rejected:
            return False
        self._quiet[sender] += 1
        return self._quiet[sender] <= QUIET_PER_MINUTE

    def _want(self, wanted: Wanted) -> None:
        self._wanted.append(wanted)
        if len(self._wanted) > PULLS_WAITING:
            self._wanted.popleft()
            self.counts.dropped += 1
        self._wanted_filled.set()

    # -- gossip out

    async def _publish_outbox(self) -> None:
        while True:
            while not self._outbox:
                self._outbox_filled = trio.Event()
                await self._outbox_filled.wait()
            if not self._router.mesh.get(self._topic):  # published into no mesh, it would be lost
                await trio.sleep(0.05)
                continue
            await self._let_neighbours_catch_up()
            if self._outbox:
                await self._publish(self._outbox.popleft())

    async def _publish(self, body: bytes) -> None:
        if len(body) <= self.config.options.inline_limit:
            message = encode_message(GroupMessage(body))
        else:
            try:
                header = decode_header(body)
            except Rejected as rejected:
                self.counts.dropped += 1
                self.guard.latest = f"own group of {len(body)} bytes cannot be published: {rejected}"
                return
            name = digest(body)
            self._held.add(name, body)
            message = encode_message(Announcement(name, len(body), header.completions, header.tokens, self.policy))
        with self.guard.watch("publish"):
            await self._pubsub.publish(self._topic, message)
            self.counts.published += 1

    async def _let_neighbours_catch_up(self) -> None:
        """Pace bursts: a full queue drops without a word."""
        with trio.move_on_after(PATIENCE_S):
            while True:
                queues = [self._pubsub.peer_queues.get(peer) for peer in self._router.mesh.get(self._topic, ())]
                if all(queue is None or len(queue) < BUSY_QUEUE for queue in queues):
                    return
                await trio.sleep(0.02)

    async def _greet_for_ever(self) -> None:
        while True:
            if self._router.mesh.get(self._topic):
                hello = Hello(self.step, self.policy, self.config.rules.tasks)
                with self.guard.watch("hello"):
                    await self._pubsub.publish(self._topic, encode_message(hello))
            self._quiet.clear()
            await trio.sleep(HELLO_EVERY_S * self._rng.uniform(0.8, 1.2))

    # -- pulls

    async def _serve_pull(self, stream: INetStream) -> None:
        await self._server.serve(stream, str(stream.muxed_conn.peer_id))

    async def _pull_for_ever(self) -> None:
        while True:
            while not self._wanted:
                self._wanted_filled = trio.Event()
                await self._wanted_filled.wait()
            wanted = self._wanted.popleft()
            with self.guard.watch("pull", wanted.sender):
                await self._pull(wanted)

    async def _pull(self, wanted: Wanted) -> None:
        """Fetch a body from its announcer, then from whoever passed the news on, then from other neighbours."""
        announcement = wanted.announcement
        connected = self._host.peers()
        others = [peer for peer in connected if peer not in (wanted.sender, wanted.forwarder)]
        self._rng.shuffle(others)
        for holder in dict.fromkeys([wanted.sender, wanted.forwarder, *others[:3]]):
            if holder not in connected:
                continue
            try:
                body = await self._pull_from(holder, announcement)
            except (PullError, OSError, trio.TooSlowError):
                continue
            except Exception as error:  # noqa: BLE001  # a holder's stream raises whatever its bytes make libp2p raise
                self.guard.confine(error, "pull", holder)
                continue
            self.counts.pulled += 1
            try:
                self._admission.admit(wanted.sender, body)
            except Rejected:
                return
            self._held.add(announcement.digest, body)
            self._deliver(wanted.sender, body)
            return
        wanted.tries += 1
        if wanted.tries < 3:  # a neighbour that passed the news on may still be pulling itself
            await trio.sleep(0.5 * wanted.tries)
            self._want(wanted)
        else:
            self.counts.pull_failures += 1

    async def _pull_from(self, holder: str, announcement: Announcement) -> bytes:
        timeout = self.config.options.stream_timeout_s
        with trio.fail_after(timeout):
            stream = await self._host.host.new_stream(ID.from_string(holder), [TProtocol(PULL_PROTOCOL)])
        done = False
        try:
            body = await fetch(stream, announcement.digest, announcement.size, timeout)
            done = True
            return body
        finally:
            with trio.move_on_after(1) as scope:
                scope.shield = True
                await (stream.close() if done else stream.reset())

    # -- connections

    async def _dial_for_ever(self, nursery: trio.Nursery) -> None:
        while True:
            self._dial_now = trio.Event()
            connected, now = self._host.peers(), trio.current_time()
            free = min(DIALS_AT_ONCE - self._dialling, self.config.options.max_peers - len(connected))
            enough = len(connected) >= ENOUGH_PEERS * self.config.options.degree
            for target in self._dialler.due(now, connected, max(0, free), only_configured=enough):
                self._dialling += 1
                nursery.start_soon(self._dial, target)
            due = self._dialler.next_due(connected)
            pause = 5.0 if due is None else min(5.0, max(0.05, due - now))
            with trio.move_on_after(pause):
                await self._dial_now.wait()

    async def _dial(self, target: Target) -> None:
        try:
            peer = await self._host.dial(target.address)
            self._dialler.succeeded(target, peer, trio.current_time())
        except DialError as error:
            self._dialler.failed(target, str(error), trio.current_time())
        finally:
            self._dialling -= 1
            self._dial_now.set()

    async def _ping_for_ever(self) -> None:
        """A peer that fell silent is noticed here and nowhere else."""
        while True:
            await trio.sleep(self.config.options.ping_s * self._rng.uniform(0.8, 1.2))
            async with trio.open_nursery() as nursery:
                peers = self._host.peers()
                if peers and len(peers) < self.config.options.degree:  # whom do they know by now?
                    nursery.start_soon(self._exchange, self._rng.choice(peers))
                for connection in [c for connections in self._host.swarm.connections.values() for c in connections]:
                    nursery.start_soon(self._ping, connection)

    async def _tell_peers(self, stream: INetStream) -> None:
        asking = str(stream.muxed_conn.peer_id)
        known = [address for peer in self._host.peers() if peer != asking for address in self._remembered.get(peer, ())[:1]]
        self._rng.shuffle(known)
        await tell(stream, known, self.config.options.stream_timeout_s)

    async def _ask_peers(self, peer: str) -> None:
        timeout = self.config.options.stream_timeout_s
        with trio.fail_after(timeout):
            stream = await self._host.host.new_stream(ID.from_string(peer), [self._peers_protocol])
        for text in await ask(stream, timeout):
            self.learn(text, Source.FOUND)
        with trio.move_on_after(1):
            await stream.close()

    async def _ping(self, connection: INetConn) -> None:
        with self.guard.watch("ping", str(connection.muxed_conn.peer_id)):
            await self._host.check(connection)

    def _on_error(self, where: str, peer: str) -> None:
        """Whoever trips a handler is disconnected; if it is honest it comes back, and does not trip again and again."""
        if where == "stream handler" and peer:
            self._strikes[peer] = [*self._strikes.pop(peer, [])[1 - STRIKES :], trio.current_time()]
            if len(self._strikes) > MAX_STRICKEN:
                self._strikes.pop(next(iter(self._strikes)))
            trio.lowlevel.spawn_system_task(partial(self._part, peer))

    def _is_banned(self, peer: str) -> bool:
        strikes = self._strikes.get(peer, [])
        return len(strikes) >= STRIKES and trio.current_time() - strikes[0] < BAN_S

    async def _part(self, peer: str) -> None:
        with self.guard.watch("parting", peer):
            await self._host.drop_peer(peer)

    def _remember(self, peer: str) -> None:
        known = self._host.host.get_peerstore().addrs(ID.from_string(peer))
        addresses = [address for address in map(_direct, known) if address is not None]
        if not addresses:
            return
        self._remembered.pop(peer, None)
        self._remembered[peer] = [str(address.with_peer(peer)) for address in addresses]
        for address in addresses:
            self._dialler.add(address.with_peer(peer), Source.REMEMBERED, trio.current_time())
        if self.config.options.remember:
            write_peers(self.config.home, self._remembered)

    # -- INotifee

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        peer = str(conn.muxed_conn.peer_id)
        if self._is_banned(peer):
            trio.lowlevel.spawn_system_task(partial(self._part, peer))
            return
        trio.lowlevel.spawn_system_task(partial(self._remember_later, peer))

    async def _remember_later(self, peer: str) -> None:
        # Its addresses come with its first message on the mesh.
        with self.guard.watch("remember", peer):
            for _ in range(50):
                await trio.sleep(0.1)
                if peer not in self._host.peers():
                    return
                if self._host.host.get_peerstore().get_peer_record(ID.from_string(peer)) is not None:
                    self._remember(peer)
                    break
        await self._exchange(peer)

    async def _exchange(self, peer: str) -> None:
        with self.guard.watch("peer exchange", peer):
            await self._ask_peers(peer)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        peer, now = str(conn.muxed_conn.peer_id), trio.current_time()
        if peer in self._host.peers():
            return
        self._dialler.lost(peer, now)
        with self.guard.watch("forget", peer):
            self._host.forget(peer)
        if not self._host.peers():
            self._dialler.isolated(now)
        self._dial_now.set()

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        return

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        return

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        return

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        return


def _direct(multiaddr: Multiaddr) -> Address | None:
    try:
        address = parse_address(str(multiaddr))
    except AddressError:
        return None
    return None if address.is_any or address.port == 0 else address
