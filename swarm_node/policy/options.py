"""Options of the policy: which model a node trains, how it is held, and the error that says why it cannot be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swarm_node.options import Options, constant


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


class ModelError(ValueError):
    """The model cannot be had or held as asked: unknown, not pulled, damaged, too large. The message says what to do."""
