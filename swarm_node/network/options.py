"""Options of the network."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator
from swarm_protocols.limits import DEFAULT_LIMITS

from swarm_node.network.addresses import Address, check_free, parse_address, parse_dialable, parse_listening, parse_peer, parse_with_peer
from swarm_node.options import Options, constant

DEFAULT_PORT = 31310
"""TCP port of the gossip host."""
DEFAULT_DIRECTORY_PORT = 31311

_CHECKS = {"listen": parse_listening, "directory_listen": parse_listening, "peers": parse_peer, "directory_peers": parse_with_peer}


class NetworkOptions(Options):
    """`[network]`: who this node talks to, and how much it takes from others."""

    listen: tuple[str, ...] = ()
    """Multiaddrs to listen on, port 0 for any; one that cannot be had is an error. Empty: port 31310 on every interface, or another port
    where that is taken, which the node shows."""
    announce: tuple[str, ...] = ()
    """Multiaddrs that others should dial, when the node cannot see them itself: behind a forwarded port, or a container's name."""
    peers: tuple[str, ...] = ()
    """Multiaddrs of nodes to join, with /p2p/PEER-ID. After a host name it may be missing: the peer id is then learned from whoever
    answers there, which suits containers that know each other by name and protects from nothing."""
    directory: bool = True
    """Run the hivemind DHT directory, by which nodes of one swarm find each other."""
    directory_listen: str = ""
    """Multiaddr the directory listens on, by the same rule. Empty: port 31311 on every interface, or another one."""
    directory_announce: tuple[str, ...] = ()
    """Multiaddrs that other directories should dial, when this one cannot see them itself."""
    directory_peers: tuple[str, ...] = ()
    """Multiaddrs of other nodes' directories, with /p2p/PEER-ID."""
    remember: bool = constant(True)
    """Keep the addresses of peers in the home folder and dial them at the next start."""
    max_peers: int = Field(64, ge=1, le=1000)
    """Connections to keep at most."""
    degree: int = constant(4, ge=1, le=16)
    """Neighbours in the gossip mesh. Measured: 8 nodes at degree 4 and 16 nodes at degree 3 deliver everything."""
    heartbeat_s: float = constant(1.0, ge=0.1, le=30)
    """Seconds between repairs of the mesh. py-libp2p's own default is 120."""
    inline_limit: int = constant(DEFAULT_LIMITS.inline_bytes, ge=1, le=DEFAULT_LIMITS.inline_bytes)
    """Bytes of the largest body that travels inside a gossip message; larger ones are announced and pulled, which costs less."""
    held_bytes: int = constant(128 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of large bodies kept so that peers can pull them; the oldest go first."""
    inbox_bodies: int = constant(2048, ge=1)
    """Bodies that wait for the learner at most; the oldest are dropped and counted."""
    inbox_bytes: int = constant(256 * 1024 * 1024, ge=1024 * 1024)
    """Bytes of bodies that wait for the learner at most."""
    stream_timeout_s: float = constant(10.0, ge=0.5, le=120)
    """Seconds that a peer may stay silent in the middle of an answer."""
    ping_s: float = constant(10.0, ge=0.2, le=300)
    """Seconds between two questions to each peer whether it is still there; one that stays silent for 5 s is disconnected."""
    redial_max_s: float = constant(60.0, ge=1)
    """Longest pause between two attempts to reach a known peer or directory; attempts never end."""

    @field_validator("listen", "announce", "peers", "directory_listen", "directory_announce", "directory_peers")
    @classmethod
    def _check_addresses(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        field = info.field_name or ""
        check = _CHECKS.get(field, parse_dialable)
        for text in filter(None, (value,)) if isinstance(value, str) else value:
            check(text)
        return value

    @property
    def host_addresses(self) -> list[Address]:
        """Where the gossip host listens."""
        return [parse_address(text) for text in self.listen or (f"/ip4/0.0.0.0/tcp/{DEFAULT_PORT}",)]

    @property
    def directory_address(self) -> Address:
        """Where the directory listens."""
        return parse_address(self.directory_listen or f"/ip4/0.0.0.0/tcp/{DEFAULT_DIRECTORY_PORT}")

    def check_listening(self) -> None:
        """Whether the addresses that were asked for can be listened on, now and here. Raises ListenError."""
        asked_for = (*self.listen, self.directory_listen) if self.directory else self.listen
        check_free([parse_address(text) for text in asked_for if text])
