"""Options of the task."""

from __future__ import annotations

from pydantic import Field

from swarm_node.options import Options


class TaskOptions(Options):
    """`[task]`: what the node trains on. Nodes of one swarm use one task and one seed."""

    name: str = Field("chain-sum", min_length=1, max_length=256)
    """The task as `load_task` accepts it: `chain-sum`, `chain-sum:LEVEL`, `gsm8k:PATH`, `reasoning-gym:NAME`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the problem stream; every peer regenerates prompts from it."""
