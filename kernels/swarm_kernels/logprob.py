"""Log-probability of chosen tokens straight from hidden states; the vocabulary passes in pieces.

Forward folds each piece of logits into a running maximum and sum (float32); backward computes the piece again, turns it into its gradient
in place and multiplies. Memory: one piece of logits, instead of the logits, their float32 copy and their softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm_kernels.interface import Kernels

CHUNK = 8192
"""Columns of the vocabulary in one piece."""


def token_logprobs(
    kernels: Kernels,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    bias: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """log softmax((hidden weight^T + bias) / temperature)[target], float32, differentiable in hidden, weight and bias.

    hidden: (N, E); weight: (V, E); bias: (V,); targets: (N,) int64 in [0, V); temperature: a number or (N,), above 0. Returns (N,).
    Logits are rounded to the type of `hidden`, as the model's own head rounds them.
    """
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets are {tuple(targets.shape)} {targets.dtype}; expected ({hidden.shape[0]},) int64")
    sharpness = 1.0 / torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device)
    sharpness = sharpness.expand(hidden.shape[0]).contiguous()
    result: Tensor = _TokenLogprobs.apply(hidden, weight, bias, targets.contiguous(), sharpness, kernels, chunk)  # type: ignore[no-untyped-call]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, sharpness: Tensor, kernels: Kernels, chunk: int
    ) -> Tensor:
        rows = hidden.shape[0]
        top = torch.full((rows,), -torch.inf, device=hidden.device)
        mass, chosen = torch.zeros(rows, device=hidden.device), torch.zeros(rows, device=hidden.device)
        for start in range(0, weight.shape[0], chunk):
            piece = slice(start, start + chunk)
            kernels.logprob_forward(_logits(hidden, weight, bias, piece), targets - start, sharpness, top, mass, chosen)
        lse = top + mass.log()
        ctx.save_for_backward(hidden, weight, bias, targets, sharpness, lse)
        ctx.kernels, ctx.chunk = kernels, chunk
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
            logits = _logits(hidden, weight, bias, piece)
            ctx.kernels.logprob_backward(logits, targets - start, sharpness, lse, scale, logits)  # in place: `logits` is now its gradient
            if d_hidden is not None:
                d_hidden += logits @ weight[piece]
            if d_weight is not None:
                torch.mm(logits.T, hidden, out=d_weight[piece])
            if d_bias is not None:
                d_bias[piece] = logits.sum(dim=0)
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, piece: slice) -> Tensor:
    return torch.nn.functional.linear(hidden, weight[piece], None if bias is None else bias[piece])
