"""The sparse engine: dense it equals the reference, and nothing that happens beside a completion changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from swarm_kernels.choose import Backend
from swarm_kernels.naive.backend import TorchKernels
from swarm_protocols.group import Completion, Finish

from swarm_node.policy.logprobs import completion_logprobs
from swarm_node.policy.policy import Policy
from swarm_node.rollout import create
from swarm_node.rollout.create import create_engine
from swarm_node.rollout.engine import Engine, GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.cache import CacheTooSmall
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.reference import ReferenceEngine
from swarm_node.rollout.sparsity.schedule import DENSE, Schedule
from tests.support.policies import family_model, random_policy

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied head, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama, stretched positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}


def request(length: int, size: int, key: int, **more: Any) -> GroupRequest:
    return GroupRequest(np.random.default_rng(length).integers(4, 64, length).astype(np.int32), size, key, **more)


REQUESTS = [request(6, 4, 10), request(37, 3, 11), request(1, 5, 12), request(48, 2, 13)]


def llama_policy(**changes: Any) -> Policy:
    return random_policy(model=family_model("llama", **changes))


def generate(engine: Engine, requests: Sequence[GroupRequest] = REQUESTS, **changes: Any) -> Rollout:
    arguments: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_new_tokens": 40} | changes
    return engine.generate(requests, **arguments)


def assert_same(left: Rollout, right: Rollout, tolerance: float = 1e-5) -> None:
    for group, other in zip(left.groups, right.groups, strict=True):
        for a, b in zip(group, other, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.finish == b.finish
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)


def endless(policy: Policy) -> Policy:
    """The same policy without a token that ends a completion."""
    return replace(policy, stop_ids=frozenset({-1}))


@pytest.mark.parametrize("case", FAMILIES)
def test_dense_it_samples_what_the_reference_samples(case: str) -> None:
    policy = random_policy(model=family_model(case.partition(",")[0], **FAMILIES[case]))
    options = RolloutOptions()
    assert_same(generate(SparseEngine(policy, options)), generate(ReferenceEngine(policy, options)))


def test_adapters_of_the_policy_take_part() -> None:
    policy = llama_policy()
    plain = generate(SparseEngine(policy, RolloutOptions()))
    adapted = get_peft_model(policy.model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    policy = replace(policy, model=adapted.eval(), lora=True)
    rollout = generate(SparseEngine(policy, RolloutOptions()))
    assert_same(rollout, generate(ReferenceEngine(policy, RolloutOptions())))
    assert rollout.groups[0][0].logprobs[0] != pytest.approx(plain.groups[0][0].logprobs[0], abs=1e-3)


@pytest.mark.parametrize("how", ["hook", "replaced forward"])
def test_whatever_changes_a_linear_layer_is_called(how: str) -> None:
    policy = replace(llama_policy(), dtype=torch.bfloat16)
    policy.model.to(torch.bfloat16)  # the type that our own kernel of a linear layer takes
    engine = SparseEngine(policy, RolloutOptions())
    before = generate(engine)
    linear = policy.model.model.layers[1].mlp.down_proj  # type: ignore[union-attr, index]
    plain = linear.forward
    if how == "hook":
        linear.register_forward_hook(lambda module, inputs, out: out * 3)
    else:
        linear.forward = lambda x: plain(x) * 3
    after = generate(engine)
    assert after.groups[0][0].logprobs[0] != pytest.approx(before.groups[0][0].logprobs[0], abs=1e-3)


def test_a_completion_does_not_depend_on_what_runs_beside_it() -> None:
    policy = llama_policy()
    together = generate(SparseEngine(policy, RolloutOptions()))
    for index, asked in enumerate(REQUESTS):
        alone = generate(SparseEngine(policy, RolloutOptions()), [asked])
        assert_same(Rollout((together.groups[index],), together.report), alone)


@pytest.mark.parametrize("options", [{"max_batch": 1}, {"max_batch": 3}, {"prefill_tokens": 16}, {"max_batch": 5, "prefill_tokens": 20}])
def test_few_slots_and_small_chunks_give_the_same_completions(options: dict[str, int]) -> None:
    policy = llama_policy()
    assert_same(generate(SparseEngine(policy, RolloutOptions(**options))), generate(SparseEngine(policy, RolloutOptions())))


@pytest.mark.parametrize("pages", [7, 10, 16])
def test_a_full_cache_preempts_and_resumes_and_loses_nothing(pages: int) -> None:
    policy = endless(llama_policy())
    page = 4 * 2 * 33 * 32 * 4  # layers, KV heads, slots and centroid, head size, bytes
    engine = SparseEngine(policy, RolloutOptions(cache_gib=(pages + 0.5) * page / 2**30))
    rollout = generate(engine)
    assert engine._cache is not None
    assert engine._cache.layout.pages == pages
    assert_same(rollout, generate(SparseEngine(policy, RolloutOptions())))
    assert rollout.report.preemptions > 0


def test_a_cache_that_holds_no_completion_is_refused_with_what_it_needs() -> None:
    engine = SparseEngine(llama_policy(), RolloutOptions(cache_gib=1e-4))
    with pytest.raises(
        CacheTooSmall, match=r"up to 112 tokens needs 0\.226 MiB of cache and 0\.0967 MiB are allowed: raise rollout\.cache_gib"
    ):
        generate(engine)


def test_the_cache_takes_no_more_than_a_step_can_use_and_is_empty_afterwards() -> None:
    engine = SparseEngine(llama_policy(), RolloutOptions())
    for _ in range(3):
        generate(engine)
        assert engine._cache is not None
        # ceil((6 + 40) / 16) = 3 pages a completion and one for a copy; 5 and 1; 3 and 1; 6 and 1
        assert engine._cache.layout.pages == 4 * 4 + 3 * 6 + 5 * 4 + 2 * 7
        assert engine._cache.free_pages == engine._cache.layout.pages


def test_a_prompt_is_computed_once_for_its_group() -> None:
    rollout = generate(SparseEngine(llama_policy(), RolloutOptions()), [request(300, 8, 1)], max_new_tokens=4)
    assert rollout.report.prefill_tokens == 300


def test_nothing_that_old_weights_computed_is_read() -> None:
    policy = llama_policy()
    engine = SparseEngine(policy, RolloutOptions())
    before = generate(engine)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    engine.policy_updated(1)
    after = generate(engine)
    assert_same(after, generate(ReferenceEngine(policy, RolloutOptions())))
    assert after.groups[0][0].logprobs[0] != pytest.approx(before.groups[0][0].logprobs[0], abs=1e-4)


def test_an_interrupted_call_leaves_no_pages_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SparseEngine(llama_policy(), RolloutOptions())
    expected = generate(engine)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(engine)
    assert engine._cache is not None
    assert engine._cache.free_pages == engine._cache.layout.pages
    assert_same(generate(engine), expected)


def test_recorded_log_probs_are_the_learner_s_and_the_kept_logits_theirs() -> None:
    policy = llama_policy()
    asked = [replace(entry, observe=1) for entry in REQUESTS]
    rollout = generate(SparseEngine(policy, RolloutOptions()), asked, temperature=0.7)
    assert [(seen.group, seen.member) for seen in rollout.observed] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for seen in rollout.observed:
        completion: Completion = rollout.groups[seen.group][seen.member]
        pair = torch.from_numpy(asked[seen.group].prompt), torch.from_numpy(completion.tokens)
        with torch.no_grad():
            dense = completion_logprobs(policy.model, [pair], temperature=0.7)[0]
        np.testing.assert_allclose(completion.logprobs, dense, atol=1e-5)
        assert isinstance(seen.kept, torch.Tensor)
        kept = torch.log_softmax(seen.kept.float() / 0.7, -1).gather(1, pair[1].long()[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, kept, atol=1e-5)


def test_the_stop_token_ends_a_completion_and_the_limit_another() -> None:
    rollout = generate(SparseEngine(llama_policy(), RolloutOptions()), max_new_tokens=25)
    finishes = set()
    for group in rollout.groups:
        for completion in group:
            finishes.add(completion.finish)
            stopped = [token in (2, 3) for token in completion.tokens.tolist()]
            assert not any(stopped[:-1])
            assert stopped[-1] == (completion.finish is Finish.STOP)
            assert completion.finish is Finish.STOP or len(completion) == 25
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_a_budget_that_covers_the_length_is_dense_exactly() -> None:
    policy = endless(llama_policy())
    dense = generate(SparseEngine(policy, RolloutOptions()))
    # The longest sequence has 48 + 40 tokens: six pages, three of them reserved.
    covering = generate(SparseEngine(policy, RolloutOptions(), Schedule((3,), 0.86, "test")))
    assert_same(covering, dense, 0.0)
    assert covering.report.sparse_share == 0.0
    sparse = generate(SparseEngine(policy, RolloutOptions(), Schedule((2,), 0.86, "test")))
    # 81 tokens and more need six pages: the last 8 of 40 tokens of the two longest completions. The very last is drawn, never read.
    assert sparse.report.sparse_share == pytest.approx(2 * 7 / (14 * 40))
    assert sparse.report.largest_budget == 2
    assert_same(Rollout(sparse.groups[:3], sparse.report), Rollout(dense.groups[:3], dense.report), 0.0)


def test_an_evaluation_ignores_the_schedule_and_a_request_overrules_it() -> None:
    policy = endless(llama_policy())
    engine = SparseEngine(policy, RolloutOptions(), Schedule((1,), 0.86, "test"))
    long = [request(200, 2, 5)]
    dense = generate(SparseEngine(policy, RolloutOptions()), long)
    assert_same(generate(engine, long, dense=True), dense, 0.0)
    assert engine.schedule is not None
    assert generate(engine, long).report.sparse_share == pytest.approx(78 / 80)
    mixed = generate(engine, [replace(long[0], budgets=(DENSE, 1))])
    np.testing.assert_allclose(mixed.groups[0][0].logprobs, dense.groups[0][0].logprobs, atol=1e-5)
    assert not np.allclose(mixed.groups[0][1].logprobs[:20], dense.groups[0][1].logprobs[:20], atol=1e-3)


def test_no_requests_are_an_empty_rollout() -> None:
    rollout = generate(SparseEngine(llama_policy(), RolloutOptions()), [])
    assert rollout.groups == ()
    assert rollout.report.tokens == 0


def test_every_slot_step_is_either_running_or_idle() -> None:
    rollout = generate(SparseEngine(endless(llama_policy()), RolloutOptions()), [request(5, 4, 1)], max_new_tokens=12)
    assert rollout.report.slot_idle_share == 0.0
    assert rollout.report.decode_steps == 12
    rollout = generate(SparseEngine(llama_policy(), RolloutOptions()))
    report = rollout.report
    assert report.tokens == sum(len(completion) for group in rollout.groups for completion in group)
    assert report.slot_idle_share == pytest.approx(1 - report.tokens / (14 * report.decode_steps))


def test_a_model_that_it_cannot_walk_is_sampled_by_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine(random_policy(), RolloutOptions())
    assert engine.name == "reference"
    assert engine.choices == ("engine reference: the model has heads of 12; there are kernels for (32, 64, 96, 128)",)
    assert "sampling with the reference engine" in caplog.text
    assert create_engine(llama_policy(), RolloutOptions()).name == "sparse"
    assert create_engine(llama_policy(), RolloutOptions(engine="reference")).name == "reference"


def test_without_a_compiler_the_reference_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "choose_backend", lambda device: Backend(TorchKernels(), "kernels: torch operations, no compiler"))
    engine = create_engine(llama_policy(), RolloutOptions())
    assert engine.name == "reference"
    assert engine.choices == ("engine reference, dense, for want of fast kernels; kernels: torch operations, no compiler",)


@pytest.mark.slow
def test_two_hundred_steps_take_no_more_memory_than_twenty() -> None:
    policy = llama_policy()
    engine = SparseEngine(policy, RolloutOptions(), Schedule((1,), 0.86, "test"))
    process = psutil.Process()
    taken = []
    for step in range(200):
        generate(engine, [request(100 + step % 50, 4, step)])
        engine.policy_updated(step)
        taken.append(process.memory_info().rss)
    assert max(taken[150:]) - max(taken[:20]) < 16 * 2**20
