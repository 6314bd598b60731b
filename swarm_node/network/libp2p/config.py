"""Everything that the network process is started with."""

from __future__ import annotations

from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.children.config import ChildConfig


class MeshConfig(ChildConfig):
    """What the directory knows as well, and how to judge groups."""

    rules: AdmissionRules
    known: tuple[str, ...] = ()
    """Addresses that the directory found before."""
