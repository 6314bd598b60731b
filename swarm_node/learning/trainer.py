"""The trainer: one optimiser step on a batch of groups, resumable to the bit."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarm_node.learning.ftis import Tokens, completion_weights, ftis_loss, keep_mask
from swarm_node.learning.optimiser import Optimiser
from swarm_node.learning.options import LearningOptions
from swarm_node.learning.report import StepReport
from swarm_node.learning.samples import Batch, Sample, micro_batches, prepare
from swarm_node.learning.scored import ScoredGroup
from swarm_node.learning.statistics import LossMetrics, RowStatistics, summarise
from swarm_node.policy.logprobs import completion_logprobs

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5
SMALL_MODEL = 10_000_000
"""Models with fewer parameters move too slowly at these rates, and stand a hundred times more (`docs/models.md`)."""


class LearnablePolicy(Protocol):
    """What the trainer needs of `swarm_node.policy.policy.Policy`."""

    model: nn.Module
    device: torch.device
    lora: bool

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name -> parameter that the optimiser changes."""


def default_learning_rate(policy: LearnablePolicy) -> float:
    """The rate of a policy whose options name none."""
    small = sum(parameter.numel() for parameter in policy.model.parameters()) < SMALL_MODEL
    return (LORA_LEARNING_RATE if policy.lora else FULL_LEARNING_RATE) * (100 if small else 1)


class OutOfMemory(ValueError):
    """Memory does not suffice for a single completion that this node made."""


@dataclass(frozen=True)
class _Pass:
    """One forward and backward over a whole batch; the gradient is in the parameters."""

    loss: float
    rows: RowStatistics
    own: Tensor
    """bool (C,): which rows are own."""
    theta: dict[Sample, Tensor]
    """Detached log-probs by sample, on the CPU."""
    micro_batches: int


