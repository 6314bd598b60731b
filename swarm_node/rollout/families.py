"""Which architectures the model runner can walk, and what it reads of each decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from swarm_kernels.layout import HEAD_SIZES, MAX_GROUP
from torch import Tensor, nn

from swarm_node.policy.parts import unwrap

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""`model_type` of the families whose layers are norm, attention, norm, gated MLP. SmolLM and SmolLM2 are of type `llama`."""
ROTARY = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone."""


class Unsupported(ValueError):
    """The model runner cannot walk this model; the message says why. The reference engine can."""


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm: its weight is read at every use, so it follows the policy's updates."""

    module: Any
    epsilon: float

    @property
    def weight(self) -> Tensor:
        """(H,)"""
        weight: Tensor = self.module.weight
        return weight


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer: the policy's own modules, and the facts of its attention."""

    input_norm: Norm
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    query_norm: Norm | None
    key_norm: Norm | None
    middle_norm: Norm
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    scale: float
    window: int
    """Tokens that a sliding window sees; 0: all."""
    rotary: bool
    """Whether keys and queries are rotated; some layers of SmolLM3 have no positions."""


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A model as the runner sees it."""

    embedding: nn.Module
    rotary: nn.Module
    layers: tuple[Layer, ...]
    norm: Norm
    head: nn.Module
    query_heads: int
    kv_heads: int
    head_size: int


def dissect(model: nn.Module) -> Anatomy:
    """The parts of a model, inside whatever wraps it; its modules are referred to, not copied.

    Raises:
        Unsupported: another family, a head size without a kernel, more query heads a KV head than the kernels take, another activation, or
            rotary angles that depend on more than the position.
    """
    causal = unwrap(model)
    config = causal.config
    if config.model_type not in FAMILIES:
        raise Unsupported(f"the sparse engine does not know the architecture {config.model_type}; it knows {', '.join(FAMILIES)}")
    transformer = causal.model
    attention = transformer.layers[0].self_attn
    size, heads, kv_heads = attention.head_dim, config.num_attention_heads, config.num_key_value_heads
    if size not in HEAD_SIZES:
        raise Unsupported(f"the model has heads of {size}; there are kernels for {HEAD_SIZES}")
    if heads // kv_heads > MAX_GROUP:
        raise Unsupported(f"{heads // kv_heads} query heads share a KV head; there are kernels for up to {MAX_GROUP}")
    if config.hidden_act not in ("silu", "swish"):
        raise Unsupported(f"the model's activation is {config.hidden_act}; the sparse engine knows silu")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROTARY:
        raise Unsupported(f"the model's rotary embedding is {rope}; the sparse engine knows {', '.join(ROTARY)}")
    if transformer.rotary_emb(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.long))[0].shape[-1] != size:
        raise Unsupported("the model rotates only a part of each head")
    layers = tuple(_layer(module, index, config) for index, module in enumerate(transformer.layers))
    return Anatomy(
        transformer.embed_tokens,
        transformer.rotary_emb,
        layers,
        _norm(transformer.norm),
        causal.get_output_embeddings(),
        heads,
        kv_heads,
        size,
    )


def _norm(module: Any) -> Norm:
    return Norm(module, float(module.variance_epsilon))


def _layer(module: Any, index: int, config: Any) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    # Mistral has one window for all layers and no attribute for it; the others say per layer.
    window = config.sliding_window if config.model_type == "mistral" else getattr(attention, "sliding_window", None)
    return Layer(
        input_norm=_norm(module.input_layernorm),
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        output=attention.o_proj,
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        middle_norm=_norm(module.post_attention_layernorm),
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        scale=attention.scaling,
        window=int(window or 0),
        rotary=bool(getattr(attention, "use_rope", True)),
    )
