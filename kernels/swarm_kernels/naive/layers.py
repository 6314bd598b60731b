"""The layers of a model and its log-probs as plain torch computes them, for backends that have nothing faster."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from swarm_kernels.checks import check_prompts
from swarm_kernels.interface import LayerWeights, NormWeight, PromptAttention
from swarm_kernels.layout import LayerCache
from swarm_kernels.naive import elementwise, linear, logprob, prompt, sampling


class PlainLayers:
    """A part of `swarm_kernels.interface.Kernels`."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_norm`."""
        return elementwise.add_norm(hidden, delta, weight, epsilon)

    def gate(self, gates: Tensor, values: Tensor) -> Tensor:
        """See `Kernels.gate`."""
        return elementwise.gate(gates, values)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        return linear.linear(x, weight, bias)

    def attend_prompts(self, cache: LayerCache, attention: PromptAttention) -> Tensor:
        """See `Kernels.attend_prompts`."""
        check_prompts(cache, attention)
        return prompt.attend_prompts(cache, attention)

    def draw(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.draw`."""
        return sampling.draw(logits, uniforms, temperature)

    def stack(self, layers: Sequence[LayerWeights], norm: NormWeight) -> None:
        """None: see `Kernels.stack`."""
        return None

    def logprob_forward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, top: Tensor, mass: Tensor, chosen: Tensor) -> None:
        """See `Kernels.logprob_forward`."""
        logprob.fold(logits, targets, sharpness, top, mass, chosen)

    def logprob_backward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, lse: Tensor, scale: Tensor, gradient: Tensor) -> None:
        """See `Kernels.logprob_backward`."""
        logprob.differentiate(logits, targets, sharpness, lse, scale, gradient)
