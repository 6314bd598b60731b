"""The trainer: one step equals its definition, however it is cut, interrupted or squeezed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from swarm_protocols.group import Finish
from swarm_protocols.limits import DEFAULT_LIMITS
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarm_node.learning import trainer as trainer_module
from swarm_node.learning.ftis import Tokens, completion_weights, ftis_loss, keep_mask
from swarm_node.learning.optimiser import Optimiser
from swarm_node.learning.options import Algorithm, LearningOptions
from swarm_node.learning.scored import ScoredGroup
from swarm_node.learning.trainer import OutOfMemory, Trainer
from swarm_node.policy.logprobs import completion_logprobs
from tests.support.learning_groups import scored_group

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 16


@dataclass(eq=False)
class TinyPolicy:
    """A randomly initialised Llama, which shares nothing with a real policy but what the trainer needs."""

    model: nn.Module
    lora: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def tiny_policy(dtype: torch.dtype = torch.float32, lora: bool = False) -> TinyPolicy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    policy = TinyPolicy(LlamaForCausalLM(config), lora)
    policy.model.to(dtype)
    return policy


def some_groups(step: int = 0) -> list[ScoredGroup]:
    return [
        scored_group([1.0, 0.0, 0.5], [4, 7, 2], index=10 * step, logprob=-2.5),
        scored_group([0.0, 1.0], [9, 1], index=10 * step + 1, sender="peer", own=False, temperature=0.7, logprob=-3.0),
        scored_group([1.0, 1.0], [3, 3], index=10 * step + 2),
    ]


def naive_logprobs(model: nn.Module, group: ScoredGroup) -> Tensor:
    """Flat log-probs of a group's completions, one forward each, whole logits."""
    parts = []
    for completion in group.group.completions:
        ids = torch.tensor([*group.prompt.tolist(), *completion.tokens.tolist()])
        logits = model(input_ids=ids[None]).logits[0, :-1].float() / group.group.policy.temperature
        parts.append(logits.log_softmax(-1).gather(1, ids[1:, None])[len(group.prompt) - 1 :, 0])
    return torch.cat(parts)


def naive_gradient(policy: TinyPolicy, groups: Sequence[ScoredGroup], options: LearningOptions, counted: int) -> dict[str, Tensor]:
    """The gradient of the pure loss over completions that were computed one by one."""
    completions = [completion for group in groups for completion in group.group.completions]
    theta = torch.cat([naive_logprobs(policy.model, group) for group in groups])
    gen = torch.cat([torch.from_numpy(completion.logprobs) for completion in completions])
    rewards = [torch.tensor(group.rewards) for group in groups]
    advantages = torch.cat([reward - reward.mean() for reward in rewards])
    sizes = torch.tensor([len(group.rewards) for group in groups])
    lengths = torch.tensor([len(completion) for completion in completions])
    tokens = Tokens(theta, gen, theta.detach(), lengths, advantages, torch.zeros(len(lengths), dtype=torch.bool))
    weights = completion_weights(lengths, sizes, counted, keep_mask(tokens, options), options)
    policy.model.zero_grad()
    ftis_loss(tokens, weights, options)[0].backward()
    return {name: parameter.grad.clone() for name, parameter in policy.trainable().items() if parameter.grad is not None}


