"""Options of admission."""

from __future__ import annotations

from pydantic import Field

from swarm_node.options import Options, constant


class AdmissionOptions(Options):
    """`[admission]`: how much a node takes from one sender, and how much it remembers of what came before.

    The quotas are bounds against floods: far above what an honest sender makes, far below what hurts.
    """

    groups_per_minute: int = Field(3000, ge=1)
    """Groups of one sender a minute; as many may come at once."""
    tokens_per_minute: int = Field(8_000_000, ge=1)
    """Completion tokens of one sender a minute. A group above it never fits: keep it above the largest group to be taken."""
    bytes_per_minute: int = Field(32 * 1024 * 1024, ge=1024)
    """Bytes of one sender's bodies a minute. A body above it never fits."""
    staleness_steps: int = Field(64, ge=0)
    """How many policy steps a group may lie behind the newest one of the same sender. Nodes are not compared with each other: a peer
    that started later is not stale."""
    reorder_window: int = constant(64, ge=1, le=4096)
    """Newest groups of a sender whose sequence numbers are remembered: one that is taken or below all of them is a replay, unless so many
    arrive that the sender must have begun to count anew. A sender that went back to an old checkpoint is taken again when this many have
    arrived."""
    senders: int = constant(4096, ge=1)
    """Senders tracked at most; the one not heard of for longest is forgotten."""
    digests: int = constant(65_536, ge=1)
    """Digests of admitted bodies remembered at most, by which the same body is known again."""
    digests_per_sender: int = constant(4096, ge=1)
    """The part of them that one sender can fill."""
    completions: int = constant(65_536, ge=1)
    """Hashes of admitted completions remembered at most, by which copies are known."""
