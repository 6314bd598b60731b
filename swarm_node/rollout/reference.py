"""The reference engine: dense attention through the model's own forward, simple enough to judge every other engine by."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_kernels.naive.sampling import draw
from swarm_protocols.group import Completion, Finish

from swarm_node.policy.growing_cache import prefill
from swarm_node.policy.parts import body, cache_argument, head
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout, RolloutReport, check_requests
from swarm_node.rollout.noise import streams, uniforms
from swarm_node.rollout.options import RolloutOptions

_COMPACT_SHARE = 0.25


class ReferenceEngine:
    """Samples whole groups, batch by batch, each batch from prefill to its last stop token."""

    name = "reference"

    def __init__(self, policy: Policy, options: RolloutOptions, choice: str = "engine reference: as asked") -> None:
        self.choices: tuple[str, ...] = (choice,)
        self._policy = policy
        self._max_batch = options.max_batch

    def policy_updated(self, step: int) -> None:
        """Nothing to forget: no cache outlives a call of `generate`."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[GroupRequest], *, seed: int, temperature: float, max_new_tokens: int, dense: bool = True
    ) -> Rollout:
        """Sample every group to its end; it is always dense.

        Raises:
            ValueError: an empty prompt, a group of size 0, or a prompt that leaves no room for `max_new_tokens` in the model's context.
            FloatingPointError: the model's logits are not finite.
        """
        check_requests(requests, max_new_tokens, self._policy.context)
        model = self._policy.model
        training = model.training
        model.eval()
        started = time.perf_counter()
        completions: list[Completion] = []
        idle = steps = 0
        finished_at: list[float] = []
        try:
            for owners, members in self._batches(requests):
                slots = self._decode(requests, owners, members, seed, temperature, max_new_tokens)
                completions += slots.completions()
                finished_at += slots.finished_at.tolist()
                idle += slots.idle
                steps += slots.steps
        finally:
            model.train(training)

        groups, straggling, first = [], 0.0, 0
        for request in requests:
            last = first + request.size
            groups.append(tuple(completions[first:last]))
            times = sorted(finished_at[first:last])
            straggling += times[-1] - times[(request.size - 1) // 2]
            first = last
        report = RolloutReport(
            tokens=sum(map(len, completions)),
            seconds=time.perf_counter() - started,
            slot_idle_share=idle / steps if steps else 0.0,
            straggler_seconds=straggling,
        )
        return Rollout(groups=tuple(groups), report=report)

    def _batches(self, requests: Sequence[GroupRequest]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(request, member) of each slot, in order, at most `max_batch` slots at a time; only a larger group is cut."""
        owners: list[int] = []
        members: list[int] = []
        for index, request in enumerate(requests):
            if owners and len(owners) + request.size > self._max_batch:
                yield np.array(owners), np.array(members)
                owners, members = [], []
            for member in range(request.size):
                if len(owners) == self._max_batch:
                    yield np.array(owners), np.array(members)
                    owners, members = [], []
                owners.append(index)
                members.append(member)
        if owners:
            yield np.array(owners), np.array(members)

    def _decode(
        self,
        requests: Sequence[GroupRequest],
        owners: NDArray[np.int64],
        members: NDArray[np.int64],
        seed: int,
        temperature: float,
        max_new_tokens: int,
    ) -> Slots:
        """Sample one batch; all slots are at the same position of their completions."""
        policy = self._policy
        device = policy.device
        transformer, project = body(policy.model), head(policy.model)
        cache_name = cache_argument(policy.model)
        keys = np.array([request.key % 2**64 for request in requests], dtype=np.uint64)
        noise = streams(seed, keys[owners], members.astype(np.uint64))
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
