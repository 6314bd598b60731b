"""The vLLM engine against vLLM itself, on a CPU: what it samples is the policy's, with the policy's weights of this step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish
from transformers import LlamaConfig, LlamaForCausalLM

from swarm_node.policy import catalogue
from swarm_node.policy.loading import load_policy
from swarm_node.policy.logprobs import completion_logprobs
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.parts import unwrap
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.vllm.engine import StaleWeights, VllmEngine
from swarm_node.rollout.vllm.start import VllmError
from tests.support.policies import random_policy

OPTIONS = RolloutOptions(engine="vllm", max_batch=16, cache_gib=0.25)


def start(policy: Policy) -> VllmEngine:
    return VllmEngine(policy, OPTIONS)


def load(name: str = "tiny-m", dtype: str = "float32", **changes: Any) -> Policy:
    return load_policy(ModelOptions(name=name, dtype=dtype, device="cpu", **changes))


@pytest.fixture(scope="module")
def shared() -> VllmEngine:
    """tiny-m in float32; tests that change its weights have an engine of their own."""
    return start(load())


def requests(policy: Policy, size: int = 4) -> list[GroupRequest]:
    return [GroupRequest(policy.encode_prompt(text), size, key) for key, text in enumerate(("7+15+9=", "12+3+4=", "1+2="))]


def generate(engine: VllmEngine, asked: Sequence[GroupRequest] | None = None, **changes: Any) -> Rollout:
    arguments = {"seed": 3, "temperature": 1.0, "max_new_tokens": 60} | changes
    return engine.generate(requests(engine._policy) if asked is None else asked, **arguments)


def flat(rollout: Rollout) -> list[Completion]:
    return [completion for group in rollout.groups for completion in group]


def tokens(rollout: Rollout) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in flat(rollout)]


def logits(policy: Policy, prompt: NDArray[np.int32], completion: NDArray[np.int32]) -> torch.Tensor:
    """(T, V) float32: what each token of the completion was to be drawn from, by the policy's plain forward."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]))[None].long()
    with torch.no_grad():
        whole: torch.Tensor = policy.model(input_ids=ids).logits
    return whole[0, len(prompt) - 1 : -1].float()


def differences(policy: Policy, rollout: Rollout, asked: Sequence[GroupRequest], temperature: float = 1.0) -> NDArray[np.float64]:
    """|recorded - recomputed| of every token: recomputed is log softmax(logits / T) over the whole vocabulary, in float32."""
    parts = []
    for request, group in zip(asked, rollout.groups, strict=True):
        for completion in group:
            table = torch.log_softmax(logits(policy, request.prompt, completion.tokens) / temperature, -1)
            own = table.gather(1, torch.from_numpy(completion.tokens).long()[:, None])[:, 0].numpy()
            parts.append(np.abs(own - completion.logprobs))
    return np.concatenate(parts).astype(np.float64)