def gradient_of_step(
    options: LearningOptions, groups: Sequence[ScoredGroup], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """What `Trainer.step` hands to the optimiser, before clipping."""
    policy = tiny_policy(dtype)
    seen: dict[str, Tensor] = {}
    clip = nn.utils.clip_grad_norm_

    def spy(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        trained = list(parameters)
        for name, parameter in zip(policy.trainable(), trained, strict=True):
            assert parameter.grad is not None
            seen[name] = parameter.grad.clone()
        return clip(trained, limit)

    with monkeypatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", spy)
        assert Trainer(policy, options).step(groups).stepped
    return seen


def weights_of(policy: TinyPolicy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-7)


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("budget", [1, 24, 2048])
@pytest.mark.parametrize("normalizer", ["all", "kept"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo", "dapo"])
def test_the_gradient_is_the_losss_however_the_batch_is_cut(
    algorithm: Algorithm, normalizer: Literal["all", "kept"], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LearningOptions(algorithm=algorithm, normalizer=normalizer, kl_threshold=0.2, tokens_per_micro_batch=budget)
    groups = some_groups()
    counted = 2 if algorithm == "dapo" else 3  # GRPO's average counts the group without variance
    expected = naive_gradient(tiny_policy(), groups[:2], options, counted)
    assert_close(gradient_of_step(options, groups, monkeypatch), expected)


def test_bfloat16_gradients_of_micro_batches_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradient_of_step(LearningOptions(), some_groups(), monkeypatch, torch.bfloat16)
    parts = gradient_of_step(LearningOptions(tokens_per_micro_batch=1), some_groups(), monkeypatch, torch.bfloat16)
    for name in whole:
        assert parts[name].dtype == torch.float32
        # bfloat16 rounds each backward to 8 bits; a lost micro-batch would be a difference of the order of the gradient itself.
        assert (parts[name] - whole[name]).norm() < 0.05 * whole[name].norm()


def test_theta_is_taken_at_each_groups_own_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LearningOptions()
    hot = [scored_group([1.0, 0.0], temperature=2.0)]
    expected = naive_gradient(tiny_policy(), hot, options, 1)
    assert_close(gradient_of_step(options, hot, monkeypatch), expected)
    cold = gradient_of_step(options, [scored_group([1.0, 0.0], temperature=1.0)], monkeypatch)
    assert not torch.allclose(cold["lm_head.weight"], expected["lm_head.weight"], rtol=1e-2)


@pytest.mark.parametrize("temperature", [DEFAULT_LIMITS.temperature_min, DEFAULT_LIMITS.temperature])
def test_the_most_extreme_temperatures_that_peers_may_declare_leave_the_gradient_finite(temperature: float) -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.get_parameter("lm_head.weight").mul_(200)  # logits of some tens, as trained models have
    extreme = scored_group([1.0, 0.0], [5, 5], index=1, sender="peer", own=False, temperature=temperature, logprob=-0.1)
    report = Trainer(policy, LearningOptions(filter="none")).step([scored_group([1.0, 0.0]), extreme])
    assert report.stepped
    assert report.foreign_groups == 1
    assert 0 < report.grad_norm < 1e5
    assert all(parameter.isfinite().all() for parameter in policy.trainable().values())


def test_learning_makes_the_rewarded_completion_likelier() -> None:
    policy = tiny_policy()
    trainer = Trainer(policy, LearningOptions(learning_rate=1e-2, warmup_steps=0))
    group = scored_group([1.0, 0.0], [5, 5])
    before = naive_logprobs(policy.model, group).detach().split(5)
    reports = [trainer.step([group]) for _ in range(5)]
    after = naive_logprobs(policy.model, group).detach().split(5)
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]


def test_the_report_counts_what_happened() -> None:
    report = Trainer(tiny_policy(), LearningOptions()).step([*some_groups(), scored_group([None, 1.0], index=5)])
    assert (report.own_groups, report.foreign_groups, report.zero_variance_groups, report.small_groups) == (1, 1, 1, 1)
    assert report.zero_variance_share == pytest.approx(1 / 3)
    assert report.unscored_completions == 1
    assert report.tokens == report.metrics.tokens == 4 + 7 + 2 + 9 + 1
    assert report.foreign_metrics.completions == 2
    assert report.foreign_metrics.tokens == 10
    assert report.stepped
    assert report.skipped == ""
    assert report.learning_rate == pytest.approx(1e-4 / 5)
    assert 0 < report.grad_norm < math.inf
    assert report.tokens_per_second > 0


@pytest.mark.parametrize(
    ("groups", "choices", "reason"),
    [
        ([], {}, "no groups"),
        ([scored_group([1.0, 1.0]), scored_group([None, 0.0])], {}, "1 have one reward and 1 fewer than two"),
        ([scored_group([1.0, 0.0], finish=Finish.LENGTH)], {"mask_truncated": True}, "no kept token"),
    ],
)
def test_without_a_kept_token_nothing_moves_and_the_report_says_why(
    groups: list[ScoredGroup], choices: dict[str, Any], reason: str
) -> None:
    policy = tiny_policy()
    trainer = Trainer(policy, LearningOptions(**choices))
    before = weights_of(policy)
    rate = trainer.learning_rate
    report = trainer.step(groups)
    assert reason in report.skipped
    assert not report.stepped
    assert (report.step, trainer.steps, trainer.learning_rate) == (0, 0, rate)
    assert trainer.state_dict()[0] == {}
    assert_same_bits(weights_of(policy), before)


def test_a_gradient_that_overflowed_moves_nothing() -> None:
    policy = tiny_policy()
    trainer = Trainer(policy, LearningOptions())
    trainer.step(some_groups(1))
    before = weights_of(policy)
    hook = policy.model.get_parameter("lm_head.weight").register_hook(lambda gradient: gradient * math.inf)
    report = trainer.step(some_groups(2))
    hook.remove()
    assert "overflowed" in report.skipped
    assert trainer.steps == 1
    assert_same_bits(weights_of(policy), before)
    assert trainer.step(some_groups(3)).stepped


def test_the_learning_rate_warms_up_linearly_and_stays() -> None:
    trainer = Trainer(tiny_policy(), LearningOptions(learning_rate=1e-3, warmup_steps=4))
    rates = [trainer.step(some_groups(step)).learning_rate for step in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_the_default_learning_rate_is_ten_times_larger_for_lora_and_a_hundred_times_for_small_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = LearningOptions(warmup_steps=0)
    assert Trainer(tiny_policy(), options).learning_rate == pytest.approx(1e-4)
    assert Trainer(tiny_policy(lora=True), options).learning_rate == pytest.approx(1e-3)
    monkeypatch.setattr("swarm_node.learning.trainer.SMALL_MODEL", 0)
    assert Trainer(tiny_policy(), options).learning_rate == pytest.approx(1e-6)
    assert Trainer(tiny_policy(lora=True), options).learning_rate == pytest.approx(1e-5)


def test_weight_decay_shrinks_matrices_and_leaves_norms_alone() -> None:
    decayed, plain = tiny_policy(), tiny_policy()
    before = weights_of(plain)
    Trainer(decayed, LearningOptions(learning_rate=1e-3, warmup_steps=0, weight_decay=0.5)).step(some_groups())
    Trainer(plain, LearningOptions(learning_rate=1e-3, warmup_steps=0)).step(some_groups())
    with_decay, without = weights_of(decayed), weights_of(plain)
    assert torch.equal(with_decay["model.norm.weight"], without["model.norm.weight"])
    # Decoupled: the difference is rate * decay * the weight before the step.
    difference = without["lm_head.weight"] - with_decay["lm_head.weight"]
    torch.testing.assert_close(difference, 1e-3 * 0.5 * before["lm_head.weight"], rtol=1e-3, atol=1e-7)


def test_a_step_moves_every_trainable_weight_norms_and_biases_too() -> None:
    weights = {name: nn.Parameter(torch.ones(shape)) for name, shape in {"matrix": (2, 3), "norm": (3,), "bias": (2,), "scale": ()}.items()}
    optimiser = Optimiser(weights, LearningOptions(grad_clip=100.0))
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 2.0)
    optimiser.step(0.25)
    # Adam's first step is the rate against the sign of the gradient, however large that is.
    for weight in weights.values():
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.75))


def test_inner_steps_compare_with_the_policy_at_the_steps_start() -> None:
    options = LearningOptions(learning_rate=3e-2, warmup_steps=0, inner_steps=3, off_policy="nois", clip_high=0.01, clip_low=0.01)
    trainer = Trainer(tiny_policy(), options)
    report = trainer.step(some_groups())
    assert (trainer.steps, report.step) == (3, 3)
    assert report.tokens == 3 * 23
    # After two steps of 3e-2 the policy has moved by far more than 1 % from where the step began, and the clip sees it.
    assert report.metrics.clip_fraction > 0.5
    assert Trainer(tiny_policy(), options.model_copy(update={"inner_steps": 1})).step(some_groups()).metrics.clip_fraction == 0


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, above: int = 10**9, calls: Sequence[int] = ()) -> list[int]:
    """Log-probs that raise `error` for more than `above` padded tokens and in the given calls; returns the tokens of each call."""
    asked: list[int] = []

    def limited(model: nn.Module, sequences: Sequence[tuple[Tensor, Tensor]], **settings: Any) -> list[Tensor]:
        asked.append(len(sequences) * max(len(prompt) + len(completion) for prompt, completion in sequences))
        if asked[-1] > above or len(asked) in calls:
            raise error
        return completion_logprobs(model, sequences, **settings)

    monkeypatch.setattr(trainer_module, "completion_logprobs", limited)
    return asked


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_when_memory_runs_out_the_step_is_redone_in_smaller_parts_with_the_same_gradient(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradient_of_step(LearningOptions(), some_groups(), monkeypatch)
    # Prompt and completion together are 12, 10, 7, 5 and 4 tokens: tried are 5 x 12, then 2 x 12, then 1 x 12.
    asked = fail(monkeypatch, error, above=23)
    assert_close(gradient_of_step(LearningOptions(), some_groups(), monkeypatch), expected)
    assert asked[:3] == [60, 24, 12]

    trainer = Trainer(tiny_policy(), LearningOptions())
    assert trainer.step(some_groups()).memory_retries == 2
    asked.clear()
    assert trainer.step(some_groups(1)).memory_retries == 0  # the next step begins with what fitted
    assert max(asked) <= 23


def test_a_gradient_that_was_half_accumulated_when_memory_ran_out_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    options = LearningOptions(tokens_per_micro_batch=24)
    expected = gradient_of_step(options, some_groups(), monkeypatch)
    asked = fail(monkeypatch, MemoryError(), calls=[2])
    assert_close(gradient_of_step(options, some_groups(), monkeypatch), expected)
    assert asked[:2] == [24, 21]


@pytest.mark.parametrize("inner_steps", [1, 2])
def test_a_foreign_completion_that_does_not_fit_costs_its_group_and_not_the_node(inner_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = LearningOptions(inner_steps=inner_steps, learning_rate=1e-3, warmup_steps=0)
    mine = some_groups()[0]  # at most 10 tokens with the prompt
    giant = scored_group([1.0, 0.0], [2, 30], index=7, sender="peer", own=False, logprob=-2.5)
    alone, beside = tiny_policy(), tiny_policy()
    Trainer(alone, options).step([mine])
    fail(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), above=30)
    report = Trainer(beside, options).step([giant, mine])
    assert report.stepped
    assert report.dropped_for_memory == 1
    assert report.tokens == inner_steps * (4 + 7 + 2)
    assert_close(weights_of(beside), weights_of(alone))


def test_memory_that_runs_out_in_a_later_inner_step_costs_the_foreign_group_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny_policy(), LearningOptions(inner_steps=2, tokens_per_micro_batch=1))
    asked = fail(monkeypatch, MemoryError(), calls=[6])
    report = trainer.step(some_groups())  # 5 completions, the longest foreign
    assert (trainer.steps, report.dropped_for_memory, report.memory_retries) == (2, 1, 1)
    assert report.tokens == 23 + 13
    assert asked[5:] == [12, 10, 7, 5]


def test_a_step_of_foreign_groups_that_do_not_fit_is_skipped_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    trainer, before = Trainer(policy, LearningOptions()), weights_of(policy)
    fail(monkeypatch, MemoryError(), above=20)
    report = trainer.step([scored_group([1.0, 0.0], [20, 30], sender="peer", own=False)])
    assert not report.stepped
    assert "out of memory" in report.skipped
    assert report.dropped_for_memory == 1
    assert_same_bits(weights_of(policy), before)
    assert trainer.step(some_groups(1)).stepped


def test_when_one_own_completion_does_not_fit_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny_policy(), LearningOptions())
    fail(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), above=5)
    with pytest.raises(OutOfMemory, match=r"one completion of 10 tokens.*lower max_new_tokens"):
        trainer.step(some_groups())  # after the foreign group, which has one of 12


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, RuntimeError("shapes do not match"), above=0)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        Trainer(tiny_policy(), LearningOptions()).step(some_groups())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_in_the_same_bits(dtype: torch.dtype) -> None:
    options = LearningOptions(learning_rate=1e-3, warmup_steps=3, weight_decay=0.01)
    whole = tiny_policy(dtype)
    unbroken = Trainer(whole, options)
    for step in range(4):
        unbroken.step(some_groups(step))

    first = tiny_policy(dtype)
    trainer = Trainer(first, options)
    for step in range(2):
        trainer.step(some_groups(step))
    weights, (tensors, scalars) = weights_of(first), trainer.state_dict()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}

    second = tiny_policy(dtype)
    second.model.load_state_dict(weights)
    resumed = Trainer(second, options)
    resumed.load_state_dict(tensors, scalars)
    for step in range(2, 4):
        resumed.step(some_groups(step))
    assert_same_bits(weights_of(second), weights_of(whole))
    assert_same_bits(resumed.state_dict()[0], unbroken.state_dict()[0])
    assert resumed.state_dict()[1] == unbroken.state_dict()[1]


