"""The two things that a scheduler moves: a group's prompt, and a completion of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish
from torch import Tensor

from swarm_node.rollout.engine import GroupRequest, Top
from swarm_node.rollout.paged.cache import CachedSequence


@dataclass(eq=False)
class Prompt:
    """A group's prompt: computed once, read by all completions of the group."""

    index: int
    """Of its request."""
    request: GroupRequest
    cached: CachedSequence | None = None
    filled: int = 0
    """Tokens that are computed."""
    hidden: Tensor | None = None
    """(H,), of the last token, once the whole prompt is computed: what the first token of every completion is drawn from."""

    @property
    def length(self) -> int:
        """Tokens, P."""
        return len(self.request.prompt)


@dataclass(eq=False)
class Sequence:
    """A completion while it is sampled."""

    prompt: Prompt
    member: int
    stream: int
    """Its random stream, see `rollout.noise`."""
    tokens: NDArray[np.int32]
    """(limit,), of which `count` are drawn."""
    logprobs: NDArray[np.float32]
    count: int = 0
    cached: CachedSequence | None = None
    """None before it starts, while it is preempted, and after its end."""
    filled: int = 0
    """While it is computed again after a preemption: tokens that are in the cache."""
    finish: Finish | None = None
    finished_at: float = 0.0
    """`time.perf_counter` at its end."""
    kept: list[Tensor | Top] = field(default_factory=list)
    """What its tokens were drawn from, where the request asks to keep it: logits (1, V) each, or the top tokens (1, k)."""

    @property
    def length(self) -> int:
        """Tokens that are in the cache while it runs: all but the last one, which the next step puts there."""
        return self.prompt.length + self.count - 1

    @property
    def history(self) -> NDArray[np.int32]:
        """Those tokens, (length,)."""
        return np.concatenate([self.prompt.request.prompt, self.tokens[: self.count - 1]])

    @property
    def observed(self) -> bool:
        """Whether its request asks to keep what its tokens are drawn from."""
        return self.member < self.prompt.request.observe

    def record(self, token: int, logprob: float) -> None:
        """Take the next token."""
        self.tokens[self.count] = token
        self.logprobs[self.count] = logprob
        self.count += 1

    def completion(self) -> Completion:
        """What was drawn, once it has finished."""
        assert self.finish is not None
        return Completion(self.tokens[: self.count].copy(), self.logprobs[: self.count].copy(), self.finish)
