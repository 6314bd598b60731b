"""Options of the task."""

from __future__ import annotations

from pydantic import Field, field_validator

from swarm_node.options import Options, absolute


class TaskOptions(Options):
    """`[task]`: what the node trains on. Nodes of one swarm use one task and one seed."""

    name: str = Field("chain-sum", min_length=1, max_length=4096)
    """The task as `load_task` accepts it: `chain-sum`, `chain-sum:LEVEL`, `gsm8k:PATH`, `reasoning-gym:NAME`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the problem stream; every peer regenerates prompts from it."""

    @field_validator("name")
    @classmethod
    def _make_absolute(cls, name: str) -> str:
        kind, _, path = name.partition(":")
        return f"{kind}:{absolute(path)}" if kind == "gsm8k" and path else name