def test_the_state_is_a_copy_that_later_steps_leave_alone() -> None:
    trainer = Trainer(tiny_policy(), LearningOptions(learning_rate=1e-2))
    trainer.step(some_groups())
    tensors, scalars = trainer.state_dict()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    trainer.step(some_groups(1))
    assert_same_bits(tensors, copies)
    assert scalars == {"steps": 1, "tokens_per_micro_batch": 2048}
    # A micro-batch that was halved stays so after a resume: other micro-batches would be other bits.
    trainer.load_state_dict(tensors, {"steps": 1, "tokens_per_micro_batch": 512})
    assert trainer.state_dict()[1] == {"steps": 1, "tokens_per_micro_batch": 512}


def test_a_state_of_another_model_is_refused() -> None:
    trainer = Trainer(tiny_policy(), LearningOptions())
    trainer.step(some_groups())
    tensors, scalars = trainer.state_dict()
    with pytest.raises(ValueError, match="does not train"):
        trainer.load_state_dict({"exp_avg.nowhere": torch.zeros(1)}, scalars)
    with pytest.raises(ValueError, match="has shape"):
        trainer.load_state_dict({**tensors, "exp_avg.lm_head.weight": torch.zeros(2, 2)}, scalars)
    with pytest.raises(ValueError, match="different types"):
        Trainer(tiny_policy(torch.bfloat16), LearningOptions()).load_state_dict(tensors, scalars)


