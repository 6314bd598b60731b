"""How far a sparse actor's distribution is from the dense policy's, token by token, over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swarm_node.learning.distill_options import Direction


def divergence(dense_logits: Tensor, sparse_logits: Tensor, direction: Direction, temperature: float = 1.0) -> Tensor:
    """Kullback-Leibler divergence of each token between softmax(logits / temperature) of both sides, in nats.

    With respect to the sparse logits the gradient of `forward`, KL(dense || sparse), is (p_sparse - p_dense) / temperature. The k3 estimate
    on tokens sampled from the sparse side has that gradient in expectation, and noise besides.

    dense_logits, sparse_logits: (T, V), of any floating type. Returns (T,) float32; gradients reach the sparse logits only.
    """
    dense, sparse = _both(dense_logits, sparse_logits, temperature)
    first, second = (dense, sparse) if direction == "forward" else (sparse, dense)
    return (first.exp() * (first - second)).sum(-1)


def token_divergences(
    project: Callable[[Tensor], Tensor],
    dense_hidden: Tensor,
    sparse_hidden: Tensor,
    direction: Direction,
    temperature: float = 1.0,
    chunk_tokens: int = 128,
) -> tuple[Tensor, Tensor]:
    """`divergence` and acceptance from hidden states, with logits of `chunk_tokens` positions at a time in both passes.

    Args:
        project: The LM head, (n, H) -> (n, V).
        dense_hidden, sparse_hidden: (T, H), T >= 1.

    Returns:
        Divergences (T,) float32, differentiable in `sparse_hidden`, and acceptances (T,) float32 without gradient: the sum of
        min(p_dense, p_sparse) over the vocabulary.
    """

    def chunk(dense_states: Tensor, sparse_states: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            dense_logits = project(dense_states)
        sparse_logits = project(sparse_states)
        with torch.no_grad():
            dense, sparse = _both(dense_logits, sparse_logits, temperature)
            accepted = torch.minimum(dense, sparse).exp_().sum(-1)
            del dense, sparse
        return divergence(dense_logits, sparse_logits, direction, temperature), accepted

    parts = []
    for states in zip(dense_hidden.detach().split(chunk_tokens), sparse_hidden.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk, *states, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(chunk(*states))
    divergences, acceptances = zip(*parts, strict=True)
    return torch.cat(divergences), torch.cat(acceptances)


def _both(dense_logits: Tensor, sparse_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both sides."""
    dense = (dense_logits.detach().float() / temperature).log_softmax(-1)
    return dense, (sparse_logits.float() / temperature).log_softmax(-1)
