"""Options of the policy: which model a node trains, and how it is held."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator

from swarm_node.options import Options, absolute, constant
from swarm_node.policy import catalogue


class ModelOptions(Options):
    """`[model]`: the policy that this node trains."""

    name: str = Field("auto", min_length=1)
    """A named model (`swarm-node model list`), a local folder, a hub id (`owner/name`), or `auto`: a named model that fits the hardware."""
    lora: bool = False
    """Train low-rank adapters on all linear layers and freeze the model's own weights (arXiv 2106.09685); otherwise train every weight."""
    lora_rank: int = Field(16, ge=1, le=1024)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    lora_seed: int = constant(0, ge=0)
    """Seed of the adapters' initial values."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the model's weights; `auto` chooses by device, memory and what is trained, and says why. Adapters are always float32."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps|xpu(:\d+)?)$")
    """Where the model lives: `cpu`, `cuda`, `cuda:1`, `mps`, `xpu`, or `auto`: an accelerator that works, else the CPU."""

    @field_validator("name")
    @classmethod
    def _make_absolute(cls, name: str) -> str:
        return absolute(name) if name not in ("auto", *catalogue.names()) and os.path.isdir(absolute(name)) else name
