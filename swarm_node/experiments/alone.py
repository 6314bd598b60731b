"""A network with nobody on it: what a node that trains alone publishes goes nowhere."""

from __future__ import annotations

from swarm_node.network.gossip import NetworkReport, Received


class Nobody:
    """A `Gossip` without peers, sockets or cost."""

    def publish(self, body: bytes) -> None:
        """Nobody hears it."""

    def drain(self) -> list[Received]:
        return []

    def progress(self, step: int, policy: str) -> None:
        """Nobody asks."""

    def report(self) -> NetworkReport:
        return NetworkReport()

    def close(self) -> None:
        """Nothing is open."""
