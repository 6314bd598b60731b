"""AdamW over a policy's parameters, with float32 copies of shorter ones, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from swarm_node.learning.options import LearningOptions


class Optimiser:
    """Accumulates gradients over micro-batches and steps.

    A step of 1e-6 vanishes in bfloat16's eight bits, and so does the gradient of a small micro-batch beside a large one. So gradients are
    summed, and steps taken, on float32 copies of parameters that are held in anything shorter; float32 parameters are used as they are.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], options: LearningOptions) -> None:
        self._parameters = dict(parameters)
        self._masters: dict[str, Tensor] = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for name, parameter in self._parameters.items()
        }
        self._copied = [name for name, master in self._masters.items() if master is not self._parameters[name]]
        self._clip = options.grad_clip
        decayed = [master for master in self._masters.values() if master.ndim >= 2]
        others = [master for master in self._masters.values() if master.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=(options.beta1, options.beta2),
        )

    def collect(self) -> None:
        """After a backward: move the gradients of shortened parameters onto their copies."""
        for name in self._copied:
            gradient = self._parameters[name].grad
            if gradient is not None:
                master = self._masters[name]
                master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()
                self._parameters[name].grad = None

    def step(self, rate: float) -> float:
        """Clip the gradient, step at learning rate `rate`, and clear. Returns the gradient's norm before clipping; when that is not finite,
        nothing is changed."""
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), self._clip))
        if math.isfinite(norm):
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self._write_back()
        self.clear()
        return norm

    def clear(self) -> None:
        """Forget the gradient."""
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Moments, step counts and float32 copies, on the CPU, by `key.parameter`."""
        moments = {
            f"{key}.{name}": value.detach().cpu().clone()
            for name, master in self._masters.items()
            for key, value in self._adamw.state.get(master, {}).items()
        }
        return moments | {f"master.{name}": self._masters[name].detach().cpu().clone() for name in self._copied}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the optimiser whose state this is; parameters that have float32 copies are set from them.

        Raises:
            ValueError: the state is of another model, mode or dtype: a name is unknown or missing, or a shape differs.
        """
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self._masters}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.partition(".")
            if name not in state:
                raise ValueError(f"the optimiser's state names {name!r}, which this policy does not train: it is of another model or mode")
            shape = tuple(self._masters[name].shape)
            if key != "step" and tensor.shape != shape:
                raise ValueError(f"{full_name} has shape {tuple(tensor.shape)} and this policy's has {shape}: it is of another model")
            state[name][key] = tensor
        copied = {name for name in state if "master" in state[name]}
        if copied != set(self._copied):
            odd = min(copied ^ set(self._copied))
            raise ValueError(
                f"the optimiser's state and this policy hold {odd!r} in different types: use the dtype of the run that saved it"
            )
        for name, master in self._masters.items():
            if name in copied:
                master.data.copy_(state[name].pop("master"))
            # AdamW keeps its step count on the CPU and its moments beside the parameter.
            self._adamw.state[master] = {
                key: value.clone() if key == "step" else value.to(master.device, copy=True) for key, value in state[name].items()
            }
        self._write_back()

    def _write_back(self) -> None:
        with torch.no_grad():
            for name in self._copied:
                self._parameters[name].copy_(self._masters[name])
