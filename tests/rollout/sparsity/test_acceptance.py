"""Acceptance of sparse tokens: exact, from the top tokens alone, and by dense rescoring; the percentile that stands for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from swarm_node.rollout.sparsity.acceptance import (
    exact_acceptance,
    fifth_percentile,
    is_sparse,
    lower_bound,
    rescore,
    top_logprobs,
)
from tests.support.policies import random_policy


def random_logits(rows: int, vocabulary: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def test_acceptance_is_the_overlap_of_both_distributions() -> None:
    dense = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0], [0.25, 0.5, 0.25]]).log()
    sparse = torch.tensor([[0.1, 0.2, 0.7], [0.0, 0.5, 0.5], [0.25, 0.5, 0.25]]).log()
    assert_close(exact_acceptance(dense, sparse, 1.0), torch.tensor([0.4, 0.5, 1.0]))


def test_the_temperature_is_that_of_sampling() -> None:
    dense, sparse = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[math.log(3), 0.0]])
    assert_close(exact_acceptance(dense, sparse, 1.0), torch.tensor([0.5]))
    # At temperature 0.5 the odds are squared: 1/10 and 9/10.
    assert_close(exact_acceptance(dense, sparse, 0.5), torch.tensor([0.2]))


def test_acceptance_is_one_minus_total_variation_in_any_type_and_chunk() -> None:
    dense, sparse = random_logits(13, 700, 1), random_logits(13, 700, 2)
    expected = 1 - 0.5 * (torch.softmax(dense.double() / 0.8, -1) - torch.softmax(sparse.double() / 0.8, -1)).abs().sum(-1)
    for rows in (1, 5, 64):
        assert_close(exact_acceptance(dense, sparse, 0.8, rows).double(), expected, atol=1e-6, rtol=0)
    left, right = dense.bfloat16(), sparse.bfloat16()
    assert_close(exact_acceptance(left, right, 0.8), exact_acceptance(left.float(), right.float(), 0.8))
    assert exact_acceptance(dense[:0], sparse[:0], 1.0).shape == (0,)
    with pytest.raises(ValueError, match="same positions"):
        exact_acceptance(dense, sparse[:5], 1.0)


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_lower_bound_never_exceeds_the_exact_value(spread: float, temperature: float) -> None:
    dense = random_logits(50, 300, 3, spread)
    for seed, noise in enumerate((0.1, 1.0, 10.0)):
        sparse = dense + random_logits(50, 300, 10 + seed, noise)
        exact = exact_acceptance(dense, sparse, temperature)
        bound = lower_bound(top_logprobs(dense, temperature), top_logprobs(sparse, temperature))
        # Logits near 50 are stored in steps of 4e-6, and so are their log-probs.
        assert bool((bound <= exact + 1e-5).all())
        assert bool((bound >= 0).all())


def test_the_lower_bound_is_exact_where_the_top_tokens_are_everything() -> None:
    dense, sparse = random_logits(9, 20, 5), random_logits(9, 20, 6)
    assert_close(lower_bound(top_logprobs(dense, 1.3), top_logprobs(sparse, 1.3)), exact_acceptance(dense, sparse, 1.3))


def test_top_logprobs_are_of_the_whole_tempered_vocabulary() -> None:
    logits = random_logits(7, 90, 7)
    top = top_logprobs(logits, 0.7, k=4, rows=3)
    everything = torch.log_softmax(logits / 0.7, -1)
    assert_close(top.logprobs, everything.topk(4).values)
    assert_close(everything.gather(1, top.ids), top.logprobs)


def test_a_completion_drawn_from_the_dense_policy_is_accepted_entirely() -> None:
    policy = random_policy()
    prompt = np.arange(5, 25, dtype=np.int32)
    completions = [np.array([9, 30, 31, 7, 44], dtype=np.int32), np.array([50, 8], dtype=np.int32), np.array([12], dtype=np.int32)]
    drawn = [_whole_forward(policy.model, prompt, tokens) for tokens in completions]
    for members in (range(3), [1]):
        results = rescore(policy, prompt, [(completions[i], drawn[i]) for i in members], 0.9)
        assert [len(result) for result in results] == [len(completions[i]) for i in members]
        for result in results:
            np.testing.assert_allclose(result, 1.0, atol=1e-5)


def test_rescoring_compares_each_token_with_the_dense_policy_on_the_same_prefix() -> None:
    policy = random_policy()
    policy.model.train()
    prompt = np.array([7], dtype=np.int32)  # a prompt of one token has nothing to share
    long = np.arange(4, 54, dtype=np.int32)
    for start, tokens in ((prompt, long[:9]), (long, long[::-1].copy())):
        dense = _whole_forward(policy.model, start, tokens)
        others = [dense + random_logits(len(tokens), 64, seed, 1.0) for seed in (1, 2)]
        results = rescore(policy, start, [(tokens, other) for other in others], 1.2)
        for result, other in zip(results, others, strict=True):
            np.testing.assert_allclose(result, exact_acceptance(dense, other, 1.2).numpy(), atol=1e-5)
    assert policy.model.training


def test_the_fifth_percentile_is_a_value_that_one_in_twenty_does_not_exceed() -> None:
    rising = np.arange(1, 101) / 100
    shuffled = np.random.default_rng(0).permutation(rising)
    assert fifth_percentile(shuffled) == 0.05
    assert fifth_percentile(shuffled[shuffled > 0.01]) == 0.06  # rank 5 of 99
    assert fifth_percentile(np.array([0.9, 0.3, 0.8])) == 0.3
    assert fifth_percentile(np.arange(21.0)) == 1.0
    assert math.isnan(fifth_percentile(np.empty(0)))


def test_a_token_is_sparse_when_its_sequence_has_more_pages_than_it_may_read() -> None:
    # Budget 2 and the reserved three read five pages of 16: positions 0 to 79 have no more.
    assert is_sparse(np.array([0, 79, 80]), 2, 16).tolist() == [False, False, True]
    assert is_sparse(np.array([80, 80]), np.array([2, 3], dtype=np.int32), 16).tolist() == [True, False]
    assert not is_sparse(np.array([10**6]), 1 << 20, 16).any()


def _whole_forward(model: torch.nn.Module, prompt: np.ndarray, completion: np.ndarray) -> Tensor:
    """The logits that predict each token of the completion."""
    model_was_training = model.training
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
    with torch.inference_mode():
        logits: Tensor = model.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    model.train(model_was_training)
    return logits
