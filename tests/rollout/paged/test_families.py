"""Which linear layers are taken apart, and that one with an adapter computes what peft computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from swarm_kernels.layout import PageLayout
from swarm_kernels.native.backend import NativeKernels
from torch import Tensor, nn

from swarm_node.policy.policy import Policy
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.cache import PagedCache
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.paged.families import layer_weights, plain
from swarm_node.rollout.paged.runner import Chunk
from swarm_node.rollout.sparsity.schedule import DENSE
from tests.support.policies import family_model, random_policy

HAS_STACK = bool(NativeKernels().library.swarm_has_linear())


def adapted_policy(rank: int = 6, **changes: Any) -> Policy:
    """Bfloat16 weights and float32 adapters of some size, as a policy with LoRA has them."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM", **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(family_model("qwen3").to(torch.bfloat16), config).eval()  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
    return replace(random_policy(model=model), dtype=torch.bfloat16)  # type: ignore[arg-type]


def states(policy: Policy, rows: int) -> Tensor:
    """After a prompt, and after one more token."""
    runner = SparseEngine(policy, RolloutOptions()).runner
    runner.prepare()
    assert (runner._stack is not None) == HAS_STACK
    cache = PagedCache(PageLayout(4, 64, 2, 32))
    sequence = cache.open(rows)
    prompt = runner.prefill([Chunk(sequence, np.random.default_rng(0).integers(4, 64, rows).astype(np.int32), 0)], cache)
    budgets, positions = np.full(1, DENSE, dtype=np.int32), np.array([rows])
    return torch.cat([prompt, runner.decode(torch.tensor([7]), positions, cache.grow([sequence]), cache, budgets)]).float()


@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("rank", [1, 6, 16])
def test_an_adapter_in_the_one_call_adds_what_peft_adds(rows: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted_policy(rank)
    with torch.inference_mode():
        together = states(policy, rows)
        monkeypatch.setitem(globals(), "HAS_STACK", False)
        monkeypatch.setattr(NativeKernels, "stack", lambda *_: None)
        called = states(policy, rows)
        with policy.model.disable_adapter():  # type: ignore[operator]
            without = states(policy, rows)
    torch.testing.assert_close(together, called, atol=0.05, rtol=0.02)
    assert float((without - called).abs().max()) > 0.5


def test_an_adapter_is_read_anew_at_each_look() -> None:
    policy = adapted_policy()
    with torch.inference_mode():
        before = states(policy, 40)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(-1)
    with torch.inference_mode():
        assert float((states(policy, 40) - before).abs().max()) > 0.5


def _train(layer: nn.Module) -> None:
    layer.train()


def _merge(layer: nn.Module) -> None:
    layer.merge()  # type: ignore[operator]


def _disable(layer: nn.Module) -> None:
    layer.enable_adapters(False)  # type: ignore[operator]


def _hook(layer: nn.Module) -> None:
    layer.lora_A["default"].register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("changes", "touch"),
    [({"lora_dropout": 0.5}, _train), ({}, _merge), ({}, _disable), ({}, _hook), ({"use_dora": True}, None), ({"lora_bias": True}, None)],
    ids=["dropout", "merged", "disabled", "hook", "DoRA", "bias"],
)
def test_what_is_more_than_an_adapter_is_called(changes: dict[str, Any], touch: Callable[[nn.Module], None] | None) -> None:
    layers = SparseEngine(adapted_policy(**changes), RolloutOptions()).runner.anatomy.layers
    if touch is not None:
        assert layer_weights(layers[1], selects=False) is not None
        touch(layers[1].down)
    assert layer_weights(layers[1], selects=False) is None


def test_an_adapter_is_described_by_its_own_tensors() -> None:
    layer = SparseEngine(adapted_policy(rank=6), RolloutOptions()).runner.anatomy.layers[0]
    found = layer_weights(layer, selects=True)
    assert found is not None
    assert found.selects
    assert found.up.adapter is not None
    assert (found.up.adapter.scale, found.up.adapter.a.shape, found.up.adapter.b.shape) == (2.0, (6, 64), (found.up.weight.shape[0], 6))
    assert found.up.adapter.a.data_ptr() == layer.up.lora_A["default"].weight.data_ptr()  # type: ignore[index, union-attr]
    assert plain(layer.up) is None
