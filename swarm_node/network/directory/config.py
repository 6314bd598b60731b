"""Everything that the directory process is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_node.network.identity import Identity
from swarm_node.network.options import NetworkOptions


@dataclass(frozen=True)
class DirectoryConfig:
    """Travels as one frame."""

    identity: Identity
    swarm: str
    home: Path
    options: NetworkOptions

    def to_plain(self) -> dict[str, Any]:
        """As msgpack can carry it."""
        return {"seed": self.identity.seed, "swarm": self.swarm, "home": str(self.home), "options": self.options.model_dump()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DirectoryConfig:
        """The inverse of `to_plain`."""
        return cls(Identity(plain["seed"]), plain["swarm"], Path(plain["home"]), NetworkOptions(**plain["options"]))
