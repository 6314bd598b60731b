"""What children are started with crosses the pipe as it is, and keeps its secret."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.children.config import ChildConfig
from swarm_node.network.children.frames import pack_frame, unpack_frame
from swarm_node.network.identity import Identity
from swarm_node.network.libp2p.config import MeshConfig
from swarm_node.network.options import NetworkOptions

SEED = bytes(range(224, 256))  # not UTF-8
OPTIONS = NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), redial_max_s=math.inf, degree=7)
RULES = AdmissionRules(("chain-sum", "gsm8k"), 2**63, AdmissionOptions(senders=5), shared_problems=True)
MESH = MeshConfig(identity=Identity(SEED), swarm="s", options=OPTIONS, home=Path("/home/Zoë"), rules=RULES, known=("/ip4/192.0.2.1/tcp/1",))


@pytest.mark.parametrize("config", [MESH, ChildConfig(identity=Identity(SEED), swarm="s", options=OPTIONS, home=Path("/h"))])
def test_a_configuration_crosses_the_pipe(config: ChildConfig) -> None:
    _, dumped = unpack_frame(pack_frame("start", config.model_dump())[4:])
    again = type(config).model_validate(dumped)
    assert again == config
    assert (again.identity.peer_id, type(again.home)) == (Identity(SEED).peer_id, type(config.home))


def test_the_seed_shows_neither_in_a_representation_nor_in_an_error() -> None:
    assert repr(SEED)[2:20] not in repr(MESH)
    with pytest.raises(ValidationError) as caught:
        MeshConfig.model_validate({**MESH.model_dump(), "identity": {"seed": SEED[:-1]}, "swarm": None})
    assert "an identity's seed has 32 bytes, not 31" in str(caught.value)
    assert repr(SEED)[2:20] not in str(caught.value)
