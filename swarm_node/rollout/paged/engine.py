"""The sparse engine: continuous batching over a paged cache, dense prefill, decode that reads the pages that its schedule allows."""

from __future__ import annotations

import time
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_kernels.choose import choose_backend
from swarm_kernels.layout import RESERVED_PAGES, PageLayout
from swarm_protocols.group import Finish
from torch import Tensor

from swarm_node.policy.policy import Policy
from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.rollout.engine import (
    Engine,
    GroupRequest,
    Observed,
    Rollout,
    RolloutReport,
    Top,
    by_group,
    completion_streams,
    straggler_seconds,
)
from swarm_node.rollout.noise import uniforms
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.cache import PagedCache, cache_pages
from swarm_node.rollout.paged.runner import ModelRunner
from swarm_node.rollout.paged.scheduler import Scheduler
from swarm_node.rollout.paged.sequence import Prompt, Sequence
from swarm_node.rollout.sparsity.acceptance import top_logprobs
from swarm_node.rollout.sparsity.monitor import Monitor
from swarm_node.rollout.sparsity.schedule import DENSE, Schedule

KEPT_BYTES = 256 * 2**20
"""Of logits that are kept of one completion; where its limit could need more, the top tokens are kept instead."""


class SparseEngine(Engine):
    """Samples whole groups from the sparse actor. The log-probs that it records are those of the actor, whatever it read."""

    name = "sparse"

    def __init__(self, policy: Policy, options: RolloutOptions, schedule: Schedule | None = None, monitor: Monitor | None = None) -> None:
        """`monitor` moves the schedule, and gives the first one. Raises Unsupported when the model's architecture is not known, see
        `rollout.families`."""
        super().__init__(policy, options)
        self.schedule = schedule if monitor is None else monitor.schedule
        self._monitor = monitor
        self.backend = choose_backend(policy.device)
        self.runner = ModelRunner(policy, self.backend.kernels)
        self.choices = (f"engine sparse; {self.backend.reason}",)
        self._cache: PagedCache | None = None
        self._step = 0

    def policy_updated(self, step: int) -> None:
        """Nothing that the old weights computed can be read again."""
        self._step = step
        if self._cache is not None:
            self._cache.policy_updated(step)

    def wear(self, adapter: RolloutAdapter) -> None:
        """In everything that is not asked to be dense."""
        self.runner.adapter = adapter

    def state(self) -> dict[str, Any]:
        """The closed loop's, where there is one."""
        return {} if self._monitor is None else {"closed_loop": self._monitor.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Raises ClosedLoopError when the closed loop cannot go on from it."""
        if self._monitor is not None and "closed_loop" in state:
            self._monitor.load_state(state["closed_loop"])
            self.schedule = self._monitor.schedule

    @torch.inference_mode()
    def _generate(self, requests: Ordered[GroupRequest], seed: int, temperature: float, max_new_tokens: int, dense: bool) -> Rollout:
        started = time.perf_counter()
        monitor = None if dense else self._monitor
        if monitor is not None:
            requests = monitor.mark(requests, seed, max_new_tokens)
        self.runner.prepare()  # lets go of the cache of the call before, which may be too small now
        cache = self._cache_for(requests, max_new_tokens)
        noise = completion_streams(requests, seed)
        prompts = [Prompt(index, request) for index, request in enumerate(requests)]
        scheduler = Scheduler(
            prompts, noise, cache, limit=max_new_tokens, slots=self._options.max_batch, chunk=self._options.prefill_tokens
        )
        work = _Work(slots=min(self._options.max_batch, len(noise)))
        schedule, adapter = self.schedule, self.runner.adapter
        if dense:
            self.schedule = self.runner.adapter = None
        try:
            while scheduler.unfinished:
                self._prefill(scheduler, work)
                self._decode(scheduler, work, temperature, max_new_tokens)
        finally:
            self.schedule, self.runner.adapter = schedule, adapter
            cache.policy_updated(self._step)  # a call that was interrupted leaves no pages behind
        rollout = _collect(scheduler, requests, work, time.perf_counter() - started)
        if monitor is not None:
            rollout = monitor.learn(requests, rollout, temperature)
            self.schedule = monitor.schedule
        return rollout

    def _cache_for(self, requests: Ordered[GroupRequest], max_new_tokens: int) -> PagedCache:
        """The cache, larger than before when these requests can use more. Raises ValueError, see `cache_pages`."""
        anatomy = self.runner.anatomy
        smallest = PageLayout(
            len(anatomy.layers), 1, anatomy.kv_heads, anatomy.head_size, dtype=self._policy.dtype, device=self._policy.device
        )
        pages = cache_pages(smallest, requests, max_new_tokens, self._options)
        if self._cache is None or self._cache.layout.pages < pages:
            self._cache = None  # before the larger one is allocated
            layout = PageLayout(smallest.layers, pages, smallest.kv_heads, smallest.head_size, dtype=smallest.dtype, device=smallest.device)
            self._cache = PagedCache(layout, self._step)
        return self._cache

    def _prefill(self, scheduler: Scheduler, work: _Work) -> None:
        """Compute some tokens of prompts, and of completions that had been preempted."""
        chunks = scheduler.next_chunks()
        if chunks:
            began = time.perf_counter()
            hidden = self.runner.prefill([chunk for _, chunk in chunks], scheduler.cache)
            for (owner, chunk), state in zip(chunks, hidden, strict=True):
                if isinstance(owner, Prompt) and owner.filled == owner.length:
                    owner.hidden = state
                work.prefill_tokens += len(chunk.tokens)
            if self._policy.device.type == "cuda":
                torch.cuda.synchronize(self._policy.device)
            work.prefill_seconds += time.perf_counter() - began
        scheduler.resume()

    def _decode(self, scheduler: Scheduler, work: _Work, temperature: float, limit: int) -> None:
        """One token for every running completion, and the first one for those that begin."""
        batch = scheduler.grow()
        stepping = list(scheduler.running)
        begun = scheduler.start()
        rows = stepping + [sequence for sequence, _ in begun]
        if not rows:
            return
        states = [state[None] for _, state in begun]
        if batch is not None:
            tokens = torch.tensor([sequence.tokens[sequence.count - 1] for sequence in stepping], device=self._policy.device)
            positions = np.array([sequence.length for sequence in stepping], dtype=np.int64)
            budgets = self._budgets(stepping, positions)
            work.count(positions, budgets, scheduler.cache.layout.page_size)
            states.insert(0, self.runner.decode(tokens, positions, batch, scheduler.cache, budgets))
        logits = self.runner.project(torch.cat(states))
        drawn = np.array([sequence.count for sequence in rows])
        numbers = uniforms(np.array([sequence.stream for sequence in rows], dtype=np.uint64), drawn)
        tokens, logprobs = self.runner.kernels.draw(logits, torch.from_numpy(numbers).to(self._policy.device), temperature)
        self._keep(rows, logits, temperature, limit)
        self._record(scheduler, rows, tokens.cpu().numpy(), logprobs.cpu().numpy(), limit)
        work.steps += 1
        work.idle += work.slots - len(rows)

    def _budgets(self, stepping: Ordered[Sequence], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """(B,) pages that each sequence may read besides the reserved three."""
        budgets = np.full(len(positions), DENSE, dtype=np.int32) if self.schedule is None else self.schedule.budgets_at(positions)
        for row, sequence in enumerate(stepping):
            if sequence.prompt.request.budgets is not None:
                budgets[row] = sequence.prompt.request.budgets[sequence.member]
        return budgets

    def _keep(self, rows: Ordered[Sequence], logits: Tensor, temperature: float, limit: int) -> None:
        """Keep what the tokens of observed completions are drawn from."""
        whole = limit * logits.shape[1] * logits.element_size() <= KEPT_BYTES
        for row, sequence in enumerate(rows):
            if sequence.observed:
                kept = logits[row : row + 1]
                sequence.kept.append(kept.cpu() if whole else Top(*(part.cpu() for part in top_logprobs(kept, temperature))))

    def _record(
        self, scheduler: Scheduler, rows: Ordered[Sequence], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], limit: int
    ) -> None:
        now = time.perf_counter()
        stops = self._policy.stop_ids
        ended = []
        for sequence, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.record(token, logprob)
            if token in stops or sequence.count == limit:
                sequence.finish = Finish.STOP if token in stops else Finish.LENGTH
                sequence.finished_at = now
                ended.append(sequence)
        scheduler.retire(ended)


class _Work:
    """What a call has done so far."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.steps = 0
        self.idle = 0
        """Slot-steps without a running completion."""
        self.prefill_tokens = 0
        self.prefill_seconds = 0.0
        self.sparse_tokens = 0
        self.largest_budget = 0

    def count(self, positions: NDArray[np.int64], budgets: NDArray[np.int32], page_size: int) -> None:
        """Note which of a step's tokens read less than everything."""
        sparse = budgets + RESERVED_PAGES < -(-(positions + 1) // page_size)
        self.sparse_tokens += int(sparse.sum())
        self.largest_budget = max(self.largest_budget, int(budgets[sparse].max(initial=0)))


def _collect(scheduler: Scheduler, requests: Ordered[GroupRequest], work: _Work, seconds: float) -> Rollout:
    finished = sorted(scheduler.finished, key=lambda sequence: (sequence.prompt.index, sequence.member))
    tokens = sum(sequence.count for sequence in finished)
    report = RolloutReport(
        tokens=tokens,
        seconds=seconds,
        slot_idle_share=work.idle / (work.slots * work.steps),
        straggler_seconds=straggler_seconds(requests, [sequence.finished_at for sequence in finished]),
        prefill_tokens=work.prefill_tokens,
        prefill_seconds=work.prefill_seconds,
        decode_steps=work.steps,
        preemptions=scheduler.preemptions,
        sparse_share=work.sparse_tokens / tokens,
        largest_budget=work.largest_budget,
    )
    observed = [Observed(sequence.prompt.index, sequence.member, _joined(sequence.kept)) for sequence in finished if sequence.observed]
    return Rollout(by_group(requests, [sequence.completion() for sequence in finished]), report, tuple(observed))


def _joined(kept: list[Tensor | Top]) -> Tensor | Top:
    if isinstance(kept[0], Top):
        return Top(*(torch.cat(parts) for parts in zip(*kept, strict=True)))
    return torch.cat([part for part in kept if isinstance(part, Tensor)])
