"""The sampler draws from exactly softmax(logits / T), says so exactly, and never returns what cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from swarm_kernels.interface import Kernels
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels
from torch import Tensor

Draw = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


@pytest.fixture(params=[TorchKernels, NativeKernels], ids=["torch", "native"])
def draw(request: pytest.FixtureRequest) -> Draw:
    kernels: Kernels = request.param()
    return kernels.draw


def even_uniforms(count: int) -> Tensor:
    """The midpoints of `count` equal intervals: inverting the distribution at them gives its counts exactly, up to one a token."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize(("vocabulary", "temperature"), [(5, 1.0), (256, 0.7), (1000, 1.0), (49152, 1.5)])
def test_counts_are_those_of_the_distribution(draw: Draw, vocabulary: int, temperature: float) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(vocabulary) * 4
    probabilities = (logits.double() / temperature).softmax(-1)
    count = 4096
    ids = torch.cat([draw(logits.expand(64, -1), u, temperature)[0] for u in even_uniforms(count).split(64)])
    found = torch.bincount(ids, minlength=vocabulary)
    assert bool(((found - count * probabilities).abs() <= 1.01).all())


def test_random_draws_pass_a_chi_square_test(draw: Draw) -> None:
    torch.manual_seed(1)
    logits = torch.randn(40)
    expected = logits.double().softmax(-1) * 50_000
    ids, _ = draw(logits.expand(50_000, -1), torch.rand(50_000, dtype=torch.float64), 1.0)
    chi_square = float(((torch.bincount(ids, minlength=40) - expected) ** 2 / expected).sum())
    assert chi_square < 72.1, "39 degrees of freedom: exceeded once in a thousand draws"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_float32_log_softmax_of_the_tempered_logits(draw: Draw, dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(2)
    logits = (torch.randn(64, 3000) * 5).to(dtype)
    ids, logprobs = draw(logits, torch.rand(64, dtype=torch.float64), temperature)
    exact = (logits.double() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 49152])
@pytest.mark.parametrize("uniform", [2.0**-53, 0.5, 1 - 2.0**-53, math.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_drawn_at_either_end(draw: Draw, vocabulary: int, uniform: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(32, vocabulary) * 3
    logits[:, ::2] = -float("inf") if vocabulary > 1 else 0.0
    logits[:, -1] = 0.0 if vocabulary < 3 else -200.0  # weight 0 in float32
    ids, logprobs = draw(logits, torch.full((32,), uniform, dtype=torch.float64), 1.0)
    assert bool(((ids >= 0) & (ids < vocabulary)).all())
    assert bool(torch.isfinite(logprobs).all())
    assert bool((logprobs > -104).all())


def test_a_growing_uniform_walks_through_the_vocabulary_in_order(draw: Draw) -> None:
    torch.manual_seed(4)
    ids, _ = draw(torch.randn(700).expand(2000, -1), even_uniforms(2000), 1.0)
    assert bool((ids.diff() >= 0).all())
    assert ids[0] < 10
    assert ids[-1] > 690


def test_each_row_has_its_own_distribution_and_number(draw: Draw) -> None:
    logits = torch.full((3, 600), -30.0)
    logits[0, 5] = logits[1, 300] = logits[2, 599] = 30.0
    ids, logprobs = draw(logits, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), 1.0)
    assert ids.tolist() == [5, 300, 599]
    np.testing.assert_allclose(logprobs.numpy(), 0.0, atol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_diverged_weights_are_an_error_and_not_a_token(draw: Draw, poison: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = poison
    with pytest.raises(FloatingPointError, match="diverged"):
        draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_compiled_sampler_draws_what_the_naive_one_draws(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(5)
    logits = (torch.randn(256, 49152) * 3).to(dtype)
    logits[:, 100:120] = -float("inf")
    uniforms = torch.rand(256, dtype=torch.float64)
    ids, logprobs = NativeKernels().draw(logits, uniforms, temperature)
    expected, expected_logprobs = TorchKernels().draw(logits, uniforms, temperature)
    # Float32 sums of 256 weights in another order: a draw that falls between the two is one of a thousand at most.
    same = ids == expected
    assert int(same.sum()) >= 255
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=0, atol=3e-6)


def test_rows_may_lie_apart() -> None:
    logits = torch.randn(4, 2, 300, generator=torch.Generator().manual_seed(6))
    uniforms = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
    for view in (logits[:, 1], logits[..., ::2][:, 0]):
        assert torch.equal(NativeKernels().draw(view, uniforms, 1.0)[0], TorchKernels().draw(view, uniforms, 1.0)[0])
