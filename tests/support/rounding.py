"""Tolerances that follow from the arithmetic, on whatever processor the tests run."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def rounding(model: PreTrainedModel, ids: Tensor) -> float:
    """By how much two float32 computations of this model's log-probs (N, V) of `ids` (N,) may differ.

    Measured and not assumed: each is about as far from the exact value as the model's own float32 forward is from the same in float64.
    Twice that for two of them, and four times more because the order of a sum moves single values that much (measured: up to 2.3 times over
    the instruction sets of torch and MKL).
    """
    single = model(ids[None]).logits[0].float().log_softmax(-1)
    double = copy.deepcopy(model).double()(ids[None]).logits[0].log_softmax(-1)
    return 8 * float((single - double).abs().max())
