"""Log-probability of chosen tokens straight from hidden states; the vocabulary passes in pieces.

Forward folds each piece of logits into a running maximum and sum (float32); backward computes the piece again, turns it into its gradient
in place and multiplies. Memory: one piece of logits, instead of the logits, their float32 copy and their softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from swarm_kernels.interface import Kernels

CHUNK = 4096
"""Columns of the vocabulary in one piece: larger ones take memory and no less time."""


@dataclass(frozen=True, eq=False)
class Head:
    """Hidden states (..., E) to logits (..., V), with what some families apply after the projection."""

    weight: Tensor
    """(V, E)"""
    bias: Tensor | None = None
    """(V,)"""
    factor: float = 1.0
    """Of the projection, above 0."""
    cap: float | None = None
    """The logits are cap * tanh(logits / cap)."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (..., V), of the type of `hidden`; the factor comes before the cap."""
        out = linear(hidden, self.weight, self.bias)
        if self.factor != 1.0:
            out = out * self.factor
        return out if self.cap is None else torch.tanh(out / self.cap) * self.cap


def token_logprobs(
    kernels: Kernels, head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor | float = 1.0, *, chunk: int = CHUNK
) -> Tensor:
    """log softmax(head(hidden) / temperature)[target], float32, differentiable in hidden, the head's weight and its bias.

    hidden: (N, E); targets: (N,) int64 in [0, V); temperature: a number or (N,), above 0. Returns (N,). The projection is rounded to the
    type of `hidden`, or to autocast's, as the model's own head rounds it. An id outside the vocabulary has NaN.
    """
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets are {tuple(targets.shape)} {targets.dtype}; expected ({hidden.shape[0]},) int64")
    sharpness = head.factor / torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device)
    sharpness = sharpness.expand(hidden.shape[0]).contiguous()
    cap = None if head.cap is None else head.cap / head.factor
    weight, bias = head.weight, head.bias
    if torch.is_autocast_enabled(hidden.device.type):  # the backward pass is outside of it, and must see the same logits
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets.contiguous(), sharpness, cap, kernels, chunk
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        sharpness: Tensor,
        cap: float | None,
        kernels: Kernels,
        chunk: int,
    ) -> Tensor:
        rows = hidden.shape[0]
        top, chosen = (torch.full((rows,), value, device=hidden.device) for value in (-torch.inf, torch.nan))
        mass = torch.zeros(rows, device=hidden.device)
        for start in range(0, weight.shape[0], chunk):
            logits = _logits(hidden, weight, bias, cap, slice(start, start + chunk))
            kernels.logprob_forward(logits, targets - start, sharpness, top, mass, chosen)
        lse = top + mass.log()
        ctx.save_for_backward(hidden, weight, bias, targets, sharpness, lse)
        ctx.cap, ctx.kernels, ctx.chunk = cap, kernels, chunk
        return chosen - lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, sharpness, lse = ctx.saved_tensors
        scale = gradients[0].float().contiguous()
        wanted = ctx.needs_input_grad
        d_hidden = torch.zeros(hidden.shape, device=hidden.device) if wanted[0] else None
        d_weight = torch.empty_like(weight) if wanted[1] else None
        d_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None
        for start in range(0, weight.shape[0], ctx.chunk):
            piece = slice(start, start + ctx.chunk)
            logits = _logits(hidden, weight, bias, ctx.cap, piece)
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square()  # of the cap
            ctx.kernels.logprob_backward(logits, targets - start, sharpness, lse, scale, logits)  # in place: `logits` is now its gradient
            if slope is not None:
                logits *= slope
            if d_hidden is not None:
                d_hidden += logits @ weight[piece]
            if d_weight is not None:
                torch.mm(logits.T, hidden, out=d_weight[piece])
            if d_bias is not None:
                d_bias[piece] = logits.sum(dim=0)
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None, piece: slice) -> Tensor:
    return Head(weight[piece], None if bias is None else bias[piece], cap=cap)(hidden)
