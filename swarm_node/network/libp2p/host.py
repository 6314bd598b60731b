"""The libp2p host: Noise over TCP and nothing else, limits set, every socket's address known."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig
from libp2p.network.health.ping_probe import ping_connection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from swarm_node.network.addresses import Address, ListenError, dialable, free_addresses, parse_address
from swarm_node.network.identity import Identity
from swarm_node.network.options import NetworkOptions

DIAL_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 5.0


class DialError(RuntimeError):
    """An address could not be dialled; the message says why."""


class Host:
    """One libp2p host, listening."""

    def __init__(self, identity: Identity, options: NetworkOptions) -> None:
        self._announce = tuple(parse_address(text) for text in options.announce)
        self._listen, self._may_move = options.host_addresses, not options.listen
        pair = create_new_key_pair(identity.seed)
        noise = Noise(pair, noise_privkey=create_noise_key_pair().private_key)
        self.host: IHost = new_host(
            key_pair=pair,
            sec_opt={NOISE: noise},  # without it the host also accepts plaintext
            muxer_opt={TProtocol(YAMUX): Yamux},
            negotiate_timeout=int(DIAL_TIMEOUT_S),
            connection_config=ConnectionConfig(
                max_connections=options.max_peers,
                min_connections=0,
                low_watermark=0,  # the stock auto-connector never dials; the dialler does
                high_watermark=options.max_peers,
                inbound_upgrade_timeout=DIAL_TIMEOUT_S,
                outbound_upgrade_timeout=DIAL_TIMEOUT_S,
            ),
            addrs_factory=lambda candidates: [Multiaddr(address.transport) for address in self._advertised(candidates)],
            disable_identify_address_discovery=True,
        )
        network = self.host.get_network()
        assert isinstance(network, Swarm)
        self.swarm = network
        self.swarm.set_resource_manager(None)  # its memory and rate guesses refuse honest peers; the bounds are ours
        self.swarm.retry_config.max_retries = 0  # back-off is the dialler's
        self.peer_id = identity.peer_id
        self.notices: tuple[str, ...] = ()
        """Sentences about listening addresses that are not as wanted."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Listen, and serve until the context ends. The default port is replaced by any other where it is taken.

        Raises:
            ListenError: an address that was asked for cannot be had.
        """
        wanted, self.notices = free_addresses(self._listen) if self._may_move else (self._listen, ())
        async with self.host.run([Multiaddr(address.transport) for address in wanted]):
            bound = {address.port for address in self.bound()}
            missing = [address.transport for address in wanted if address.port not in bound and (address.port or not bound)]
            if missing and not self._may_move:  # it was free a moment ago
                raise ListenError(f"cannot listen on {', '.join(missing)}")
            if missing:
                await self.swarm.listen(*(Multiaddr(Address(address.kind, address.host, 0).transport) for address in wanted))
            yield

    def bound(self) -> list[Address]:
        """The sockets this host listens on."""
        return [parse_address(str(address)) for address in self.host.get_transport_addrs()]

    def addresses(self) -> list[Address]:
        """What others dial, with the peer id."""
        return [address.with_peer(self.peer_id) for address in self._advertised(self.host.get_transport_addrs())]

    def _advertised(self, candidates: Sequence[Multiaddr]) -> list[Address]:
        if self._announce:
            return list(self._announce)
        found = [address for candidate in candidates for address in dialable(parse_address(str(candidate)))]
        others = [address for address in found if not address.is_loopback]
        return others or found

    def peers(self) -> list[str]:
        """Peer ids that are connected now."""
        return [
            str(peer) for peer, connections in self.swarm.connections.items() if any(not connection.is_closed for connection in connections)
        ]

    async def dial(self, address: Address) -> str:
        """Connect to an address and return the peer id behind it. Raises DialError."""
        reason = f"{address.host} has no address"
        for resolved in await _resolve(address):
            try:
                with trio.fail_after(2 * DIAL_TIMEOUT_S):
                    return await self._dial_resolved(resolved)
            except trio.TooSlowError:
                reason = f"no answer from {resolved.transport} in {2 * DIAL_TIMEOUT_S:.0f} s"
            except Exception as error:  # noqa: BLE001  # libp2p raises whatever its transports, Noise and the peer's bytes make it raise
                reason = _reason(error)
        raise DialError(reason)

    async def _dial_resolved(self, address: Address) -> str:
        peer = address.peer or await self._learn(address)
        if peer != self.peer_id and peer not in self.peers():
            await self.swarm.dial_addr(Multiaddr(address.transport), ID.from_string(peer))
        return peer

    async def _learn(self, address: Address) -> str:
        """Shake hands with whoever answers, to learn the peer id that a dial needs beforehand."""
        transport = self.swarm.transport_manager.transport_for_dialing(Multiaddr(address.transport))
        if transport is None:
            raise DialError(f"no transport for {address.transport}")
        raw = await transport.dial(Multiaddr(address.transport))
        try:
            secured = await self.swarm.upgrader.security_multistream.secure_outbound(raw, None)  # type: ignore[arg-type]
            return str(secured.get_remote_peer())
        finally:
            await raw.close()

    async def check(self, connection: INetConn) -> bool:
        """Whether the other side still answers; a connection that does not is closed."""
        result = await ping_connection(connection, ping_timeout=PING_TIMEOUT_S)
        if result.success or connection.is_closed:
            return True
        await self.drop(connection)
        return False

    async def drop(self, connection: INetConn) -> None:
        """Close a connection, whether or not its peer still reads."""
        with trio.move_on_after(2) as scope:
            await connection.close()
        if scope.cancelled_caught:  # a writer is stuck in it: closing the socket frees the writer
            with trio.move_on_after(2):
                await connection.muxed_conn.secured_conn.close()  # type: ignore[attr-defined]

    async def drop_peer(self, peer: str) -> None:
        """Close every connection to a peer."""
        for connection in list(self.swarm.connections.get(ID.from_string(peer), [])):
            await self.drop(connection)

    def forget(self, peer: str) -> None:
        """Let go of what libp2p keeps of a peer that left: a megabyte of addresses, if it sent that."""
        self.host.get_peerstore().clear_peerdata(ID.from_string(peer))


async def _resolve(address: Address) -> list[Address]:
    """The addresses behind a name, as this machine's resolver knows them: hosts file and container networks included."""
    if not address.is_name:
        return [address]
    family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(address.kind, socket.AF_UNSPEC)
    try:
        with trio.fail_after(DIAL_TIMEOUT_S):
            entries = await trio.socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)
    except OSError as error:
        raise DialError(f"the name {address.host} is not known here: {error.strerror}") from None
    except trio.TooSlowError:
        raise DialError(f"the name {address.host} could not be resolved in {DIAL_TIMEOUT_S:.0f} s") from None
    kinds = {socket.AF_INET: "ip4", socket.AF_INET6: "ip6"}
    return [Address(kinds[entry[0]], str(entry[4][0]), address.port, address.peer) for entry in entries if entry[0] in kinds]


def _reason(error: BaseException) -> str:
    """The innermost reason of a chain of wrapped errors, which is the one that helps."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error
    return f"{error}" or type(error).__name__
