"""Builds groups by hand for the tests of learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from swarm_protocols.group import Completion, Finish, Group, PolicyTag, ProblemRef, hash_prompt

from swarm_node.learning.scored import ScoredGroup

PROMPT = (1, 2, 3)


def scored_group(
    rewards: Sequence[float | None],
    lengths: Sequence[int] | None = None,
    *,
    index: int = 0,
    sender: str = "me",
    own: bool = True,
    step: int = 0,
    temperature: float = 1.0,
    vocabulary: int = 16,
    finish: Finish = Finish.STOP,
    logprob: float = -1.0,
) -> ScoredGroup:
    """A group whose tokens are pseudo-random in `index`, whose log-probs are all `logprob`, and whose body names sender and index."""
    lengths = lengths or [3] * len(rewards)
    draws = np.random.default_rng(index)
    completions = tuple(
        Completion(
            tokens=draws.integers(0, vocabulary, length).astype(np.int32),
            logprobs=np.full(length, logprob, dtype=np.float32),
            finish=finish,
        )
        for length in lengths
    )
    prompt = np.array(PROMPT, dtype=np.int32)
    group = Group(
        problem=ProblemRef(task="test", seed=0, index=index),
        prompt_hash=hash_prompt(prompt),
        policy=PolicyTag("tiny", "0" * 16, 0, "reference", "float32", 0, temperature, len(rewards)),
        created_at=0.0,
        sequence=index,
        completions=completions,
    )
    return ScoredGroup(group, prompt, tuple(rewards), sender, own, step, body=f"{sender}/{index}".encode())
