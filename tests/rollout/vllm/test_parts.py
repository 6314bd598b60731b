"""What surrounds vLLM and needs none: merged weights, seeds, the plan of its cache, what is refused. The rest is in tests/with_vllm."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from swarm_protocols.group import Finish
from torch import nn

from swarm_node.cli.app import is_bad_input
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.rollout.create import create_engine
from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.vllm.engine import StaleWeights, VllmEngine, _completion, _Work, completion_seeds
from swarm_node.rollout.vllm.start import CachePlan, VllmError, check_device, plan_cache
from swarm_node.rollout.vllm.weights import merged_weights
from tests.support.policies import random_model, random_policy


def adapted(dtype: str = "float32") -> nn.Module:
    """tiny-s with adapters that do something."""
    model = load_policy(ModelOptions(name="tiny-s", lora=True, lora_rank=3, lora_alpha=7, dtype=dtype, device="cpu")).model
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def test_absent_vllm_is_the_user_s_to_mend_and_one_line_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(VllmError) as caught:
        create_engine(random_policy(), RolloutOptions(engine="vllm"))
    assert is_bad_input(caught.value)
    assert "make setup-vllm" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_adapters_the_weights_are_the_model_s_own_uncopied_under_their_own_names() -> None:
    model = random_model()
    weights = dict(merged_weights(model))
    assert weights.keys() == dict(model.named_parameters()).keys()
    assert all(weights[name].data_ptr() == parameter.data_ptr() for name, parameter in model.named_parameters())
    assert not any(weight.requires_grad for weight in weights.values())


def test_merged_weights_have_the_base_model_s_names_and_are_w_plus_alpha_over_rank_b_a() -> None:
    model = adapted()
    base = load_policy(ModelOptions(name="tiny-s", dtype="float32", device="cpu")).model
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    weights = dict(merged_weights(model))
    assert weights.keys() == dict(base.named_parameters()).keys()
    path = "model.layers.1.mlp.down_proj"
    a, b = (before[f"base_model.model.{path}.lora_{factor}.default.weight"] for factor in "AB")
    expected = before[f"base_model.model.{path}.base_layer.weight"] + 7 / 3 * b @ a
    torch.testing.assert_close(weights[f"{path}.weight"], expected, rtol=0, atol=1e-6)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.5)])
def test_a_plain_model_with_merged_weights_computes_what_the_adapted_one_computes(dtype: str, tolerance: float) -> None:
    model = adapted(dtype)
    plain = load_policy(ModelOptions(name="tiny-s", dtype=dtype, device="cpu")).model
    ids = torch.arange(4, 24)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        untouched = plain(input_ids=ids).logits
        plain.load_state_dict(dict(merged_weights(model)), strict=False)
        merged = plain(input_ids=ids).logits
    assert (untouched - expected).abs().max() > 4 * tolerance
    torch.testing.assert_close(merged, expected, rtol=0, atol=tolerance)


def test_an_adapter_that_is_switched_off_or_merged_already_is_not_added() -> None:
    model: Any = adapted()
    path = "model.layers.0.self_attn.q_proj"
    base = model.get_submodule(f"base_model.model.{path}.base_layer").weight.clone()
    with model.disable_adapter():
        assert torch.equal(dict(merged_weights(model))[f"{path}.weight"], base)
    once = dict(merged_weights(model))[f"{path}.weight"]
    model.merge_adapter()
    torch.testing.assert_close(dict(merged_weights(model))[f"{path}.weight"], once, rtol=0, atol=1e-6)


def test_every_completion_has_a_seed_of_its_own_from_seed_key_and_member() -> None:
    prompt = np.array([5], dtype=np.int32)
    seeds = [completion_seeds([GroupRequest(prompt, 5, key)], seed) for seed in (1, 2) for key in (0, 7, 2**63 + 1)]
    assert len(set(np.concatenate(seeds).tolist())) == 30
    assert min(map(int, np.concatenate(seeds))) >= 0
    both = completion_seeds([GroupRequest(prompt, 3, 7), GroupRequest(prompt, 5, 0)], 1)
    assert np.array_equal(both, np.concatenate([seeds[1][:3], seeds[0]]))


def test_the_cache_is_what_full_completions_need_within_what_is_allowed() -> None:
    policy = random_policy()  # two layers, two KV heads of 12 values, float32: 384 bytes a token; a context of 512
    small = RolloutOptions(max_batch=3)
    assert plan_cache(policy, small, returned=True) == CachePlan(384 * (3 * (512 + 128) + 256), 512)
    tight = RolloutOptions(max_batch=3, cache_gib=384 * 600 / 2**30)
    assert plan_cache(policy, tight, returned=True) == CachePlan(384 * 600, 600 - 3 * 128)
    with pytest.raises(VllmError, match=r"raise rollout\.cache_gib"):
        plan_cache(policy, RolloutOptions(cache_gib=384 * 500 / 2**30), returned=True)


@pytest.mark.parametrize("where", ["cuda:1", "cuda", "mps"])
def test_a_policy_elsewhere_than_vllm_is_refused(where: str) -> None:
    platform = SimpleNamespace(device_type="cuda" if where == "cuda:1" else "cpu")
    vllm = SimpleNamespace(platforms=SimpleNamespace(current_platform=platform))
    with pytest.raises(VllmError, match=r"set model\.device"):
        check_device(vllm, torch.device(where))
    check_device(vllm, torch.device(platform.device_type, 0))


def output(**changes: Any) -> Any:
    values = {"token_ids": [5, 6, 2], "finish_reason": "stop"} | changes
    logprobs = values.pop("logprobs", [-1.0, -2.0, -0.5])
    return SimpleNamespace(**values, logprobs=SimpleNamespace(token_ids=[5, 6, 2], logprobs=logprobs))


def test_an_output_becomes_a_completion_or_an_error_but_never_a_guess() -> None:
    completion = _completion(output())
    assert completion.tokens.tolist() == [5, 6, 2]
    assert completion.logprobs.tolist() == [-1.0, -2.0, -0.5]
    assert completion.finish is Finish.STOP
    assert _completion(output(finish_reason="length")).finish is Finish.LENGTH
    with pytest.raises(RuntimeError, match="'abort'"):
        _completion(output(finish_reason="abort"))
    with pytest.raises(RuntimeError, match="2 tokens and 3 log-probs"):
        _completion(output(token_ids=[5, 6]))
    with pytest.raises(FloatingPointError, match="weights have diverged"):
        _completion(output(logprobs=[-1.0, float("nan"), -0.5]))


class Worker:
    """Stands in for an `LLM`: takes weights, says what it holds, forgets when told; cannot sample."""

    def __init__(self, missing: tuple[str, ...] = (), ignores: bool = False, busy: bool = False) -> None:
        self.held: int | None = None
        self.taken: list[list[str]] = []
        self.missing, self.ignores, self.busy = missing, ignores, busy
        self.calls: list[str] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        if method == "held_policy_step":
            return [self.held]
        if method == "forget_policy_weights":
            self.held = None
            return [None]
        assert method == "take_policy_weights"
        step, weights = args
        self.taken.append([name for name, _ in weights])
        if not self.ignores and not self.missing:
            self.held = step
        return [list(self.missing)]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake up")

    def reset_prefix_cache(self) -> bool:
        return not self.busy


def engine_over(worker: Worker, sleeps: bool = False) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine._policy, engine._options, engine._context = random_policy(), RolloutOptions(), 512
    engine._step, engine._asleep, engine._sleeps, engine._proven, engine._llm = 0, False, sleeps, True, worker
    return engine


REQUEST = [GroupRequest(np.array([5, 6], dtype=np.int32), 2, 1)]


@pytest.mark.parametrize(
    ("worker", "error", "message"),
    [
        (Worker(ignores=True), StaleWeights, "holds the weights of policy step None, and step 3"),
        (Worker(missing=("lm_head.bias",)), VllmError, r"first lm_head\.bias"),
        (Worker(busy=True), StaleWeights, "still running"),
    ],
)
def test_nothing_is_sampled_with_weights_that_are_not_the_policy_s(worker: Worker, error: type[Exception], message: str) -> None:
    engine = engine_over(worker)
    engine.policy_updated(3)
    with pytest.raises(error, match=message):
        engine.generate(REQUEST, seed=1, temperature=1.0, max_new_tokens=8)
    assert len(worker.taken) == 1


def test_an_update_makes_the_worker_forget_even_when_the_step_s_number_stays() -> None:
    worker = Worker()
    engine = engine_over(worker)
    engine._hand_over()
    assert worker.held == 0
    engine.policy_updated(0)
    assert worker.held is None


def test_a_prompt_that_does_not_fit_the_cache_is_refused_before_anything_else() -> None:
    worker = Worker()
    engine = engine_over(worker)
    with pytest.raises(ValueError, match=r"lower rollout\.max_new_tokens"):
        engine.generate([replace(REQUEST[0], prompt=np.arange(500, dtype=np.int32))], seed=1, temperature=1.0, max_new_tokens=20)
    assert not worker.taken


def test_where_vllm_can_sleep_it_does_between_rollouts_and_gets_the_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    engine = engine_over(worker, sleeps=True)

    def sample(*_: Any) -> _Work:
        worker.calls.append("sample")
        work = _Work()
        work.steps = 1
        for member in range(2):
            work.completions[member], work.ends[member] = _completion(output()), float(member)
        return work

    monkeypatch.setattr(engine, "_sample", sample)
    for _ in range(2):
        rollout = engine.generate(REQUEST, seed=1, temperature=1.0, max_new_tokens=8)
        assert rollout.report.tokens == 6
        assert rollout.report.straggler_seconds == 1
    told = [call for call in worker.calls if call != "held_policy_step"]
    once = ["take_policy_weights", "sample", "sleep 2", "forget_policy_weights"]
    assert told == [*once, "wake up", *once]
