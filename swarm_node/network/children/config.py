"""What every child of the network is started with: travels as one frame, `model_dump` to `model_validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer

from swarm_node.network.identity import Identity
from swarm_node.network.options import NetworkOptions


class ChildConfig(BaseModel):
    """Dumped, it holds the secret seed; its representation and its errors do not show it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    identity: Identity
    swarm: str
    options: NetworkOptions
    home: Annotated[Path, PlainSerializer(str)]
