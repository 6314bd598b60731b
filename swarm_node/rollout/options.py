"""Options of the rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swarm_node.options import Options


class RolloutOptions(Options):
    """`[rollout]`: how groups are sampled."""

    engine: Literal["reference"] = "reference"
    """Which engine samples; `reference` is dense and simple, and judges every other."""
    prompts_per_step: int = Field(4, ge=1, le=1024)
    """Groups sampled in one step."""
    max_new_tokens: int = Field(192, ge=1, le=32768)
    """Token limit of a completion; one that reaches it finishes as `length`."""
    temperature: float = Field(1.0, ge=0.05, le=4)
    """Sampling temperature; log-probs describe the tempered distribution. Peers refuse groups below 0.05."""
    max_batch: int = Field(128, ge=1)
    """Completions decoded together at most; larger steps are sampled in several batches."""