class Trainer:
    """Learns from groups by the configured algorithm. Deterministic to the bit on one thread."""

    def __init__(self, policy: LearnablePolicy, options: LearningOptions) -> None:
        self.options = options
        self.steps = 0
        """Optimiser steps taken."""
        self._policy = policy
        self._budget = options.tokens_per_micro_batch
        self._optimiser = Optimiser(policy.trainable(), options)
        self._base_rate = options.learning_rate or default_learning_rate(policy)
        self._autocast = options.autocast == "on" or (
            options.autocast == "auto" and policy.device.type == "cuda" and torch.cuda.is_bf16_supported()
        )

    @property
    def learning_rate(self) -> float:
        """Of the next optimiser step: linear warm-up, then constant."""
        warmup = self.options.warmup_steps
        return self._base_rate * (min(1.0, (self.steps + 1) / warmup) if warmup else 1.0)

    def step(self, groups: Sequence[ScoredGroup], before_update: Callable[[], None] = lambda: None) -> StepReport:
        """Take `inner_steps` optimiser steps on the groups; none, and no scheduler step, when nothing can be learned from them.

        Args:
            groups: own and foreign ones, scored; those without a difference in reward teach nothing and are counted.
            before_update: called right before each change of the weights; until its first call the step can be abandoned by an exception.

        Raises:
            OutOfMemory: not even one completion at a time fits, and it is an own one. The group of a foreign one is left out.
        """
        started = time.perf_counter()
        batch = prepare(groups, self.options)
        report = StepReport(
            step=self.steps,
            own_groups=batch.own_groups,
            foreign_groups=batch.foreign_groups,
            zero_variance_groups=batch.zero_variance_groups,
            small_groups=batch.small_groups,
            unscored_completions=batch.unscored,
        )
        if not batch.samples:
            return replace(report, skipped=_nothing_to_learn(len(groups), batch), seconds=time.perf_counter() - started)
        old: dict[Sample, Tensor] | None = None
        groups_before = len(batch.group_sizes)
        retries = tokens = 0
        for _ in range(self.options.inner_steps):
            done, batch, retried = self._accumulate_within_memory(batch, old)
            retries += retried
            report = replace(report, memory_retries=retries, dropped_for_memory=groups_before - len(batch.group_sizes))
            if done is None:
                skipped = "out of memory: not one completion of any group fits, and all are foreign"
                break
            old = old or done.theta
            metrics = summarise(done.rows)
            tokens += metrics.tokens
            report = replace(
                report,
                loss=done.loss,
                metrics=metrics,
                foreign_metrics=summarise(done.rows.select(~done.own)),
                micro_batches=done.micro_batches,
                tokens=tokens,
            )
            skipped, norm, rate = self._update(metrics, before_update)
            report = replace(report, step=self.steps, grad_norm=norm, learning_rate=rate)
            if skipped:
                break
            report = replace(report, stepped=True)
        return replace(report, skipped="" if report.stepped else skipped, seconds=time.perf_counter() - started)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimiser as float32 tensors by name, and JSON scalars. The weights themselves are the policy's to save."""
        return self._optimiser.state_dict(), self.scalars()

    def scalars(self) -> dict[str, Any]:
        """The JSON part of `state_dict`, without copying a tensor."""
        return {"steps": self.steps, "tokens_per_micro_batch": self._budget}

    def load_state_dict(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, to the bit, once the policy's weights are loaded.

        Raises:
            ValueError: the state is of another model, mode or dtype.
        """
        self._optimiser.load_state_dict(tensors)
        self.steps = int(scalars["steps"])
        self._budget = int(scalars["tokens_per_micro_batch"])

    def _update(self, metrics: LossMetrics, before_update: Callable[[], None]) -> tuple[str, float, float]:
        """Take the optimiser step. Returns why not (empty if it was taken), the gradient's norm, and the learning rate."""
        rate = self.learning_rate
        if metrics.kept == 0:
            self._optimiser.clear()
            return f"no kept token: the filter dropped all {metrics.completions} completions", 0.0, rate
        before_update()
        norm = self._optimiser.step(rate)
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}: the policy's log-probs overflowed", norm, rate
        self.steps += 1
        return "", norm, rate

    def _accumulate_within_memory(self, batch: Batch, old: Mapping[Sample, Tensor] | None) -> tuple[_Pass | None, Batch, int]:
        """`_accumulate`, redone from the start with half the micro-batch whenever memory runs out; the gradient is the same.

        Where one foreign completion alone is too much, its group leaves the batch: a peer must not be able to end this node. Returns
        the pass (None when no group is left), the batch that it was over, and how often memory ran out.
        """
        retries = 0
        while batch.samples:
            try:
                return self._accumulate(batch, old), batch, retries
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                reason = str(error)
            # Outside the handler, whose traceback would keep the graph alive.
            self._optimiser.clear()
            if self._policy.device.type == "cuda":
                torch.cuda.empty_cache()
            retries += 1
            lengths = [len(sample) for sample in batch.samples]
            largest = max(len(rows) * max(lengths[row] for row in rows) for rows in micro_batches(lengths, self._budget))
            if largest > max(lengths):
                self._budget = largest // 2
                continue
            longest = max(range(len(lengths)), key=lambda row: (lengths[row], not batch.samples[row].own))
            if batch.samples[longest].own:
                raise OutOfMemory(
                    f"out of memory with one completion of {lengths[longest]} tokens (prompt included) at a time: "
                    f"lower max_new_tokens, choose a smaller model, or train with LoRA ({reason})"
                )
            batch = _without_group_of(batch, longest)
        return None, batch, retries

    def _accumulate(self, batch: Batch, old: Mapping[Sample, Tensor] | None) -> _Pass:
        self._optimiser.clear()
        samples = batch.samples
        parts = micro_batches([len(sample) for sample in samples], self._budget)
        keep = torch.ones(len(samples), dtype=torch.bool)
        if self.options.normalizer == "kept":
            # How many are kept is in everyone's denominator, so it must be known before the first backward.
            with torch.no_grad():
                for rows in parts:
                    keep[rows] = keep_mask(self._tokens([samples[row] for row in rows], old), self.options)
        lengths = torch.tensor([len(sample.completion) for sample in samples])
        weights = completion_weights(lengths, torch.tensor(batch.group_sizes), batch.counted_groups, keep, self.options)
        losses: list[float] = []
        statistics: list[RowStatistics] = []
        theta_of: dict[Sample, Tensor] = {}
        for rows in parts:
            chosen = [samples[row] for row in rows]
            tokens = self._tokens(chosen, old)
            loss, seen = ftis_loss(tokens, weights[rows], self.options)
            if seen.keep.any():
                loss.backward()
                losses.append(float(loss.detach()))
                self._optimiser.collect()
            statistics.append(seen)
            theta_of.update(zip(chosen, tokens.theta.detach().split(tokens.lengths.tolist()), strict=True))
        order = [row for rows in parts for row in rows]
        return _Pass(
            loss=math.fsum(losses),
            rows=RowStatistics.concatenate(statistics),
            own=torch.tensor([samples[row].own for row in order]),
            theta=theta_of,
            micro_batches=len(parts),
        )

    def _tokens(self, samples: Sequence[Sample], old: Mapping[Sample, Tensor] | None) -> Tokens:
        """What the loss reads of some samples, on the CPU: the loss costs nothing beside the forward."""
        pairs = [(sample.prompt, sample.completion) for sample in samples]
        with torch.autocast(self._policy.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            parts = completion_logprobs(self._policy.model, pairs, temperature=[sample.temperature for sample in samples])
        theta = torch.cat(parts).cpu()
        return Tokens(
            theta=theta,
            gen=torch.cat([sample.gen for sample in samples]),
            old=theta.detach() if old is None else torch.cat([old[sample] for sample in samples]),
            lengths=torch.tensor([len(sample.completion) for sample in samples]),
            advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
            truncated=torch.tensor([sample.truncated for sample in samples]),
        )


def _without_group_of(batch: Batch, row: int) -> Batch:
    """The batch as if the group that sample `row` belongs to had never arrived."""
    ends = list(accumulate(batch.group_sizes))
    number = bisect_right(ends, row)
    end = ends[number]
    return replace(
        batch,
        samples=batch.samples[: end - batch.group_sizes[number]] + batch.samples[end:],
        group_sizes=batch.group_sizes[:number] + batch.group_sizes[number + 1 :],
        counted_groups=batch.counted_groups - 1,
    )


def _nothing_to_learn(groups: int, batch: Batch) -> str:
    if groups == 0:
        return "no groups"
    return f"no advantage: of {groups} groups {batch.zero_variance_groups} have one reward and {batch.small_groups} fewer than two rewards"


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA has a type for it; the CPU's allocator only a message."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
