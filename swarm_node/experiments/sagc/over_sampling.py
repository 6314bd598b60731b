"""Over-sampling, which people do without a controller: start more completions than a group needs and keep the first to finish.

No step waits for its stragglers, and the policy is trained on its short answers. Engine and controller, in the interfaces of both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish

from swarm_node.control.decision import Cost, Decision, Observation
from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.reference import ReferenceEngine, Slots


class EarlySlots(Slots):
    """Slots of which a group's last `extra` are given up once all others of the group have ended."""

    def __init__(self, owners: NDArray[np.int64], extra: int, max_new_tokens: int, stop_ids: Iterable[int]) -> None:
        super().__init__(len(owners), max_new_tokens, stop_ids)
        _, self._group, counts = np.unique(owners, return_inverse=True, return_counts=True)
        self._keep = counts - extra
        self._ended = np.zeros(len(owners), dtype=bool)
        """Ended by themselves, with a stop token."""

    def record(self, position: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """As `Slots.record`, and give up what still runs of groups that have enough completions."""
        before = self._stopped.copy()
        super().record(position, tokens, logprobs)
        self._ended |= self._stopped & ~before
        full = np.bincount(self._group, weights=self._ended) >= self._keep
        given_up = full[self._group] & ~self._stopped
        self._stopped |= given_up
        self.finished_at[given_up] = time.perf_counter()

    def completions(self) -> list[Completion]:
        """As ever; those that were given up say so by `Finish.LENGTH`."""
        return [
            completion if ended else replace(completion, finish=Finish.LENGTH)
            for completion, ended in zip(super().completions(), self._ended, strict=True)
        ]


class OverSamplingEngine(ReferenceEngine):
    """Starts `Decision.extra` completions above each request's size and returns the first to finish. Its groups favour short answers."""

    def __init__(self, policy: Policy, options: RolloutOptions, extra: int) -> None:
        super().__init__(policy, options)
        self._extra = extra

    def _generate(self, requests: Sequence[GroupRequest], seed: int, temperature: float, max_new_tokens: int, dense: bool) -> Rollout:
        """Sample until each group has its size; the report counts what was thrown away as well."""
        wider = [replace(request, size=request.size + self._extra) for request in requests]
        rollout = super()._generate(wider, seed, temperature, max_new_tokens, dense)
        kept = []
        for request, group in zip(requests, rollout.groups, strict=True):
            ends = [len(completion) if completion.finish is Finish.STOP else max_new_tokens for completion in group]
            kept.append(tuple(group[index] for index in first_to_finish(ends, request.size)))
        return Rollout(tuple(kept), rollout.report)

    def _slots(self, owners: NDArray[np.int64], max_new_tokens: int) -> Slots:
        return EarlySlots(owners, self._extra, max_new_tokens, self._policy.stop_ids)


def first_to_finish(lengths: Sequence[int], keep: int) -> tuple[int, ...]:
    """Indices of the `keep` shortest completions, in their own order: those that finish first when all start together.

    Ties go to the earlier index. Raises ValueError when there are fewer than `keep`.
    """
    if len(lengths) < keep:
        raise ValueError(f"cannot keep {keep} of {len(lengths)} completions: start at least {keep}")
    return tuple(sorted(sorted(range(len(lengths)), key=lambda i: lengths[i])[:keep]))


class OverSampling:
    """A fixed G with `extra` completions started above it; observes the kept ones."""

    def __init__(self, options: SagcOptions, seed: int, extra: int) -> None:
        if options.group_size is None or extra < 1:
            raise ValueError(f"over-sampling needs a fixed group_size and extra >= 1, got {options.group_size} and {extra}")
        self.extra = extra
        self._fixed = Controller(options, seed)

    def choose(self, features: Sequence[str] = ()) -> Decision:
        """The fixed size, with `extra` completions to start above it."""
        decision = self._fixed.choose(features)
        return Decision(decision.size, decision.multiplier, decision.sampled, decision.changed, decision.sizes, self.extra)

    def observe(self, lengths: Sequence[Sequence[int]], truncated: Sequence[Sequence[bool]] = (), cost: Cost | None = None) -> Observation:
        """See `Controller.observe`; the lengths are those of the kept completions."""
        return self._fixed.observe(lengths, truncated, cost)

    def state(self) -> dict[str, Any]:
        """See `Controller.state`."""
        return self._fixed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Controller.restore`."""
        self._fixed.restore(state)
