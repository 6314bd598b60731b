"""Which swarm a node is in: nodes that could not use each other's groups never meet."""

from __future__ import annotations

import hashlib
import json

from swarm_protocols.messages import PROTOCOL_MAJOR


def swarm_id(name: str, task_suite: str, tokenizer_fingerprint: str, protocol_major: int = PROTOCOL_MAJOR) -> str:
    """32 hex digits over everything that two nodes must share to learn from each other.

    Args:
        name: the swarm's name, as the user chose it.
        task_suite: names the tasks and their settings; nodes with others could not regenerate a prompt.
        tokenizer_fingerprint: nodes with another tokenizer read other text from the same ids.
        protocol_major: nodes of another major could not read a message.
    """
    canonical = json.dumps([name, task_suite, tokenizer_fingerprint, protocol_major], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(b"swarm-node swarm\0" + canonical.encode()).hexdigest()[:32]


def topic(swarm: str) -> str:
    """The gossip topic of a swarm."""
    return f"/swarm-node/{swarm}/groups/1"
