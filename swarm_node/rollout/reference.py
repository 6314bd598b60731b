"""The reference engine: dense attention through the model's own forward, simple enough to judge every other engine by."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_kernels.naive.sampling import draw
from swarm_protocols.group import Completion, Finish

from swarm_node.policy.growing_cache import prefill
from swarm_node.policy.parts import body, cache_argument, head
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import Engine, GroupRequest, Rollout, RolloutReport, by_group, completion_streams, straggler_seconds
from swarm_node.rollout.noise import uniforms
from swarm_node.rollout.options import RolloutOptions

_COMPACT_SHARE = 0.25


class ReferenceEngine(Engine):
    """Samples whole groups, batch by batch, each batch from prefill to its last stop token. It is always dense."""

    name = "reference"

    def __init__(self, policy: Policy, options: RolloutOptions, choice: str = "engine reference: as asked") -> None:
        super().__init__(policy, options)
        self.choices = (choice,)

    def policy_updated(self, step: int) -> None:
        """Nothing to forget: no cache outlives a call of `generate`."""

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GroupRequest], seed: int, temperature: float, max_new_tokens: int, dense: bool) -> Rollout:
        started = time.perf_counter()
        owners = np.repeat(np.arange(len(requests)), [request.size for request in requests])
        noise = completion_streams(requests, seed)
        done = [
            self._decode(requests, owners[batch], noise[batch], temperature, max_new_tokens)
            for batch in batches([request.size for request in requests], self._options.max_batch)
        ]
        completions = [completion for slots in done for completion in slots.completions()]
        report = RolloutReport(
            tokens=sum(map(len, completions)),
            seconds=time.perf_counter() - started,
            slot_idle_share=sum(slots.idle for slots in done) / sum(slots.steps for slots in done),
            straggler_seconds=straggler_seconds(requests, np.concatenate([slots.finished_at for slots in done]).tolist()),
        )
        return Rollout(by_group(requests, completions), report)

    def _decode(
        self,
        requests: Sequence[GroupRequest],
        owners: NDArray[np.int64],
        noise: NDArray[np.uint64],
        temperature: float,
        max_new_tokens: int,
    ) -> Slots:
        """Sample one batch; all slots are at the same position of their completions.

        Args:
            requests: All of the call.
            owners: (B,), the request that each slot belongs to.
            noise: (B,), the slots' random streams.
            temperature: Divides the logits.
            max_new_tokens: Positions at most.
        """
        policy = self._policy
        device = policy.device
        transformer, project = body(policy.model), head(policy.model)
        cache_name = cache_argument(policy.model)
        slots = self._slots(owners, max_new_tokens)

        distinct, prompt_of = np.unique(owners, return_inverse=True)
        hidden, cache, mask, lengths = prefill(policy.model, [requests[index].prompt for index in distinct], max_new_tokens)
        rows = torch.from_numpy(prompt_of).to(device)
        hidden, mask, lengths = hidden[rows], mask[rows], lengths[rows]
        cache.batch_select_indices(rows)
        width = mask.shape[1] - max_new_tokens

        for position in range(max_new_tokens):
            numbers = torch.from_numpy(uniforms(noise[slots.active], position)).to(device)
            tokens, logprobs = draw(project(hidden), numbers, temperature)
            slots.record(position, tokens.cpu().numpy(), logprobs.cpu().numpy())
            if slots.all_finished or position + 1 == max_new_tokens:
                break
            if slots.finished_share >= _COMPACT_SHARE:
                alive = torch.from_numpy(slots.compact()).to(device)
                tokens, mask, lengths = tokens[alive], mask[alive], lengths[alive]
                cache.batch_select_indices(alive)
            output = transformer(
                input_ids=tokens[:, None],
                attention_mask=mask[:, : width + position + 1],
                position_ids=(lengths + position)[:, None],
                use_cache=True,
                **{cache_name: cache},
            )
            hidden = output.last_hidden_state[:, -1]
        return slots

    def _slots(self, owners: NDArray[np.int64], max_new_tokens: int) -> Slots:
        """The bookkeeping of one batch, given which request each slot belongs to."""
        return Slots(len(owners), max_new_tokens, self._policy.stop_ids)


def batches(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Which completions of groups of these sizes are decoded together: as many groups as make up `limit`; only a larger group is cut."""
    first = last = 0
    for size in sizes:
        if last - first + size > limit and last > first:
            yield slice(first, last)
            first = last
        last += size
        while last - first > limit:
            yield slice(first, first + limit)
            first += limit
    yield slice(first, last)


class Slots:
    """One slot a completion. Slots leave the computed batch by `compact` some time after they finished."""

    def __init__(self, count: int, max_new_tokens: int, stop_ids: Iterable[int]) -> None:
        self.active: NDArray[np.int64] = np.arange(count)
        """The slots that the model still computes, in the order of its batch."""
        self.finished_at: NDArray[np.float64] = np.zeros(count)
        """`time.perf_counter` when each slot finished."""
        self.idle = 0
        """Slot-steps in which a finished slot was computed."""
        self.steps = 0
        """Slot-steps in all."""
        self._tokens = np.zeros((count, max_new_tokens), dtype=np.int32)
        self._logprobs = np.zeros((count, max_new_tokens), dtype=np.float32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._stopped = np.zeros(count, dtype=bool)
        self._limit = max_new_tokens
        self._stop_ids = np.array(sorted(stop_ids))

    @property
    def all_finished(self) -> bool:
        """Whether every slot has stopped; one at the token limit has not."""
        return bool(self._stopped.all())

    @property
    def finished_share(self) -> float:
        """Of the slots that are computed now, how many have finished."""
        return float(self._stopped[self.active].mean())

    def record(self, position: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Store what the active slots drew at `position`, unless they had finished before."""
        running = ~self._stopped[self.active]
        slots, tokens, logprobs = self.active[running], tokens[running], logprobs[running]
        self.steps += len(self.active)
        self.idle += len(self.active) - len(slots)
        self._tokens[slots, position] = tokens
        self._logprobs[slots, position] = logprobs
        self._lengths[slots] = position + 1
        stopped = np.isin(tokens, self._stop_ids)
        self._stopped[slots[stopped]] = True
        ended = slots if position + 1 == self._limit else slots[stopped]
        self.finished_at[ended] = time.perf_counter()

    def compact(self) -> NDArray[np.int64]:
        """Forget the finished slots; returns which rows of the batch stay."""
        alive = np.flatnonzero(~self._stopped[self.active])
        self.active = self.active[alive]
        return alive

    def completions(self) -> list[Completion]:
        """What every slot drew, in the order of the slots."""
        return [
            Completion(
                tokens=self._tokens[slot, :length].copy(),
                logprobs=self._logprobs[slot, :length].copy(),
                finish=Finish.STOP if self._stopped[slot] else Finish.LENGTH,
            )
            for slot, length in enumerate(self._lengths)
        ]
