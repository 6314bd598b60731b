"""A low-rank adapter that a policy wears only while it rolls out (DistillSparse), kept outside of the policy's modules.

Source: arXiv 2606.08446 for its purpose, arXiv 2106.09685 for its form: on every linear layer of the decoder blocks the output gains
alpha / rank * (x A) B. The policy's modules, parameter names and checkpoints are the same whether there is an adapter or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm_node.policy.parts import body

Forward = Callable[[Tensor], Tensor]


class AdapterError(ValueError):
    """The adapter does not fit the model or the engine, or the tensors do not fit the adapter. The message says which and what to do."""


@dataclass(eq=False)
class _Site:
    """One linear layer and what is added to its output."""

    linear: nn.Linear
    a: nn.Parameter
    """(in, rank) float32. Both factors lie as a product from the left reads them, which small products feel."""
    b: nn.Parameter
    """(rank, out) float32."""
    a_now: Tensor
    """`a` in the type that products without gradient are computed in."""
    b_now: Tensor


class RolloutAdapter:
    """Adds to the linear layers of a model inside `with adapter.active():`, and nowhere else.

    Products without gradient are float32 on a CPU, where small ones in bfloat16 take several times as long, and elsewhere of the model's
    type. While gradients are on they are of the activations' type; adapters are float32 always.
    """

    def __init__(self, model: nn.Module, rank: int = 16, alpha: float = 16, seed: int = 0) -> None:
        """B is zero, so a new adapter changes nothing; A is drawn from the seed, uniform within 1 / sqrt(in) as in LoRA.

        Args:
            model: A transformers causal language model, perhaps wrapped by peft, whose own adapters stay in force.
            rank: Columns of A, rows of B.
            alpha: The product is scaled by alpha / rank.
            seed: Of A.

        Raises:
            AdapterError: the rank is below 1, or no linear layer was found where transformers' decoders have them.
        """
        if rank < 1:
            raise AdapterError(f"the rollout adapter's rank is {rank}; it must be at least 1")
        self.rank = rank
        self.alpha = alpha
        self._scale = alpha / rank
        self._active = False
        blocks = getattr(body(model), "layers", None)
        found = dict(_linears(blocks, "layers")) if isinstance(blocks, nn.ModuleList) else {}
        if not found:
            raise AdapterError(
                f"{type(body(model)).__name__} has no linear layers in a list `layers`, so it cannot have a rollout adapter. "
                "Choose a Llama, Qwen, Mistral or similar model, or switch distillation off."
            )
        generator = torch.Generator().manual_seed(seed)
        self._sites = {name: _new_site(linear, rank, generator) for name, linear in found.items()}
        # An instance's own `forward` is found before its class's: a hook would send every call of the layer down a slower path.
        self._forwards = [(site.linear.__dict__, _adapted(site, site.linear.forward, self._scale)) for site in self._sites.values()]
        self._copied = [site for site in self._sites.values() if site.a_now is not site.a]
        self._copied_versions = -1

    def parameters(self) -> dict[str, nn.Parameter]:
        """Float32 parameters by name: the layer's path below the model's body, then `A`, (in, rank), or `B`, (rank, out)."""
        factors = {}
        for name, site in self._sites.items():
            factors[f"{name}.A"] = site.a
            factors[f"{name}.B"] = site.b
        return factors

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model with the adapter. Cheap enough to be entered for every token. Where gradients are off its values are those of this
        moment; buffers keep their addresses between entries, so that captured graphs stay right.

        Raises:
            RuntimeError: it is active already.
        """
        if self._active:
            raise RuntimeError("the rollout adapter is active already: enter active() once")
        self._refresh()
        self._active = True
        try:
            for attributes, forward in self._forwards:
                attributes["forward"] = forward
            yield
        finally:
            for attributes, _ in self._forwards:
                attributes.pop("forward", None)
            self._active = False

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the parameters on the CPU, by name."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all parameters in place.

        Raises:
            AdapterError: a name is missing or unknown, a shape differs, or a value is not finite; nothing is changed then.
        """
        own = self.parameters()
        problems = [f"missing {name}" for name in own.keys() - tensors.keys()]
        problems += [f"unknown {name}" for name in tensors.keys() - own.keys()]
        for name in own.keys() & tensors.keys():
            if tensors[name].shape != own[name].shape:
                problems.append(f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}")
            elif not bool(torch.isfinite(tensors[name]).all()):
                problems.append(f"{name} holds values that are not finite")
        if problems:
            listed = "; ".join(sorted(problems)[:3])
            raise AdapterError(
                f"this rollout adapter of rank {self.rank} cannot be loaded: {len(problems)} differences, first {listed}. "
                "Use the model and rank that it was saved with, or switch distillation off."
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])

    def _refresh(self) -> None:
        """Bring the copies up to date, if the parameters have been written to since the last time."""
        versions = sum(site.a._version + site.b._version for site in self._copied)
        if versions != self._copied_versions:
            with torch.no_grad():
                for site in self._copied:
                    site.a_now.copy_(site.a)
                    site.b_now.copy_(site.b)
            self._copied_versions = versions


def _linears(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers below a module by path, in the module's order; one that peft wrapped is found inside, under the wrapper's path."""
    for name, child in module.named_children():
        inner = getattr(child, "base_layer", child)
        if isinstance(inner, nn.Linear):
            yield f"{path}.{name}", inner
        elif inner is child:
            yield from _linears(child, f"{path}.{name}")


def _new_site(linear: nn.Linear, rank: int, generator: torch.Generator) -> _Site:
    device, width = linear.weight.device, linear.in_features
    drawn = torch.rand(width, rank, generator=generator) * 2 - 1
    a = nn.Parameter((drawn / math.sqrt(width)).to(device))
    b = nn.Parameter(torch.zeros(rank, linear.out_features, device=device))
    if device.type == "cpu" or linear.weight.dtype == torch.float32:
        return _Site(linear, a, b, a, b)
    return _Site(linear, a, b, *(torch.empty_like(factor, dtype=linear.weight.dtype, requires_grad=False) for factor in (a, b)))


def _adapted(site: _Site, original: Forward, scale: float) -> Forward:
    a, b, a_now, b_now = site.a, site.b, site.a_now, site.b_now

    def forward(x: Tensor) -> Tensor:
        out = original(x)
        if torch.is_grad_enabled():
            inner = x @ a.to(x.dtype)
            return out + (inner * scale if scale != 1.0 else inner) @ b.to(x.dtype)
        inner = x.to(a_now.dtype) @ a_now
        if scale != 1.0:
            inner *= scale
        if out.dtype == b_now.dtype and out.dim() == 2:
            return out.addmm_(inner, b_now)
        return out.add_(inner @ b_now)

    return forward
