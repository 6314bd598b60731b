"""Connections of the network process: dialled for ever, checked, remembered, exchanged, and refused to who misbehaves."""

from __future__ import annotations

import random
from functools import partial

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarm_node.network.addresses import Address, AddressError, parse_address, parse_peer
from swarm_node.network.libp2p.config import MeshConfig
from swarm_node.network.libp2p.dialler import Dialler, Source, Target
from swarm_node.network.libp2p.exchange import ask, peers_protocol, tell
from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.host import DialError, Host
from swarm_node.network.libp2p.peers_file import read_peers, write_peers

DIALS_AT_ONCE = 8
ENOUGH_PEERS = 3
"""Times the mesh's degree: with more peers than that, only configured addresses are dialled."""
STRIKES = 5
BAN_S = 600.0
"""A peer that trips handlers so many times within this time is not let in until the time is over."""
MAX_STRICKEN = 1024
RECORD_WAIT_S = 5.0
"""How long a new peer may take to send its own addresses."""


class Connections(INotifee):
    """Whom this node is connected to, and whom it would like to be."""

    def __init__(self, host: Host, config: MeshConfig, guard: PeerGuard, rng: random.Random) -> None:
        self._host = host
        self._options = config.options
        self._home = config.home
        self._guard = guard
        self._rng = rng
        self._protocol = TProtocol(peers_protocol(config.swarm))
        self._dialler = Dialler(config.identity.peer_id, config.options.redial_max_s, rng)
        self._dialling = 0
        self._dial_now = trio.Event()
        self._remembered: dict[str, list[str]] = {}
        self._strikes: dict[str, list[float]] = {}
        host.swarm.register_notifee(self)
        host.host.set_stream_handler(self._protocol, self._tell)
        guard.on_error = self._on_error
        for text in config.options.peers:
            self.learn(text, Source.CONFIGURED)
        for address in read_peers(config.home) if config.options.remember else ():
            self._remembered.setdefault(address.peer, []).append(str(address))
            self.learn(str(address), Source.REMEMBERED)
        for text in config.known:
            self.learn(text, Source.FOUND)

    def learn(self, text: str, source: Source) -> None:
        """Take an address to dial; nonsense is ignored."""
        try:
            self._dialler.add(parse_peer(text), source, trio.current_time())
        except AddressError:
            return
        self._dial_now.set()

    def waiting_for(self) -> str:
        """In words what is being dialled, for a node that has no peer."""
        return self._dialler.waiting_for(trio.current_time())

    async def run(self) -> None:
        """Dial and check for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._check_for_ever)
            await self._dial_for_ever(nursery)

    # -- dialling

    async def _dial_for_ever(self, nursery: trio.Nursery) -> None:
        while True:
            self._dial_now = trio.Event()
            connected, now = self._host.peers(), trio.current_time()
            free = min(DIALS_AT_ONCE - self._dialling, self._options.max_peers - len(connected))
            enough = len(connected) >= ENOUGH_PEERS * self._options.degree
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

    # -- checking

    async def _check_for_ever(self) -> None:
        """A peer that fell silent is noticed here and nowhere else."""
        while True:
            await trio.sleep(self._options.ping_s * self._rng.uniform(0.8, 1.2))
            async with trio.open_nursery() as nursery:
                peers = self._host.peers()
                if peers and len(peers) < self._options.degree:  # whom do they know by now?
                    nursery.start_soon(self._ask, self._rng.choice(peers))
                for connection in [c for connections in self._host.swarm.connections.values() for c in connections]:
                    nursery.start_soon(self._check, connection)

    async def _check(self, connection: INetConn) -> None:
        with self._guard.watch("ping", str(connection.muxed_conn.peer_id)):
            await self._host.check(connection)

    # -- peer exchange and memory

    async def _tell(self, stream: INetStream) -> None:
        asking = str(stream.muxed_conn.peer_id)
        known = [address for peer in self._host.peers() if peer != asking for address in self._remembered.get(peer, ())[:1]]
        self._rng.shuffle(known)
        await tell(stream, known, self._options.stream_timeout_s)

    async def _ask(self, peer: str) -> None:
        timeout = self._options.stream_timeout_s
        with self._guard.watch("peer exchange", peer):
            with trio.fail_after(timeout):
                stream = await self._host.host.new_stream(ID.from_string(peer), [self._protocol])
            for text in await ask(stream, timeout):
                self.learn(text, Source.FOUND)
            with trio.move_on_after(1):
                await stream.close()

    async def _welcome(self, peer: str) -> None:
        """Note the addresses of a new peer, which come with its first message on the mesh, and ask it for others."""
        with self._guard.watch("remember", peer), trio.move_on_after(RECORD_WAIT_S):
            while self._host.host.get_peerstore().get_peer_record(ID.from_string(peer)) is None:
                await trio.sleep(0.1)
            self._remember(peer)
        if peer in self._host.peers():
            await self._ask(peer)

    def _remember(self, peer: str) -> None:
        known = self._host.host.get_peerstore().addrs(ID.from_string(peer))
        addresses = [address.with_peer(peer) for address in map(_direct, known) if address is not None]
        if not addresses:
            return
        self._remembered.pop(peer, None)  # the newest come last, and are kept longest
        self._remembered[peer] = [str(address) for address in addresses]
        for address in addresses:
            self._dialler.add(address, Source.REMEMBERED, trio.current_time())
        if self._options.remember:
            write_peers(self._home, self._remembered)

    # -- misbehaviour

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
        with self._guard.watch("parting", peer):
            await self._host.drop_peer(peer)

    # -- INotifee

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """A connection opened, whoever dialled."""
        peer = str(conn.muxed_conn.peer_id)
        trio.lowlevel.spawn_system_task(partial(self._part if self._is_banned(peer) else self._welcome, peer))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """A connection closed; only the last one of a peer matters."""
        peer, now = str(conn.muxed_conn.peer_id), trio.current_time()
        left = self._host.peers()
        if peer in left:
            return
        self._dialler.lost(peer, now)
        with self._guard.watch("forget", peer):
            self._host.forget(peer)
        if not left:
            self._dialler.isolated(now)
        self._dial_now.set()

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        """Of no interest."""

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        """Of no interest."""

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Of no interest."""

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Of no interest."""


def _direct(multiaddr: Multiaddr) -> Address | None:
    try:
        address = parse_address(str(multiaddr))
    except AddressError:
        return None
    return None if address.is_any or address.port == 0 else address
