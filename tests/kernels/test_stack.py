"""All layers in one call: the results of the single kernels, bit for bit, and where there is no such call."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from swarm_kernels.interface import DecodeStep, LayerWeights, LinearWeight, LowRank, NormWeight, PromptStep
from swarm_kernels.layout import PageLayout, allocate
from swarm_kernels.native.backend import NativeKernels
from swarm_kernels.native.stack import fits

from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged import engine as paged_engine
from swarm_node.rollout.paged.cache import PagedCache
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.schedule import Schedule
from tests.support.policies import family_model, random_policy

HAS_STACK = bool(NativeKernels().library.swarm_has_linear())
WIDTH, HEADS, KV_HEADS, SIZE, INNER = 64, 4, 2, 32, 96
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}


def bfloat_policy(family: str, **changes: Any) -> Policy:
    model = family_model(family, **changes).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))).to(parameter) / 4)
    return replace(random_policy(model=model), dtype=torch.bfloat16)


def generate(engine: SparseEngine) -> Rollout:
    draws = np.random.default_rng(0)
    requests = [GroupRequest(draws.integers(4, 64, length).astype(np.int32), size, length) for length, size in ((300, 3), (9, 4), (64, 17))]
    return engine.generate(requests, seed=1, temperature=1.0, max_new_tokens=40)


@pytest.mark.parametrize("schedule", [None, Schedule((2,), 0.86, "test")], ids=["dense", "sparse"])
@pytest.mark.parametrize("case", FAMILIES)
def test_one_call_computes_what_the_single_kernels_compute(case: str, schedule: Schedule | None, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bfloat_policy(case.partition(",")[0], **FAMILIES[case])
    engine = SparseEngine(policy, RolloutOptions(), schedule)
    together = generate(engine)
    assert (engine.runner._stack is not None) == HAS_STACK
    monkeypatch.setattr(NativeKernels, "stack", lambda *_: None)
    apart = generate(engine)
    assert engine.runner._stack is None
    assert (together.report.sparse_share > 0) == (schedule is not None)
    for group, other in zip(together.groups, apart.groups, strict=True):
        for a, b in zip(group, other, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_dense_and_sparse_calls_may_alternate() -> None:
    engine = SparseEngine(bfloat_policy("llama"), RolloutOptions(), Schedule((2,), 0.86, "test"))
    requests = [GroupRequest(np.arange(4, 54, dtype=np.int32).repeat(3), 3, 0)]
    arguments: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_new_tokens": 40}
    sparse, dense, again = (engine.generate(requests, **arguments, dense=dense) for dense in (False, True, False))
    assert dense.report.sparse_share == 0 < sparse.report.sparse_share
    for before, between, after in zip(*(rollout.groups[0] for rollout in (sparse, dense, again)), strict=True):
        assert before.logprobs.tolist() == after.logprobs.tolist() != between.logprobs.tolist()
    fresh = SparseEngine(engine._policy, RolloutOptions()).generate(requests, **arguments)
    assert [c.logprobs.tolist() for c in fresh.groups[0]] == [c.logprobs.tolist() for c in dense.groups[0]]


def test_weights_that_are_written_to_are_seen() -> None:
    policy = bfloat_policy("llama")
    engine = SparseEngine(policy, RolloutOptions())
    before = generate(engine)
    with torch.no_grad():
        policy.model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(3)
    changed = generate(engine)
    fresh = generate(SparseEngine(policy, RolloutOptions()))
    assert changed.groups[0][0].logprobs.tolist() == fresh.groups[0][0].logprobs.tolist() != before.groups[0][0].logprobs.tolist()


def test_the_old_cache_is_free_before_a_larger_one_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SparseEngine(bfloat_policy("llama"), RolloutOptions())
    engine.generate([GroupRequest(np.arange(4, 20, dtype=np.int32), 1, 0)], seed=1, temperature=1.0, max_new_tokens=8)
    assert engine._cache is not None
    old, freed = weakref.ref(engine._cache.layers[0]), []

    class Watched(PagedCache):
        def __init__(self, layout: PageLayout, step: int = 0) -> None:
            freed.append(old() is None)
            super().__init__(layout, step)

    monkeypatch.setattr(paged_engine, "PagedCache", Watched)
    generate(engine)
    assert freed == [True]


def test_weights_that_moved_are_found_by_the_next_call() -> None:
    policy = bfloat_policy("llama")
    engine = SparseEngine(policy, RolloutOptions())
    generate(engine)
    linear = policy.model.get_submodule("model.layers.1.mlp.down_proj")
    linear.weight = torch.nn.Parameter(linear.get_parameter("weight").detach() * 3)
    fresh = generate(SparseEngine(policy, RolloutOptions()))
    assert generate(engine).groups[0][0].logprobs.tolist() == fresh.groups[0][0].logprobs.tolist()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)


def adapted(a: torch.Tensor, b: torch.Tensor) -> LinearWeight:
    return LinearWeight(random(INNER, WIDTH), adapter=LowRank(a, b, 2.0))


def layer(**changes: Any) -> LayerWeights:
    norm = NormWeight(random(WIDTH), 1e-5)
    parts: dict[str, Any] = {
        "input_norm": norm,
        "query": LinearWeight(random(HEADS * SIZE, WIDTH)),
        "key": LinearWeight(random(KV_HEADS * SIZE, WIDTH)),
        "value": LinearWeight(random(KV_HEADS * SIZE, WIDTH)),
        "query_norm": None,
        "key_norm": None,
        "output": LinearWeight(random(WIDTH, HEADS * SIZE)),
        "middle_norm": norm,
        "gate": LinearWeight(random(INNER, WIDTH)),
        "up": LinearWeight(random(INNER, WIDTH)),
        "down": LinearWeight(random(WIDTH, INNER)),
        "scale": SIZE**-0.5,
        "window": 0,
        "rotary": False,
        "selects": False,
    }
    return LayerWeights(**parts | changes)


@pytest.mark.parametrize(
    "other",
    [
        layer(gate=LinearWeight(random(INNER, WIDTH).float())),
        layer(gate=LinearWeight(random(WIDTH, INNER).t())),
        layer(gate=LinearWeight(random(INNER, WIDTH), random(INNER).float())),
        layer(
            gate=LinearWeight(random(INNER + 8, WIDTH)),
            up=LinearWeight(random(INNER + 8, WIDTH)),
            down=LinearWeight(random(WIDTH, INNER + 8)),
        ),
        layer(gate=LinearWeight(random(64, WIDTH)), up=LinearWeight(random(64, WIDTH)), down=LinearWeight(random(WIDTH, 64))),
        layer(gate=adapted(random(4, WIDTH), random(INNER, 4))),
        layer(gate=adapted(random(4, WIDTH).float(), random(INNER - 1, 4).float())),
        layer(gate=adapted(random(4, WIDTH - 1).float(), random(INNER, 4).float())),
        layer(gate=adapted(random(4, WIDTH).float(), random(INNER, 5).float())),
        layer(gate=adapted(random(4, WIDTH).float(), random(4, INNER).float().t())),
    ],
    ids=[
        "float32",
        "not contiguous",
        "float32 bias",
        "odd width",
        "layers that differ",
        "bfloat16 adapter",
        "adapter with too few outputs",
        "adapter with too few inputs",
        "adapter of two ranks",
        "adapter that is not contiguous",
    ],
)
def test_other_weights_have_no_such_call(other: LayerWeights) -> None:
    norm = NormWeight(random(WIDTH), 1e-5)
    assert fits([layer(), layer(gate=adapted(random(4, WIDTH).float(), random(INNER, 4).float()))], norm)
    assert not fits([layer(), other], norm)
    assert NativeKernels().stack([layer(), other], norm) is None


@pytest.mark.skipif(not HAS_STACK, reason="this processor has no matrix unit for bf16")
def test_what_does_not_fit_the_stack_is_refused_before_anything_is_read() -> None:
    stack = NativeKernels().stack([layer()], NormWeight(random(WIDTH), 1e-5))
    assert stack is not None
    caches = allocate(PageLayout(1, 4, KV_HEADS, SIZE))
    table, length, slot = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    step = DecodeStep(table, length, slot, scale=1.0)
    assert stack.decode(step, caches, random(1, WIDTH)).shape == (1, WIDTH)
    with pytest.raises(ValueError, match="hidden states"):
        stack.decode(step, caches, random(1, WIDTH + 32))
    with pytest.raises(ValueError, match="hidden states"):
        stack.decode(step, caches, random(1, WIDTH).float())
    bounds, start = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    prompt = PromptStep(table, bounds, start, torch.arange(3), random(3, SIZE), random(3, SIZE))
    assert stack.prefill(prompt, caches, random(3, WIDTH)).shape == (3, WIDTH)
    with pytest.raises(ValueError, match=r"bounds are \[0, 3\]; expected ascending numbers from 0 to the 2 tokens"):
        stack.prefill(prompt, caches, random(2, WIDTH))
    with pytest.raises(ValueError, match="18 tokens does not fit into the 1 pages"):
        stack.prefill(replace(prompt, starts=start + 15), caches, random(3, WIDTH))
    with pytest.raises(ValueError, match="2 layers"):
        stack.decode(step, allocate(PageLayout(2, 4, KV_HEADS, SIZE)), random(1, WIDTH))
    with pytest.raises(ValueError, match="layers of a cache"):
        stack.decode(step, allocate(PageLayout(1, 4, KV_HEADS, 64)), random(1, WIDTH))


@pytest.mark.parametrize("schedule", [None, Schedule((2,), 0.86, "test")], ids=["dense", "sparse"])
def test_the_number_of_threads_changes_nothing(schedule: Schedule | None) -> None:
    policy, found = bfloat_policy("qwen3"), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            rollout = generate(SparseEngine(policy, RolloutOptions(), schedule))
            found.append([c.logprobs.tolist() for group in rollout.groups for c in group])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]
