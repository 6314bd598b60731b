"""Everything that the network process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.identity import Identity
from swarm_node.network.options import NetworkOptions


@dataclass(frozen=True)
class NodeConfig:
    """Travels as one frame."""

    identity: Identity
    swarm: str
    options: NetworkOptions
    rules: AdmissionRules
    home: Path
    name: str = ""
    known: tuple[str, ...] = ()
    """Addresses that the directory found before."""

    def to_plain(self) -> dict[str, Any]:
        """As msgpack can carry it."""
        return {
            "seed": self.identity.seed,
            "swarm": self.swarm,
            "options": self.options.model_dump(),
            "rules": self.rules.to_plain(),
            "home": str(self.home),
            "name": self.name,
            "known": list(self.known),
        }

    def with_known(self, known: tuple[str, ...]) -> NodeConfig:
        """The same with other addresses known."""
        return replace(self, known=known)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> NodeConfig:
        """The inverse of `to_plain`."""
        return cls(
            Identity(plain["seed"]),
            plain["swarm"],
            NetworkOptions(**plain["options"]),
            AdmissionRules.from_plain(plain["rules"]),
            Path(plain["home"]),
            plain["name"],
            tuple(plain["known"]),
        )
