"""What lies between the matrix products of a layer, in plain torch: the definition that every other version is tested against.

Rounding is that of transformers' modules: sums and products in the model's type, the norm's mean square and the activation in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """A residual sum and its RMS norm.

    hidden, delta: (N, H) of one type; no delta: nothing is added
    weight:        (H,) of the same type
    epsilon:       added to the mean square

    Returns hidden + delta and weight * (hidden + delta) / rms, both (N, H). Where delta is None the first is `hidden` itself.
    """
    total = hidden if delta is None else hidden + delta
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return total, weight * wide.to(total.dtype)


def gate(gates: Tensor, values: Tensor) -> Tensor:
    """silu(gates) * values, the middle of a gated MLP: (N, F), both of one type."""
    return torch.nn.functional.silu(gates) * values
