"""What vLLM's worker learns for us: to take the policy's weights, and to say which policy step they are of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class PolicyWeights:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called by name, in this process, without serialisation.

    A plain `model.load_weights` would not do: where vLLM has repacked a matrix for its kernels, the original is gone and the copy that is
    read would stay as it was. `reload_weights` restores, loads and packs again, layer by layer.
    """

    policy_step: int | None = None
    """Optimiser steps of the policy whose weights this worker holds; None: none of them, or only a part."""

    def take_policy_weights(self: Any, step: int, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Replace all weights.

        Args:
            step: What the weights are of.
            weights: Under the names that the model's checkpoints have.

        Returns:
            Names of vLLM's parameters that got none; unless there are any, the worker holds `step` from now on.
        """
        self.policy_step = None
        model = self.get_model()
        load, loaded = model.load_weights, set()

        def load_and_remember(given: Iterator[tuple[str, Tensor]]) -> set[str]:
            loaded.update(load(given))
            return loaded

        model.load_weights = load_and_remember
        try:
            self.reload_weights(weights_iterator=weights)
        finally:
            del model.load_weights
        _pack_tied_again(model)
        missing = sorted({name for name, _ in model.named_parameters()} - loaded)
        if not missing:
            self.policy_step = step
        return missing

    def forget_policy_weights(self) -> None:
        """The weights' memory was given back."""
        self.policy_step = None

    def held_policy_step(self) -> int | None:
        """`policy_step`."""
        return self.policy_step


def _pack_tied_again(model: nn.Module) -> None:
    """An LM head tied to the embeddings is loaded through them, and its own packed copy of the matrix, on a CPU, is then the old one."""
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and hasattr(module, "quant_method"):
            owners.setdefault(id(weight), []).append(module)
    for modules in owners.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)
