"""The group: one prompt, G completions sampled for it by one policy, and the log-probs they were drawn with.

It is the only thing that peers exchange. Neither rewards nor text travel: every receiver regenerates the prompt from its
reference and computes the rewards itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Finish(IntEnum):
    """Why a completion ended, recorded when it was sampled."""

    STOP = 0
    """A stop token was drawn; it is the completion's last token."""
    LENGTH = 1
    """The token limit was reached; no stop token was drawn."""


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled completion."""

    tokens: NDArray[np.int32]
    """Token ids, shape (T,), T >= 1; the stop token is included."""
    logprobs: NDArray[np.float32]
    """Log-probability (nats) of each token under the distribution it was really drawn from, shape (T,)."""
    finish: Finish

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ProblemRef:
    """Names a training problem; any peer regenerates the prompt from it."""

    task: str
    seed: int
    index: int


@dataclass(frozen=True)
class PolicyTag:
    """What sampled the group."""

    model: str
    """Readable model name, for display only."""
    fingerprint: str
    """16 hex digits over architecture and tokenizer."""
    step: int
    """Optimiser steps that the policy had taken."""
    engine: str
    dtype: str
    sparse_budget: int
    """Attention pages per KV head; 0 means dense."""
    temperature: float
    group_size: int
    """G as the sender's controller asked for it; completions without a reward may have left the group."""


@dataclass(frozen=True, eq=False)
class Group:
    """One prompt's completions with everything a peer needs to learn from them."""

    problem: ProblemRef
    prompt_hash: bytes
    """`hash_prompt` of the prompt's token ids: 32 bytes."""
    policy: PolicyTag
    created_at: float
    """Unix seconds of the sender's clock: a hint, never trusted."""
    sequence: int
    """Grows with every group of a sender, over restarts too: a checkpoint keeps it, and without one it starts from the clock in
    nanoseconds."""
    completions: tuple[Completion, ...]

    @property
    def tokens(self) -> int:
        """Completion tokens in all."""
        return sum(len(completion) for completion in self.completions)


def hash_prompt(tokens: NDArray[np.integer]) -> bytes:
    """SHA-256 over a prompt's token ids as little-endian unsigned 32-bit integers."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u4").tobytes()).digest()
