"""The engines of this process that the benchmark times: ours, and transformers' own `generate` on the same module."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, GenerationConfig

from swarm_node.experiments.bench.machine import synchronise
from swarm_node.experiments.bench.pace import PacedSchedule, Pacemaker
from swarm_node.experiments.bench.shapes import BenchError, check_tokens
from swarm_node.policy.parts import body, cache_argument, unwrap
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, RolloutReport
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.schedule import DENSE, Schedule

Prompts = Sequence[NDArray[np.int32]]
TEMPERATURE = 1.0


class Contender(Protocol):
    """An engine that samples from nothing."""

    name: str

    def seconds(self, prompts: Prompts, tokens: int) -> float:
        """Seconds of sampling exactly `tokens` for each prompt, prefill and all. Raises BenchError when it sampled others."""


class Rival(Contender, Protocol):
    """An engine that can keep what it computed for the prompts."""

    def resumed_seconds(self, prompts: Prompts, tokens: int) -> float:
        """As `seconds`, but for prompts that the last call was given too, whose keys and values are still there."""


def without_stops(policy: Policy) -> Policy:
    """The same policy with a stop id that cannot be drawn: every completion runs to its limit."""
    return replace(policy, stop_ids=frozenset({policy.vocab_size}))


def cache_bytes(policy: Policy, tokens: int) -> int:
    """Bytes of keys and values of so many tokens."""
    config = unwrap(policy.model).config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * policy.dtype.itemsize * tokens)


class OwnEngine:
    """The sparse engine with dense attention."""

    name = "dense"

    def __init__(self, policy: Policy, prefill_tokens: int) -> None:
        """
        Args:
            policy: Sampled from without its stop tokens.
            prefill_tokens: Computed at once; as many as the prompts of a batch have, so that they begin together.

        Raises:
            Unsupported: the engine does not know the architecture.
        """
        self._policy = without_stops(policy)
        self._engine = SparseEngine(self._policy, RolloutOptions(prefill_tokens=prefill_tokens))

    def seconds(self, prompts: Prompts, tokens: int) -> float:
        """See `Contender.seconds`; a group of one completion for each prompt."""
        return self.group_seconds(prompts, 1, tokens)

    def group_seconds(self, prompts: Prompts, size: int, tokens: int) -> float:
        """Seconds of a group of `size` completions for each prompt."""
        requests = [GroupRequest(prompt, size, key) for key, prompt in enumerate(prompts)]
        synchronise(self._policy.device)
        start = time.perf_counter()
        rollout = self._engine.generate(requests, seed=0, temperature=TEMPERATURE, max_new_tokens=tokens)
        seconds = time.perf_counter() - start
        check_tokens(self.name, rollout.report.tokens, len(prompts) * size * tokens)
        return seconds


def run_paced(policy: Policy, prompts: Prompts, size: int, tokens: int, schedule: Schedule | None, pacemaker: Pacemaker) -> RolloutReport:
    """Sample `tokens` for groups of `size` over each prompt in one call, dense and sparse steps in turn as the pacemaker says.

    Prompts are computed one at a time, each whole, between two decode steps.

    Raises:
        BenchError: the completions gave up their caches for each other; the blocks are of no use then.
    """
    options = RolloutOptions(prefill_tokens=max(16, *map(len, prompts)), max_batch=len(prompts) * size, cache_gib=1 << 20)
    base = schedule or Schedule((DENSE,), 0.5, "dense")
    paced = PacedSchedule(base.pages, base.threshold, base.source, base.model, pacemaker)
    engine = SparseEngine(without_stops(policy), options, paced)
    requests = [GroupRequest(prompt, size, key) for key, prompt in enumerate(prompts)]
    report = engine.generate(requests, seed=0, temperature=TEMPERATURE, max_new_tokens=tokens).report
    if report.preemptions or not pacemaker.finished:
        raise BenchError(f"{report.preemptions} completions were preempted and the blocks are incomplete: their times compare with nothing")
    return report


class TransformersEngine:
    """`model.generate` of transformers at its defaults: greedy, a cache that grows by copies, scaled dot product attention."""

    name = "transformers"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._model: Any = unwrap(policy.model)
        self._cache: DynamicCache | None = None

    def seconds(self, prompts: Prompts, tokens: int) -> float:
        """See `Contender.seconds`; all prompts have one length."""
        return self._generate(prompts, tokens)

    @torch.inference_mode()
    def resumed_seconds(self, prompts: Prompts, tokens: int) -> float:
        """See `Rival.resumed_seconds`. The first call computes the prompts outside of the time that it returns."""
        kept = len(prompts[0]) - 1
        if self._cache is None:
            self._cache = DynamicCache(config=self._model.config)
            name = cache_argument(self._model)
            body(self._model)(input_ids=self._ids(prompts)[:, :kept], use_cache=True, **{name: self._cache})
        seconds = self._generate(prompts, tokens, self._cache)
        self._cache.crop(kept - self._cache.get_seq_length())
        return seconds

    @torch.inference_mode()
    def _generate(self, prompts: Prompts, tokens: int, cache: DynamicCache | None = None) -> float:
        ids = self._ids(prompts)
        kept = {} if cache is None else {cache_argument(self._model): cache}
        before = self._model.generation_config
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # without a stop id
        try:
            synchronise(self._policy.device)
            start = time.perf_counter()
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, use_cache=True, **kept)
            synchronise(self._policy.device)
            seconds = time.perf_counter() - start
        finally:
            self._model.generation_config = before
        check_tokens(self.name, out.numel() - ids.numel(), len(prompts) * tokens)
        return seconds

    def _ids(self, prompts: Prompts) -> torch.Tensor:
        return torch.from_numpy(np.stack(prompts).astype(np.int64)).to(self._policy.device)
