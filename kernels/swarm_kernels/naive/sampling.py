"""Draw tokens from softmax(logits / temperature) over the whole vocabulary, and say with which log-probability, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256
NOT_FINITE = "the model's logits are not finite: its weights have diverged. Resume from an earlier checkpoint with a lower learning rate."


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution at one uniform number.

    The inversion goes in two levels, blocks of 256 ids and then inside one block: three passes over the vocabulary, one buffer, no sort.
    An id whose float32 weight exp(logit - max) is 0 is never returned, however close to 0 or 1 the uniform number is.

    Args:
        logits: (B, V), any floating type.
        uniforms: (B,) float64 in (0, 1), on the logits' device.
        temperature: > 0.

    Returns:
        Token ids (B,) int64 and their log-probabilities (B,) float32 in nats: log_softmax(logits / temperature) in float32.

    Raises:
        FloatingPointError: a row of logits holds NaN or +inf, or is -inf throughout.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    rows, vocabulary = scaled.shape
    top = scaled.amax(-1, keepdim=True)
    weights = scaled.new_zeros(rows, vocabulary + -vocabulary % _BLOCK)
    torch.sub(scaled, top, out=weights[:, :vocabulary]).exp_()
    blocks = weights.view(rows, -1, _BLOCK)

    outer = blocks.sum(-1).double().cumsum(-1)
    total = outer[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise FloatingPointError(NOT_FINITE)
    target = uniforms[:, None] * total
    block = _first_above(outer, target)
    below = torch.where(block > 0, outer.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks[torch.arange(rows, device=scaled.device), block[:, 0]].double().cumsum(-1)
    ids = block * _BLOCK + _first_above(inner, target - below)
    logprobs = scaled.gather(1, ids) - top - total.log().float()
    return ids[:, 0], logprobs[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Per row (B, 1): the first index whose cumulative sum exceeds the target. Its own summand is positive, because the sum grew there."""
    total = cumulative[:, -1:]
    # Rounding may lift a target to the total, which nothing exceeds.
    reachable = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, reachable.clamp(min=0), right=True)