def test_steps_too_small_for_bfloat16_still_add_up() -> None:
    policy = tiny_policy(torch.bfloat16)
    before = weights_of(policy)
    trainer = Trainer(policy, LearningOptions(learning_rate=1e-5, warmup_steps=0))
    for _ in range(40):
        trainer.step([scored_group([1.0, 0.0], [5, 5])])
    moved = weights_of(policy)["lm_head.weight"] != before["lm_head.weight"]
    assert moved.float().mean() > 0.5
    # One step alone is lost by rounding in most places; without float32 copies every step would be.
    single = tiny_policy(torch.bfloat16)
    Trainer(single, LearningOptions(learning_rate=1e-5, warmup_steps=0)).step([scored_group([1.0, 0.0], [5, 5])])
    assert (weights_of(single)["lm_head.weight"] != before["lm_head.weight"]).float().mean() < 0.2


def test_autocast_changes_the_forward_and_not_the_weights_type() -> None:
    policy = tiny_policy()
    full = Trainer(tiny_policy(), LearningOptions(autocast="off")).step(some_groups())
    short = Trainer(policy, LearningOptions(autocast="on")).step(some_groups())
    assert short.loss != full.loss
    assert short.metrics.approx_kl == pytest.approx(full.metrics.approx_kl, rel=0.05)
    assert {parameter.dtype for parameter in policy.trainable().values()} == {torch.float32}


def test_until_before_update_the_step_can_be_abandoned() -> None:
    policy, twin = tiny_policy(), tiny_policy()
    trainer, unbroken = (Trainer(each, LearningOptions(learning_rate=1e-3, warmup_steps=0)) for each in (policy, twin))
    before = weights_of(policy)

    def stop() -> None:
        assert_same_bits(weights_of(policy), before)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.step(some_groups(), stop)
    assert trainer.steps == 0
    assert trainer.state_dict()[0] == {}
    trainer.step(some_groups(1))
    unbroken.step(some_groups(1))
    assert_same_bits(weights_of(policy), weights_of(twin))


def test_with_lora_only_the_adapters_learn() -> None:
    policy = tiny_policy(lora=True)
    policy.model = get_peft_model(policy.model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights="gaussian"))
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    trainable = {name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    policy.trainable = lambda: trainable  # type: ignore[method-assign]
    trainer = Trainer(policy, LearningOptions(learning_rate=1e-2, warmup_steps=0))
    trainer.step(some_groups())
    trainer.step(some_groups(1))
    changed = {name for name, parameter in policy.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(trainable)
    assert all("lora_" in name for name in changed)