def disturb(policy: Policy, seed: int = 0, strength: float = 0.2) -> None:
    """Change every trainable weight at random, by so much of its matrix's spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            spread = max(float(parameter.std()), 0.02)
            parameter.add_((torch.randn(parameter.shape, generator=generator) * spread * strength).to(parameter.dtype))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_are_of_the_tempered_distribution_over_the_whole_vocabulary(shared: VllmEngine, temperature: float) -> None:
    asked = requests(shared._policy)
    rollout = generate(shared, asked, temperature=temperature)
    assert differences(shared._policy, rollout, asked, temperature).max() < 5e-5
    assert temperature == 1.0 or differences(shared._policy, rollout, asked).max() > 0.01


def test_tokens_come_as_often_as_the_policy_says(shared: VllmEngine) -> None:
    policy = shared._policy
    prompt = policy.encode_prompt("7+15+9=7+15=22,22+9=3")
    rollout = generate(shared, [GroupRequest(prompt, 1600, 9)], temperature=1.5, max_new_tokens=1)
    drawn = np.bincount([completion.tokens[0] for completion in flat(rollout)], minlength=policy.vocab_size) / 1600
    expected = torch.softmax(logits(policy, prompt, prompt[:1])[0] / 1.5, -1).numpy()
    assert (expected > 0.02).sum() >= 4
    # Four standard errors of the likeliest; and no token that is next to impossible.
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / 1600)
    assert drawn[expected < 1e-6].sum() == 0


def test_the_same_seed_gives_the_same_tokens_and_members_of_a_group_differ(shared: VllmEngine) -> None:
    first, again, other = generate(shared), generate(shared), generate(shared, seed=4)
    assert tokens(first) == tokens(again)
    assert tokens(first) != tokens(other)
    hot = generate(shared, [GroupRequest(shared._policy.encode_prompt("7+15+9="), 8, 1)], temperature=2.0)
    assert len({tuple(completion) for completion in tokens(hot)}) == 8
    moved = generate(shared, [GroupRequest(shared._policy.encode_prompt("7+15+9="), 8, 2)], temperature=2.0)
    assert tokens(hot) != tokens(moved)


def test_a_stop_token_belongs_to_its_completion_and_the_finish_is_recorded(shared: VllmEngine) -> None:
    policy = shared._policy
    completions = flat(generate(shared, max_new_tokens=25))
    assert {completion.finish for completion in completions} == {Finish.STOP, Finish.LENGTH}
    for completion in completions:
        stops = np.isin(completion.tokens, sorted(policy.stop_ids))
        assert not stops[:-1].any()
        assert stops[-1] == (completion.finish is Finish.STOP)
        assert completion.finish is Finish.STOP or len(completion) == 25
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32


def test_the_report_counts_what_was_sampled(shared: VllmEngine) -> None:
    asked = requests(shared._policy)
    rollout = generate(shared, asked)
    lengths = [len(completion) for completion in flat(rollout)]
    report = rollout.report
    assert report.tokens == sum(lengths)
    assert report.prefill_tokens == 4 * sum(len(request.prompt) for request in asked)  # no prompt fills a page of 128
    assert report.decode_steps == max(lengths)
    assert report.slot_idle_share == pytest.approx(1 - sum(lengths) / (max(lengths) * 12))
    assert 0 < report.straggler_seconds < 3 * report.seconds


def test_more_completions_than_slots_wait_their_turn(shared: VllmEngine) -> None:
    asked = requests(shared._policy, size=14)
    rollout = generate(shared, asked)
    assert [len(group) for group in rollout.groups] == [14, 14, 14]
    assert differences(shared._policy, rollout, asked).max() < 5e-5


def test_an_interrupted_call_leaves_nothing_behind(shared: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = generate(shared)
    core, step = shared._llm.llm_engine, shared._llm.llm_engine.step
    steps = iter(range(3))

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(shared)
    assert not core.has_unfinished_requests()
    assert tokens(generate(shared)) == tokens(before)


def test_threads_can_be_set_as_before_it_started(shared: VllmEngine) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def shares_a_long_prompt(engine: VllmEngine) -> None:
    """A prompt of two pages and a bit is computed once for its group, and again after an update: nothing of the old weights is read."""
    policy = engine._policy
    asked = [GroupRequest(policy.encode_prompt("7+15+9=7+15=22," * 20), 4, 1)]
    assert len(asked[0].prompt) == 300
    for step in (8, 9):
        engine.policy_updated(step)
        disturb(policy, step)
        rollout = generate(engine, asked)
        assert rollout.report.prefill_tokens == 300 + 3 * (300 - 256)
        assert differences(policy, rollout, asked).max() < 5e-5
    assert generate(engine, asked).report.prefill_tokens == 4 * (300 - 256)


def test_samples_and_log_probs_follow_an_update_and_only_an_announced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load()
    engine = start(policy)
    asked = requests(policy)
    old = generate(engine)
    disturb(policy)
    assert tokens(generate(engine)) == tokens(old)
    assert differences(policy, old, asked).max() > 0.05
    engine.policy_updated(1)
    new = generate(engine)
    assert tokens(new) != tokens(old)
    assert differences(policy, new, asked).max() < 5e-5
    assert generate(engine, asked, temperature=0.6).report.tokens > 0

    shares_a_long_prompt(engine)

    engine.policy_updated(10)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_hand_over", lambda: None)
        with pytest.raises(StaleWeights, match="step None, and step 10"):
            generate(engine)
    assert generate(engine).report.tokens > 0


def test_adapters_are_merged_and_the_policy_is_left_as_it_was() -> None:
    policy = load(lora=True, lora_rank=4, lora_alpha=8)
    disturb(policy, strength=1)
    engine = start(policy)
    asked = requests(policy)
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    rollout = generate(engine, asked)
    assert differences(policy, rollout, asked).max() < 5e-5
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.model.named_parameters())
    with policy.model.disable_adapter():  # type: ignore[operator]
        assert differences(policy, rollout, asked).max() > 0.05
    disturb(policy, 1)
    engine.policy_updated(1)
    assert differences(policy, generate(engine, asked), asked).max() < 5e-5


def untied_policy() -> Policy:
    """A random policy whose LM head is a matrix of its own, with two stop ids and heads of a size that vLLM has kernels for."""
    policy = random_policy()
    config = LlamaConfig.from_dict(unwrap(policy.model).config.to_dict() | {"hidden_size": 128, "head_dim": 32})
    assert not config.tie_word_embeddings
    with torch.random.fork_rng():
        torch.manual_seed(5)
        policy.model = LlamaForCausalLM(config).eval()
    return policy


def test_an_untied_head_and_several_stop_ids_work_and_weights_that_are_not_numbers_are_seen() -> None:
    policy = untied_policy()
    engine = start(policy)
    asked = [GroupRequest(np.arange(4, 14, dtype=np.int32), 12, 1)]
    for step in (0, 1):
        rollout = generate(engine, asked, max_new_tokens=150)
        assert differences(policy, rollout, asked).max() < 5e-5
        assert {int(completion.tokens[-1]) for completion in flat(rollout) if completion.finish is Finish.STOP} == {2, 3}
        disturb(policy)
        engine.policy_updated(step + 1)
    with torch.no_grad():
        dict(policy.model.named_parameters())["lm_head.weight"].fill_(float("nan"))
    engine.policy_updated(3)
    with pytest.raises(FloatingPointError, match="weights have diverged"):
        generate(engine, asked)


def test_a_model_that_vllm_has_no_kernel_for_is_refused_with_its_reason() -> None:
    with pytest.raises(VllmError, match=r"vLLM cannot run random: .*head"):
        generate(start(random_policy()), [GroupRequest(np.arange(4, 14, dtype=np.int32), 2, 1)])


def test_another_model_than_the_policy_is_noticed_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load("tiny-s")
    engine = start(policy)
    given = [(name, weight.detach() * (3 if "norm" in name else 1)) for name, weight in policy.model.named_parameters()]
    monkeypatch.setattr("swarm_node.rollout.vllm.engine.merged_weights", lambda model: iter(given))
    with pytest.raises(VllmError, match="another model than tiny-s"):
        generate(engine)


@pytest.fixture
def real() -> Policy:
    if not catalogue.find("smollm2-135m").present:
        pytest.skip("smollm2-135m is not here: `swarm-node model pull smollm2-135m` fetches it")
    return load("smollm2-135m", "bfloat16")


def test_a_real_model_in_bfloat16_agrees_to_rounding_before_and_after_an_update(real: Policy) -> None:
    engine = start(real)
    asked = [GroupRequest(real.encode_prompt(text), 3, key) for key, text in enumerate(("What is 12 + 30?", "Name three rivers."))]
    for step in (0, 1):
        rollout = generate(engine, asked, max_new_tokens=24)
        pairs = [(torch.from_numpy(r.prompt), torch.from_numpy(c.tokens)) for r, g in zip(asked, rollout.groups, strict=True) for c in g]
        with torch.no_grad():
            own = torch.cat(completion_logprobs(real.model, pairs)).numpy()
        difference = np.abs(own - np.concatenate([completion.logprobs for completion in flat(rollout)]))
        assert np.mean(difference) < 0.1
        assert np.max(difference) < 1.0
        with torch.no_grad():
            for name, parameter in real.model.named_parameters():
                if "down_proj" in name:
                    parameter.mul_(0.9)
        engine.policy_updated(step + 1)
