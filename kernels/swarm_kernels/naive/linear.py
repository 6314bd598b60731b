"""A linear layer in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias: x (N, inputs), weight (outputs, inputs), bias (outputs,), all of one type; returns (N, outputs)."""
    return torch.nn.functional.linear(x, weight, bias)
