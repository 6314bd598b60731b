"""Log-probability of chosen tokens, in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature)[target] in float32, differentiable in the logits.

    logits: (N, V); targets: (N,) int64; temperature: (N,) float32. Returns (N,) float32.
    """
    return torch.log_softmax(logits.float() / temperature[:, None], dim=-1).gather(1, targets[:, None]).squeeze(1)
