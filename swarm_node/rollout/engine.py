"""What the node needs from a rollout engine, whole groups sampled by the policy as it is now; and what all engines do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import nan
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish
from torch import Tensor

from swarm_node.policy.parts import evaluating
from swarm_node.policy.policy import Policy
from swarm_node.policy.rollout_adapter import AdapterError, RolloutAdapter
from swarm_node.rollout.noise import streams
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.sparsity.schedule import Schedule

T = TypeVar("T")


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and how many completions to sample for it."""

    prompt: NDArray[np.int32]
    """Token ids, shape (P,), P >= 1."""
    size: int
    """G, at least 1 (training asks for at least 2)."""
    key: int
    """Identifies the group in the noise stream: same seed, key, completion and position give the same random number."""
    budgets: tuple[int, ...] | None = None
    """Pages that each completion may read besides the reserved three, whatever its position, one a completion; None: what the engine's
    schedule says. Engines without sparse attention ignore it."""
    observe: int = 0
    """Of the first so many completions, keep the distributions that their tokens were drawn from."""


@dataclass(frozen=True)
class RolloutReport:
    """What a rollout cost."""

    tokens: int
    """Completion tokens sampled."""
    seconds: float
    slot_idle_share: float
    """Share of slot-steps in which a slot of the batch held no running completion, in [0, 1]."""
    straggler_seconds: float
    """Summed over groups: time between the moment half of the group had finished and its last completion."""
    prefill_tokens: int = 0
    """Prompt tokens computed; a prompt that its group shares counts once."""
    prefill_seconds: float = 0.0
    """Of `seconds`, what prompts took; the rest is decoding."""
    decode_steps: int = 0
    """Steps in which running completions got a token each."""
    preemptions: int = 0
    """Completions that had to give up their cache for others and were computed again."""
    sparse_share: float = 0.0
    """Share of the sampled tokens whose attention was sparse, in [0, 1]."""
    largest_budget: int = 0
    """Most pages, besides the reserved three, that a sparse token could read; 0: nothing was sparse."""
    acceptance_p5: float = nan
    """5th percentile of the acceptance of the sparse tokens that were rescored densely; NaN where there were none."""
    schedule_change: str = ""
    """What that changed in the schedule, and why; empty when nothing."""

    @property
    def tokens_per_second(self) -> float:
        """Of the whole rollout, prefill included; 0 where no time was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Top(NamedTuple):
    """The most probable tokens of each position."""

    ids: Tensor
    """(T, k) int64, distinct within a row."""
    logprobs: Tensor
    """(T, k) float32, of the tempered distribution over the whole vocabulary."""


@dataclass(frozen=True, eq=False)
class Observed:
    """What one completion's tokens were drawn from."""

    group: int
    """Index of its request."""
    member: int
    """Index in its group."""
    kept: Tensor | Top
    """The logits (T, V), of the model's type and before the temperature; or, where those of a whole completion would take too much memory,
    the 20 most probable tokens of each position. On the CPU."""


