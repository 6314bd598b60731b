"""Measures while training what sparse decoding loses, and moves the schedule to hold its threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.noise import streams
from swarm_node.rollout.sparsity.acceptance import fifth_percentile, is_sparse, rescore
from swarm_node.rollout.sparsity.closed_loop import ClosedLoop
from swarm_node.rollout.sparsity.schedule import PAGE_SIZE, Schedule


class Monitor:
    """Has a few completions of each rollout scored densely, and feeds a closed loop with what comes out."""

    def __init__(self, policy: Policy, loop: ClosedLoop, completions: int) -> None:
        self._policy = policy
        self._loop = loop
        self._completions = completions

    @property
    def schedule(self) -> Schedule:
        """For the next rollout."""
        return self._loop.schedule

    def mark(self, requests: Sequence[GroupRequest], seed: int, max_new_tokens: int) -> list[GroupRequest]:
        """The requests, some of them with completions to keep: a few groups, drawn by the seed, of those that can become sparse at all."""
        marked = list(requests)
        ends = np.array([len(request.prompt) + max_new_tokens - 1 for request in requests])
        eligible = np.flatnonzero(is_sparse(ends, self.schedule.budgets_at(ends), PAGE_SIZE))
        if len(eligible):
            keys = np.array([requests[index].key % 2**64 for index in eligible.tolist()], dtype=np.uint64)
            chosen = eligible[np.argsort(streams(seed, keys, np.zeros(len(keys), dtype=np.uint64)))][: self._completions]
            for index in chosen.tolist():
                each = -(-self._completions // len(chosen))
                marked[index] = replace(requests[index], observe=min(each, requests[index].size))
        return marked

    def learn(self, requests: Sequence[GroupRequest], rollout: Rollout, temperature: float) -> Rollout:
        """Rescore what was kept, under the weights that sampled it, and move the schedule. The report says what came out."""
        completions: list[tuple[NDArray[np.int64], NDArray[np.floating]]] = []
        tails: list[NDArray[np.floating]] = []
        for seen in rollout.observed:
            prompt, completion = requests[seen.group].prompt, rollout.groups[seen.group][seen.member]
            acceptances = rescore(self._policy, prompt, [(completion.tokens, seen.kept)], temperature)[0]
            # The first token comes from the prefill, which is dense; the others were each decoded at the position before their own.
            positions = np.arange(len(prompt), len(prompt) + len(completion) - 1)
            completions.append((positions, acceptances[1:]))
            tails.append(acceptances[1:][is_sparse(positions, self.schedule.budgets_at(positions), PAGE_SIZE)])
        if not completions:
            return rollout
        self._loop.observe(completions)
        measured = np.concatenate(tails)
        report = replace(rollout.report, acceptance_p5=fifth_percentile(measured), schedule_change=self._loop.reason)
        return Rollout(rollout.groups, report, rollout.observed)

    def state(self) -> dict[str, Any]:
        """JSON values for the checkpoint."""
        return self._loop.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, unless another schedule has been chosen since (a calibration, an option): that one begins anew.

        Raises:
            ClosedLoopError: see `ClosedLoop.load_state`.
        """
        if self._loop.starts_as(state):
            self._loop.load_state(state)
