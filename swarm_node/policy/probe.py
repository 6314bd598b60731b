"""Whether a model can be sampled in batches: tried at the start, as wrong log-probs would only show in what it learns from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from swarm_node.policy.growing_cache import prefill
from swarm_node.policy.parts import body, cache_argument, head, head_width

_LENGTHS = (3, 8)
_NEW = 4


@torch.inference_mode()
def batching_error(model: nn.Module) -> float:
    """How far the logits of two sequences of different length, decoded together as a rollout does it (padded on the left, the cache's rows
    repeated for a group and thinned out as completions end), are from those of each alone in one forward.

    Args:
        model: A causal language model in evaluation mode.

    Returns:
        Norm of the difference over norm of the centred logits, of the worse sequence; the median over its positions, so that a mixture of
        experts may choose others at one of them. NaN where a logit is.
    """
    device, project = next(model.parameters()).device, head(model)
    tokens = [(np.arange(length + _NEW, dtype=np.int32) * 7 + 5 * length) % head_width(model) for length in _LENGTHS]
    hidden, cache, mask, lengths = prefill(model, [row[:length] for row, length in zip(tokens, _LENGTHS, strict=True)], _NEW)
    states = [hidden]
    owners = torch.arange(2, device=device)
    for position in range(_NEW):
        if position in (0, _NEW // 2):
            kept = torch.tensor([1, 0, 1] if position == 0 else [1, 2], device=device)
            cache.batch_select_indices(kept)
            owners = owners[kept]
        output = body(model)(
            input_ids=torch.tensor([[int(tokens[owner][_LENGTHS[owner] + position])] for owner in owners.tolist()], device=device),
            attention_mask=mask[owners, : max(_LENGTHS) + position + 1],
            position_ids=(lengths[owners] + position)[:, None],
            use_cache=True,
            **{cache_argument(model): cache},
        )
        states.append(output.last_hidden_state[:2, -1][owners[:2].argsort()])
    errors = []
    for row, together, length in zip(tokens, torch.stack(states, dim=1), _LENGTHS, strict=True):
        alone = body(model)(input_ids=torch.from_numpy(row).long().to(device)[None], use_cache=False).last_hidden_state[0, length - 1 :]
        errors.append(_distance(project(together).float(), project(alone).float()))
    return float(torch.stack(errors).max())


def batching_tolerance(dtype: torch.dtype) -> float:
    """The `batching_error` that another order of the same sums explains."""
    return max(1e-3, 16 * torch.finfo(dtype).eps)


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    centred = expected - expected.mean(-1, keepdim=True)
    ratios: Tensor = (found - expected).norm(dim=-1) / centred.norm(dim=-1).clamp_min(1e-30)
    return ratios.median()
