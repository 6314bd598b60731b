"""What of a decoder layer kernels may compute alone: linear layers that nothing wraps, hooks or replaces, but for one LoRA adapter."""

from __future__ import annotations

from peft.tuners.lora.layer import Linear as LoraLinear
from swarm_kernels.interface import LayerWeights, LinearWeight, LowRank, NormWeight
from torch import nn

from swarm_node.rollout.families import Layer, Norm


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
