"""What the node needs from a network: publish a group's body, drain what peers sent. Real and simulated networks both do this,
and `Nobody` does for a node that trains alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Received:
    """A group body that passed the cheap half of admission."""

    sender: str
    """The verified signer's peer id: taken from the transport, never from the payload."""
    body: bytes


@dataclass(frozen=True)
class NetworkReport:
    """The network as it is now, for the step line, `status` and metrics."""

    peers: int = 0
    """Peers connected now."""
    addresses: tuple[str, ...] = ()
    """Multiaddrs that others can dial, with the peer id."""
    published: int = 0
    received: int = 0
    """Messages with a group that arrived from peers, before any check."""
    dropped: int = 0
    """Bodies dropped because the inbox was full."""
    restarts: int = 0
    """How often the network's processes were restarted."""
    rejections: Mapping[str, int] = field(default_factory=dict)
    """Reject reason -> count, of the cheap half of admission."""
    trouble: str = ""
    """What is wrong now, in words, or empty: "no peers yet: dialling ...", "network process restarting in 4 s"."""
    directory_addresses: tuple[str, ...] = ()
    """Multiaddrs of this node's directory, by which others' directories join it; empty where none runs."""
    peer_ids: tuple[str, ...] = ()
    """Peers connected now."""
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Why messages were ignored without anybody's fault -> count."""
    confined: Mapping[str, int] = field(default_factory=dict)
    """Where a peer's bytes raised an error that was confined to it -> count."""
    notices: tuple[str, ...] = ()
    """What the user should know and need not act on: "port 31310 is taken on this machine, so another one is used"."""


class Gossip(Protocol):
    """A swarm seen from one node. No method blocks for longer than a few milliseconds or raises because of a peer."""

    def publish(self, body: bytes) -> None:
        """Send an encoded group to every peer, best effort."""

    def drain(self) -> list[Received]:
        """Everything that arrived since the last call, oldest first."""

    def progress(self, step: int, policy: str) -> None:
        """Tell the network which step the node is at: what it announces, and against which staleness is judged."""

    def report(self) -> NetworkReport:
        """Counters and state."""

    def close(self) -> None:
        """Leave the swarm and free processes and sockets; idempotent."""


class Nobody:
    """A `Gossip` without peers, sockets or cost."""

    def publish(self, body: bytes) -> None:
        """Nobody hears it."""

    def drain(self) -> list[Received]:
        """Nobody sends."""
        return []

    def progress(self, step: int, policy: str) -> None:
        """Nobody asks."""

    def report(self) -> NetworkReport:
        """All zeros, and no trouble."""
        return NetworkReport()

    def close(self) -> None:
        """Nothing is open."""
