"""Dense log-probs of completions: one forward of the body, then LM head and log-softmax by pieces of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from swarm_kernels.choose import choose_backend
from swarm_kernels.logprob import token_logprobs
from torch import Tensor, nn

from swarm_node.policy.parts import body, head


def completion_logprobs(
    model: nn.Module,
    sequences: Sequence[tuple[Tensor, Tensor]],
    *,
    temperature: Sequence[float] | float = 1.0,
) -> list[Tensor]:
    """Log-probabilities of completion tokens under softmax(logits / temperature) over the whole vocabulary.

    Sequences are padded on the right and the causal mask alone keeps the padding out: nothing that follows a position can reach it.
    Logits exist for a piece of the vocabulary at a time only, and with gradients once more in the backward pass
    (`swarm_kernels.logprob`).

    Args:
        model: A causal language model, perhaps wrapped by peft.
        sequences: Pairs (prompt (P,), completion (T,)) of integer token ids, P >= 1 and T >= 1, on any device.
        temperature: One for all, or one a sequence.

    Returns:
        One float32 tensor (T,) a sequence, in nats, on the model's device; differentiable unless gradients are off.

    Raises:
        ValueError: an empty prompt or completion, or another number of temperatures than of sequences.
    """
    if not sequences:
        return []
    lengths = [(len(prompt), len(completion)) for prompt, completion in sequences]
    for index, (before, after) in enumerate(lengths):
        if before < 1 or after < 1:
            raise ValueError(f"sequence {index} has {before} prompt and {after} completion tokens; both need at least one")
    temperatures = [float(temperature)] * len(sequences) if isinstance(temperature, int | float) else [float(t) for t in temperature]
    if len(temperatures) != len(sequences):
        raise ValueError(f"{len(temperatures)} temperatures for {len(sequences)} sequences: give one for all, or one a sequence")

    device = next(model.parameters()).device
    width = max(before + after for before, after in lengths)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, (prompt, completion) in enumerate(sequences):
        ids[row, : len(prompt)] = prompt
        ids[row, len(prompt) : len(prompt) + len(completion)] = completion
    # The hidden state at position j predicts the token at j + 1; the last column is only ever a target.
    inputs, following = ids[:, :-1], ids[:, 1:]
    positions = torch.cat([row * (width - 1) + torch.arange(p - 1, p - 1 + t) for row, (p, t) in enumerate(lengths)])
    targets = following.flatten()[positions].to(device)
    counts = torch.tensor([after for _, after in lengths])
    degrees = torch.tensor(temperatures, dtype=torch.float32).repeat_interleave(counts).to(device)

    hidden = body(model)(input_ids=inputs.to(device), use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)[positions.to(device)]
    logprobs = token_logprobs(choose_backend(device).kernels, head(model), hidden, targets, degrees)
    return list(logprobs.split(counts.tolist()))
