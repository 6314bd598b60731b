"""Which architectures the model runner can walk, what it reads of each decoder layer, and what of it kernels may compute alone: linear
layers that nothing wraps, hooks or replaces, but for one LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from swarm_kernels.interface import LayerWeights, LinearWeight, LowRank, NormWeight
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
        """Shape (H,)."""
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


def layer_weights(layer: Layer, selects: bool) -> LayerWeights | None:
    """None where a linear layer of it has to be called."""
    names = ("query", "key", "value", "output", "gate", "up", "down")
    found = {name: linear for name in names if (linear := _linear(getattr(layer, name))) is not None}
    if len(found) < len(names):
        return None
    return LayerWeights(
        **found,
        input_norm=norm_weight(layer.input_norm),
        query_norm=None if layer.query_norm is None else norm_weight(layer.query_norm),
        key_norm=None if layer.key_norm is None else norm_weight(layer.key_norm),
        middle_norm=norm_weight(layer.middle_norm),
        scale=layer.scale,
        window=layer.window,
        rotary=layer.rotary,
        selects=selects,
    )


def norm_weight(norm: Norm) -> NormWeight:
    """What the kernels take of a norm: its weight as it is now, and epsilon."""
    return NormWeight(norm.weight, norm.epsilon)


def plain(module: nn.Module) -> LinearWeight | None:
    """What a linear layer that is nothing else consists of."""
    if type(module) is not nn.Linear or _is_touched(module):
        return None
    return LinearWeight(module.weight, module.bias)


def _linear(module: nn.Module) -> LinearWeight | None:
    return _adapted(module) if type(module) is LoraLinear else plain(module)


def _adapted(module: LoraLinear) -> LinearWeight | None:
    """A linear layer with one LoRA adapter that computes as in the paper: not merged, no variant of it, nothing dropped."""
    base = plain(module.base_layer)
    active = [name for name in module.active_adapters if name in module.lora_A]
    if base is None or _is_touched(module) or module.disable_adapters or module.merged or len(active) != 1:
        return None
    name = active[0]
    a, b = plain(module.lora_A[name]), plain(module.lora_B[name])
    drops = module.training and not isinstance(module.lora_dropout[name], nn.Identity)
    if name in module.lora_variant or drops or a is None or b is None or a.bias is not None or b.bias is not None:
        return None
    return LinearWeight(base.weight, base.bias, LowRank(a.weight, b.weight, module.scaling[name]))


def _is_touched(module: nn.Module) -> bool:
    return bool("forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks)
