"""Options of sparse decoding."""

from __future__ import annotations

import os

from pydantic import Field, field_validator

from swarm_node.options import Options, absolute


class SparsityOptions(Options):
    """`[sparsity]`: how much of the cache a decode step reads (Sparrow, arXiv 2606.08446)."""

    schedule: str = Field("auto", min_length=1)
    """Pages by position: `auto` (the home folder's calibrated schedule, else one known for the model, else a careful start for the closed
    loop), `dense`, a known one such as `qwen3-1.7b@0.86`, or the path of a schedule's JSON file."""
    threshold: float = Field(0.86, gt=0, lt=1)
    """What the 5th percentile of acceptance is held at; training collapses below about 0.75. With DistillSparse 0.80 is enough."""
    closed_loop: bool = True
    """Measure acceptance while training and move the schedule to hold the threshold; otherwise the schedule stays as it was chosen."""
    observed_completions: int = Field(1, ge=1, le=64)
    """Completions of a step that are rescored densely for that; each costs one forward pass."""

    @field_validator("schedule")
    @classmethod
    def _make_absolute(cls, schedule: str) -> str:
        return absolute(schedule) if schedule not in ("auto", "dense") and os.path.isfile(absolute(schedule)) else schedule