@dataclass(frozen=True)
class Rollout:
    """Completions in the order of the requests, and the report."""

    groups: tuple[tuple[Completion, ...], ...]
    report: RolloutReport
    observed: tuple[Observed, ...] = ()
    """As the requests asked."""

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of every completion, a list a group."""
        return [[len(completion) for completion in group] for group in self.groups]

    @property
    def truncated(self) -> list[list[bool]]:
        """Whether each ended at the token limit."""
        return [[completion.finish is Finish.LENGTH for completion in group] for group in self.groups]


class Engine(ABC):
    """Samples from softmax(logits / temperature) over the whole vocabulary; log-probs are float32 of exactly that distribution."""

    name: str
    """Stable name, sent in the policy tag: `reference`, `sparse`, `vllm`."""
    choices: tuple[str, ...] = ()
    """Sentences that say what was chosen and why."""
    schedule: Schedule | None = None
    """Pages that a token may read, by its position; None: all attention is dense."""

    def __init__(self, policy: Policy, options: RolloutOptions) -> None:
        self._policy = policy
        self._options = options
        self._context = policy.context

    def generate(
        self, requests: Sequence[GroupRequest], *, seed: int, temperature: float, max_new_tokens: int, dense: bool = False
    ) -> Rollout:
        """Sample every group to its end (stop token or `max_new_tokens`).

        Args:
            requests: One a group; equal keys draw equal noise.
            seed: Of the noise stream, see `GroupRequest.key`.
            temperature: Above 0; divides the logits.
            max_new_tokens: Of each completion, its stop token included.
            dense: From the policy itself, without schedule and adapter: that is what an evaluation measures. `GroupRequest.budgets` hold.

        Raises:
            ValueError: a request that cannot be sampled, see `check_requests`, or a completion that the cache cannot hold by itself.
            FloatingPointError: the model's logits are not finite.
        """
        check_requests(requests, max_new_tokens, self._context)
        if not requests:
            return Rollout((), RolloutReport(0, 0.0, 0.0, 0.0))
        with evaluating(self._policy.model):
            return self._generate(requests, seed, temperature, max_new_tokens, dense)

    @abstractmethod
    def _generate(self, requests: Sequence[GroupRequest], seed: int, temperature: float, max_new_tokens: int, dense: bool) -> Rollout:
        """`generate` for requests that are checked, of which there is one at least, with the model in evaluation mode."""

    @abstractmethod
    def policy_updated(self, step: int) -> None:
        """The policy's weights changed; nothing computed with the old ones may be read again."""

    def wear(self, adapter: RolloutAdapter) -> None:
        """Sample with this adapter from now on. Raises AdapterError where the engine cannot."""
        raise AdapterError(
            f"distill.enabled needs the sparse engine, and this node samples with {self.name}: set distill.enabled=false, or "
            "rollout.engine=sparse with a model that it knows"
        )

    def state(self) -> dict[str, Any]:
        """What the next rollout depends on besides the policy, as JSON values for the checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 -- most engines have nothing to take up
        """Go on from `state`; one of another engine is ignored. Raises ValueError when it cannot be used."""


def check_requests(requests: Sequence[GroupRequest], max_new_tokens: int, context: int | None) -> None:
    """Raise ValueError for an empty prompt, a group of size 0, budgets that are not one positive number a completion, or a
    prompt that leaves no room for `max_new_tokens` in the model's context of so many tokens (None: unlimited)."""
    for index, request in enumerate(requests):
        if len(request.prompt) < 1 or request.size < 1:
            raise ValueError(f"request {index} has {len(request.prompt)} prompt tokens and size {request.size}; both must be at least 1")
        if request.budgets is not None and (len(request.budgets) != request.size or min(request.budgets) < 1):
            raise ValueError(
                f"request {index} has {len(request.budgets)} budgets, the smallest {min(request.budgets, default=0)}, for {request.size} "
                "completions: give each at least one page"
            )
        if context is not None and len(request.prompt) + max_new_tokens > context:
            raise ValueError(
                f"request {index}: {len(request.prompt)} prompt tokens and max_new_tokens {max_new_tokens} exceed the model's context "
                f"of {context} tokens; lower rollout.max_new_tokens"
            )


def completion_streams(requests: Sequence[GroupRequest], seed: int) -> NDArray[np.uint64]:
    """The random stream of each of N completions, (N,), in the order of the requests and their members; see `rollout.noise`."""
    sizes = [request.size for request in requests]
    keys = np.array([request.key % 2**64 for request in requests], dtype=np.uint64)
    return streams(seed, np.repeat(keys, sizes), np.concatenate([np.arange(size, dtype=np.uint64) for size in sizes]))


def by_group(requests: Sequence[GroupRequest], values: Sequence[T]) -> tuple[tuple[T, ...], ...]:
    """One value a completion, in the order of the requests and their members, cut into the requests' groups."""
    rest = iter(values)
    return tuple(tuple(islice(rest, request.size)) for request in requests)


def straggler_seconds(requests: Sequence[GroupRequest], ends: Sequence[float]) -> float:
    """`RolloutReport.straggler_seconds`, of the moments at which the completions finished, in the same order."""
    return sum(times[-1] - times[(len(times) - 1) // 2] for times in map(sorted, by_group(requests, ends)))
