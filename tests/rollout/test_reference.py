"""The reference engine: the same completions whatever the batch, log-probs of exactly what was sampled, the stop set, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from swarm_kernels.naive.sampling import draw
from swarm_protocols.group import Completion, Finish
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from swarm_node.policy.growing_cache import GrowingLayer, growing_cache
from swarm_node.policy.logprobs import completion_logprobs
from swarm_node.policy.parts import cache_argument
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.noise import streams, uniforms
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.reference import ReferenceEngine
from tests.support.policies import family_model, random_model, random_policy


def request(length: int, size: int, key: int) -> GroupRequest:
    prompt = np.random.default_rng(length).integers(4, 64, length).astype(np.int32)
    return GroupRequest(prompt, size, key)


REQUESTS = [request(6, 4, 10), request(17, 3, 11), request(1, 5, 12)]


def generate(policy: Policy, requests: Sequence[GroupRequest] = REQUESTS, *, max_batch: int = 128, **changes: object) -> Rollout:
    arguments = {"seed": 1, "temperature": 1.0, "max_new_tokens": 40} | changes
    return ReferenceEngine(policy, RolloutOptions(max_batch=max_batch)).generate(requests, **arguments)  # type: ignore[arg-type]


def same(left: Sequence[Completion], right: Sequence[Completion]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(a.tokens, b.tokens) and a.finish == b.finish and np.allclose(a.logprobs, b.logprobs, atol=1e-5)
        for a, b in zip(left, right, strict=True)
    )


def sample_without_cache(policy: Policy, prompt: NDArray[np.int32], key: int, member: int, limit: int, temperature: float) -> list[int]:
    """One completion, the whole sequence through the model again for every token."""
    stream = streams(1, np.array([key], dtype=np.uint64), np.array([member], dtype=np.uint64))
    tokens: list[int] = []
    while len(tokens) < limit and not (tokens and tokens[-1] in policy.stop_ids):
        sequence = torch.tensor([[*prompt.tolist(), *tokens]])
        with torch.no_grad():
            logits = policy.model(input_ids=sequence).logits[:, -1]
        ids, _ = draw(logits, torch.from_numpy(uniforms(stream, len(tokens))), temperature)
        tokens.append(int(ids[0]))
    return tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_completions_equal_those_of_a_loop_without_cache_padding_or_batch(temperature: float) -> None:
    policy = random_policy()
    rollout = generate(policy, temperature=temperature, max_new_tokens=25)
    for asked, group in zip(REQUESTS, rollout.groups, strict=True):
        for member, completion in enumerate(group):
            expected = sample_without_cache(policy, asked.prompt, asked.key, member, 25, temperature)
            assert completion.tokens.tolist() == expected


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_log_probs_are_the_learner_s(temperature: float) -> None:
    policy = random_policy(layers=3)
    rollout = generate(policy, temperature=temperature)
    pairs = [
        (torch.from_numpy(asked.prompt), torch.from_numpy(completion.tokens))
        for asked, group in zip(REQUESTS, rollout.groups, strict=True)
        for completion in group
    ]
    recorded = [completion.logprobs for group in rollout.groups for completion in group]
    with torch.no_grad():
        dense = completion_logprobs(policy.model, pairs, temperature=temperature)
    for found, expected in zip(recorded, dense, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


def test_a_completion_does_not_depend_on_what_else_is_in_the_batch() -> None:
    policy = random_policy()
    together = generate(policy)
    for asked, group in zip(REQUESTS, together.groups, strict=True):
        assert same(generate(policy, [asked]).groups[0], group)
    backwards = generate(policy, REQUESTS[::-1])
    assert all(same(a, b) for a, b in zip(together.groups, backwards.groups[::-1], strict=True))


@pytest.mark.parametrize("max_batch", [1, 2, 4, 5, 7])
def test_splitting_into_batches_changes_nothing(max_batch: int) -> None:
    policy = random_policy()
    whole, split = generate(policy), generate(policy, max_batch=max_batch)
    assert all(same(a, b) for a, b in zip(whole.groups, split.groups, strict=True))
    assert split.report.tokens == whole.report.tokens


def test_a_larger_group_begins_with_the_smaller_one() -> None:
    policy = random_policy()
    [small], [large] = (generate(policy, [request(9, size, 3)]).groups for size in (2, 6))
    assert same(small, large[:2])


def test_prompts_are_computed_once_for_all_their_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = random_policy()
    shapes: list[tuple[int, ...]] = []
    policy.model.get_submodule("model.embed_tokens").register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(inputs[0].shape))
    )
    generate(policy)
    assert shapes[0] == (3, 17), "three prompts, padded to the longest"
    assert all(length == 1 for _, length in shapes[1:])
    assert shapes[1][0] <= 12


def test_finished_completions_leave_the_batch_once_they_are_a_quarter_of_it() -> None:
    policy = random_policy(stop_ids=frozenset(range(2, 12)))
    rows: list[int] = []
    policy.model.get_submodule("model.embed_tokens").register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[0]))
    rollout = generate(policy, [request(5, 64, 1)], max_new_tokens=60)
    assert rows[1] > rows[-1], "the batch shrinks"
    assert rows[1:] == sorted(rows[1:], reverse=True)
    lengths = np.array([len(completion) for completion in rollout.groups[0]])
    for step, batch in enumerate(rows[1:], start=1):
        running = int((lengths > step).sum())
        assert running <= batch
        assert batch == 1 or running > 0.75 * batch
    idle = rollout.report.slot_idle_share
    computed = 64 + sum(rows[1:])
    assert idle == pytest.approx(1 - lengths.sum() / computed)


def test_every_id_of_the_stop_set_ends_a_completion_and_stays_its_last_token() -> None:
    stop_ids = frozenset({2, 3, 20, 41})
    rollout = generate(random_policy(stop_ids=stop_ids), [request(8, 64, 2)], max_new_tokens=200)
    endings = set()
    for completion in rollout.groups[0]:
        tokens = completion.tokens.tolist()
        assert not stop_ids.intersection(tokens[:-1])
        assert (completion.finish is Finish.STOP) == (tokens[-1] in stop_ids)
        endings.add(tokens[-1])
    assert stop_ids <= endings


def test_the_token_limit_is_recorded_as_the_finish_reason() -> None:
    rollout = generate(random_policy(stop_ids=frozenset({63})), [request(4, 8, 5)], max_new_tokens=3)
    for completion in rollout.groups[0]:
        assert len(completion) == len(completion.logprobs) <= 3
        expected = Finish.STOP if completion.tokens[-1] == 63 else Finish.LENGTH
        assert completion.finish is expected
    assert any(completion.finish is Finish.LENGTH for completion in rollout.groups[0])


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    everything = frozenset(range(64))
    rollout = generate(random_policy(stop_ids=everything), [request(4, 3, 5)], max_new_tokens=1)
    assert [(len(c), c.finish) for c in rollout.groups[0]] == [(1, Finish.STOP)] * 3


def test_seeds_keys_and_members_decide_the_tokens() -> None:
    policy = random_policy()
    first, again = generate(policy), generate(policy)
    assert all(same(a, b) for a, b in zip(first.groups, again.groups, strict=True))
    assert not same(first.groups[0], generate(policy, seed=2).groups[0])
    assert not same(first.groups[0], generate(policy, [GroupRequest(REQUESTS[0].prompt, 4, 99)]).groups[0])
    distinct = {completion.tokens.tobytes() for completion in first.groups[0]}
    assert len(distinct) == len(first.groups[0])


def test_an_updated_policy_is_sampled_at_once() -> None:
    policy = random_policy()
    engine = ReferenceEngine(policy, RolloutOptions())
    before = engine.generate(REQUESTS, seed=1, temperature=1.0, max_new_tokens=20)
    policy.load_weights(dict(random_policy(seed=5).trainable()))
    engine.policy_updated(1)
    after = engine.generate(REQUESTS, seed=1, temperature=1.0, max_new_tokens=20)
    assert not same(before.groups[0], after.groups[0])
    assert same(after.groups[0], generate(random_policy(seed=5), max_new_tokens=20).groups[0])


def test_generation_leaves_the_model_in_the_mode_in_which_it_was() -> None:
    policy = random_policy()
    policy.model.train()
    generate(policy, max_new_tokens=2)
    assert policy.model.training
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_the_report_counts_tokens_and_waiting() -> None:
    rollout = generate(random_policy())
    assert rollout.report.tokens == sum(len(completion) for group in rollout.groups for completion in group)
    assert rollout.report.seconds > 0
    assert 0 <= rollout.report.slot_idle_share < 0.25
    assert 0 <= rollout.report.straggler_seconds <= rollout.report.seconds * len(REQUESTS)
    assert rollout.report.tokens_per_second == rollout.report.tokens / rollout.report.seconds


def test_no_requests_are_an_empty_rollout() -> None:
    rollout = generate(random_policy(), [])
    assert rollout.groups == ()
    assert rollout.report.tokens == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (GroupRequest(np.zeros(0, np.int32), 2, 0), "0 prompt tokens"),
        (GroupRequest(np.ones(3, np.int32), 0, 0), "size 0"),
        (request(480, 2, 0), "context of 512"),
    ],
)
def test_what_cannot_be_sampled_is_refused(asked: GroupRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(random_policy(), [asked])


def test_a_window_that_only_the_configuration_has_drops_nothing() -> None:
    policy = random_policy(model=family_model("llama", layers=2, sliding_window=8))
    for asked, group in zip(REQUESTS, generate(policy).groups, strict=True):
        for completion in group:
            pair = torch.from_numpy(asked.prompt), torch.from_numpy(completion.tokens)
            with torch.no_grad():
                alone = completion_logprobs(policy.model, [pair])[0].numpy()
            np.testing.assert_allclose(completion.logprobs, alone, atol=2e-5)


def test_the_growing_cache_holds_what_the_model_s_own_cache_would() -> None:
    model = random_model()
    own, growing = DynamicCache(config=model.config), growing_cache(model.config)
    ids = torch.randint(0, 64, (3, 90), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([2, 0, 0, 1])
    with torch.inference_mode():
        for cache in (own, growing):
            model(input_ids=ids[:, :30], **{cache_argument(model): cache})
            cache.batch_select_indices(rows)
            for position in range(30, 90):  # past the buffer's first size
                model(input_ids=ids[rows, position : position + 1], **{cache_argument(model): cache})
    assert growing.get_seq_length() == 90
    for left, right in zip(own.layers, growing.layers, strict=True):
        assert isinstance(left, DynamicLayer)
        assert isinstance(right, GrowingLayer)
        assert left.keys is not None
        assert right.keys is not None
        assert left.keys.shape == right.keys.shape == (4, 2, 90, 12)
        torch.testing.assert_close(left.keys, right.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(left.values, right.values, rtol=0, atol=1e-5)
