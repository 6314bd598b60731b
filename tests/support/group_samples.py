"""Groups that look like sampled ones, for tests of the wire and of admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from swarm_protocols.group import Completion, Finish, Group, PolicyTag, ProblemRef, hash_prompt

STOP = 2
VOCAB = 49_152
PROMPT = np.array([1, 17, 300, 5], dtype=np.int32)


def sample_completion(length: int, seed: int = 0, vocab: int = VOCAB, finish: Finish = Finish.STOP) -> Completion:
    """Token ids by Zipf's law over the vocabulary; log-probs of a language model: half of them near 0, the rest with a long tail."""
    draws = np.random.default_rng(seed)
    tokens = np.minimum(draws.zipf(1.3, length) + STOP, vocab - 1).astype(np.int32)
    sure = draws.random(length) < 0.5
    logprobs = -np.where(sure, draws.exponential(0.02, length), draws.gamma(1.0, 1.2, length)).astype(np.float32)
    if finish is Finish.STOP:
        tokens[-1] = STOP
    return Completion(tokens, logprobs, finish)


def sample_group(lengths: Sequence[int] = (20, 30, 25, 40), seed: int = 0, vocab: int = VOCAB, **changes: Any) -> Group:
    """A group of one completion a length; `changes` override fields of the group, of its policy tag or of its problem."""
    completions = tuple(sample_completion(length, seed * 1000 + number, vocab) for number, length in enumerate(lengths))
    problem = {"task": "chain-sum:2", "seed": 7, "index": 1234}
    policy = {
        "model": "smollm2-135m",
        "fingerprint": "00112233445566ff",
        "step": 12,
        "engine": "reference",
        "dtype": "bfloat16",
        "sparse_budget": 0,
        "temperature": 1.0,
        "group_size": len(lengths),
    }
    fields = {
        "prompt_hash": hash_prompt(PROMPT),
        "created_at": 1_790_000_000.25,
        "sequence": 1_790_000_000_000_000_000,
        "completions": completions,
    }
    for name, value in changes.items():
        next(table for table in (problem, policy, fields) if name in table)[name] = value
    return Group(problem=ProblemRef(**problem), policy=PolicyTag(**policy), **fields)  # type: ignore[arg-type]


def same_content(one: Group, other: Group) -> bool:
    """Equal in everything, log-probs to the bit."""
    return (
        (one.problem, one.prompt_hash, one.policy, one.created_at, one.sequence)
        == (other.problem, other.prompt_hash, other.policy, other.created_at, other.sequence)
        and len(one.completions) == len(other.completions)
        and all(
            np.array_equal(a.tokens, b.tokens) and a.logprobs.tobytes() == b.logprobs.tobytes() and a.finish == b.finish
            for a, b in zip(one.completions, other.completions, strict=True)
        )
    )
