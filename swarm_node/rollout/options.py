"""Options of the rollout, and of how much of its cache it reads."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator

from swarm_node.options import Options, absolute, constant


class RolloutOptions(Options):
    """`[rollout]`: how groups are sampled."""

    engine: Literal["sparse", "reference", "vllm"] = "sparse"
    """Which engine samples: `sparse` pages its cache and reads what its schedule allows; `reference` is dense and simple, and judges every
    other; `vllm` is dense and needs vLLM in the same environment."""
    prompts_per_step: int = Field(4, ge=1, le=1024)
    """Groups sampled in one step."""
    max_new_tokens: int = Field(192, ge=1, le=32768)
    """Token limit of a completion; one that reaches it finishes as `length`."""
    temperature: float = Field(1.0, ge=0.05, le=4)
    """Sampling temperature; log-probs describe the tempered distribution. Peers refuse groups below 0.05."""
    max_batch: int = Field(128, ge=1)
    """Completions decoded together at most; others wait for a place."""
    prefill_tokens: int = constant(1024, ge=16)
    """Prompt tokens that the sparse engine computes between two decode steps at most."""
    cache_gib: float | None = Field(None, gt=0)
    """Memory of the sparse engine's KV cache at most, in GiB; unset: 40 % of what is free. What a step cannot use is not taken."""


class SparsityOptions(Options):
    """`[sparsity]`: how much of the cache a decode step reads (Sparrow, arXiv 2606.08446)."""

    schedule: str = Field("auto", min_length=1)
    """Pages by position: `auto` (the home folder's calibrated schedule, else one known for the model, else a careful start for the closed
    loop), `dense`, a known one such as `qwen3-1.7b@0.86`, or the path of a schedule's JSON file."""
    threshold: float = Field(0.86, gt=0, lt=1)
    """What the 5th percentile of acceptance is held at; training collapses below about 0.75. With DistillSparse 0.80 is enough."""
    closed_loop: bool = True
    """Measure acceptance while training and move the schedule to hold the threshold; otherwise the schedule stays as it was chosen."""
    observed_completions: int = constant(1, ge=1, le=64)
    """Completions of a step that are rescored densely for that; each costs one forward pass."""

    @field_validator("schedule")
    @classmethod
    def _make_absolute(cls, schedule: str) -> str:
        return absolute(schedule) if schedule not in ("auto", "dense") and os.path.isfile(absolute(schedule)) else schedule
