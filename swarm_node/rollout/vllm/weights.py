"""A policy's weights as one plain model, whatever trains them: adapters are added to the matrices that they adapt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from swarm_node.policy.parts import unwrap

_ADAPTED = ".base_layer."


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under the name that it has in the model without adapters, in the model's order; tied ones once.

    An adapted matrix becomes W + alpha / rank * B A (arXiv 2106.09685, equation 3), summed in float32 and rounded to W's type. It is
    computed when it is asked for, so that one copy exists at a time. The model is not changed; a parameter without adapter is not copied.

    Args:
        model: A causal language model, perhaps wrapped by peft with low-rank adapters.
    """
    inner = unwrap(model)
    for name, parameter in inner.named_parameters():
        if ".lora_" in name:
            continue
        path, adapted, rest = name.partition(_ADAPTED)
        if not adapted:
            yield name, parameter.detach()
            continue
        layer = inner.get_submodule(path)
        assert isinstance(layer, Linear)
        weight = parameter.detach()
        yield f"{path}.{rest}", _merge(layer, weight) if rest == "weight" else weight


def _merge(layer: Linear, weight: Tensor) -> Tensor:
    """(out, in), of the weight's type: the weight and the active adapters that are not in it yet."""
    waiting = [name for name in layer.active_adapters if name in layer.lora_A and name not in layer.merged_adapters]
    if layer.disable_adapters or not waiting:
        return weight
    total = weight.float()
    for name in waiting:
        total = total + layer.get_delta_weight(name).float()
    return total.to(weight.dtype)
