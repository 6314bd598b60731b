"""Log-probability of chosen tokens, in plain torch: the definition that every other version is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """log softmax(logits / temperature)[target] in float32, differentiable in the logits.

    logits: (N, V); targets: (N,) int64; temperature: (N,) float32. Returns (N,) float32.
    """
    return torch.log_softmax(logits.float() / temperature[:, None], dim=-1).gather(1, targets[:, None]).squeeze(1)


def fold(logits: Tensor, targets: Tensor, sharpness: Tensor, top: Tensor, mass: Tensor, chosen: Tensor) -> None:
    """Take one piece of the vocabulary into what each row has seen.

    logits:    (N, columns) of the piece
    targets:   (N,) int64, columns of the piece; outside of it they are in another one
    sharpness: (N,) float32, 1 / temperature
    top, mass: (N,) float32, running maximum of logits / temperature, and running sum of exp(logits / temperature - maximum); a row that has
               seen NaN has NaN from then on
    chosen:    (N,) float32, set to logits / temperature at the target where the piece has it
    """
    scaled = logits.float() * sharpness[:, None]
    highest = torch.maximum(top, scaled.amax(dim=1))
    mass.mul_(torch.exp(top - highest)).add_(torch.exp(scaled - highest[:, None]).sum(dim=1))
    top.copy_(highest)
    here = (targets >= 0) & (targets < logits.shape[1])
    found = scaled.gather(1, torch.where(here, targets, 0)[:, None]).squeeze(1)
    chosen.copy_(torch.where(here, found, chosen))


def differentiate(logits: Tensor, targets: Tensor, sharpness: Tensor, lse: Tensor, scale: Tensor, gradient: Tensor) -> None:
    """The gradient of one piece: scale / temperature * (1 at the target - softmax).

    lse:      (N,) float32, log-sum-exp of logits / temperature over the whole vocabulary
    scale:    (N,) float32, the incoming gradient
    gradient: as `logits`, which it may be
    """
    share = torch.exp(logits.float() * sharpness[:, None] - lse[:, None])
    rows = torch.nonzero((targets >= 0) & (targets < logits.shape[1])).squeeze(1)
    share[rows, targets[rows]] -= 1
    gradient.copy_(share * -(scale * sharpness)[:, None])
