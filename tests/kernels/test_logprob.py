"""Fused token log-probs equal log_softmax and gather, forward and backward, however the vocabulary is cut."""

from __future__ import annotations

import pytest
import torch
from swarm_kernels.interface import Kernels
from swarm_kernels.logprob import Head, token_logprobs
from swarm_kernels.naive import logprob as naive
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels
from torch import Tensor
from torch.nn.functional import linear


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return NativeKernels() if request.param == "native" else TorchKernels()


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden (9, 40), weight (203, 40), bias, targets, temperatures and incoming gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((9, 40), (203, 40), (203,)))
    targets = torch.randint(0, 203, (9,), generator=generator)
    targets[:2] = torch.tensor([0, 202])
    temperature, incoming = 0.5 + torch.rand(9, generator=generator), torch.randn(9, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets, temperature, incoming


@pytest.mark.parametrize("chunk", [1, 50, 64, 203, 8192])
def test_values_and_gradients_equal_naive_in_float32(kernels: Kernels, chunk: int) -> None:
    hidden, weight, bias, targets, temperature, incoming = problem(torch.float32)
    ours = token_logprobs(kernels, Head(weight, bias), hidden, targets, temperature, chunk=chunk)
    reference = naive.token_logprobs(linear(hidden, weight, bias), targets, temperature)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(reference, (hidden, weight, bias), incoming)
    for actual, wanted in zip(torch.autograd.grad(ours, (hidden, weight, bias), incoming), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_round_logits_and_gradients_but_not_the_sum(kernels: Kernels, dtype: torch.dtype) -> None:
    hidden, weight, bias, targets, temperature, incoming = problem(dtype)
    ours = token_logprobs(kernels, Head(weight, bias), hidden, targets, temperature, chunk=64)
    reference = naive.token_logprobs(linear(hidden, weight, bias), targets, temperature)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(reference, (hidden, weight, bias), incoming)
    for actual, wanted in zip(torch.autograd.grad(ours, (hidden, weight, bias), incoming), expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), atol=0.05, rtol=0.02)


def test_one_temperature_serves_all_rows_and_only_wanted_gradients_are_made(kernels: Kernels) -> None:
    hidden, weight, _, targets, _, incoming = problem(torch.float32)
    ours = token_logprobs(kernels, Head(weight.detach()), hidden, targets, 0.7, chunk=64)
    reference = naive.token_logprobs(linear(hidden, weight.detach()), targets, torch.full((9,), 0.7))
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    ours.backward(incoming)
    assert weight.grad is None
    expected = torch.autograd.grad(reference, hidden, incoming)[0]
    torch.testing.assert_close(hidden.grad, expected, atol=1e-5, rtol=1e-5)


def test_a_two_token_vocabulary_by_hand(kernels: Kernels) -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0986123]])  # logits 0 and log 3
    result = token_logprobs(kernels, Head(weight), hidden, torch.tensor([1]), chunk=1)
    torch.testing.assert_close(result, torch.log(torch.tensor([0.75])))


def test_logits_of_minus_infinity_take_no_mass(kernels: Kernels) -> None:
    weight = torch.tensor([[0.0], [-torch.inf], [0.0]])
    result = token_logprobs(kernels, Head(weight), torch.tensor([[1.0]]), torch.tensor([2]), chunk=2)
    torch.testing.assert_close(result, torch.log(torch.tensor([0.5])))


def test_families_that_scale_and_cap_their_logits_are_followed_in_value_and_gradient(kernels: Kernels) -> None:
    hidden, weight, bias, targets, temperature, incoming = problem(torch.float32)
    head = Head(weight, bias, factor=0.25, cap=2.0)
    ours = token_logprobs(kernels, head, hidden, targets, temperature, chunk=64)
    reference = naive.token_logprobs(torch.tanh(linear(hidden, weight, bias) * 0.25 / 2) * 2, targets, temperature)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(reference, (hidden, weight, bias), incoming)
    for actual, wanted in zip(torch.autograd.grad(ours, (hidden, weight, bias), incoming), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


def test_autocast_projects_in_its_type_and_gradients_keep_that_of_the_weights(kernels: Kernels) -> None:
    hidden, weight, bias, targets, temperature, incoming = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = token_logprobs(kernels, Head(weight, bias), hidden, targets, temperature, chunk=64)
        reference = naive.token_logprobs(linear(hidden, weight, bias), targets, temperature)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(reference, (hidden, weight, bias), incoming)
    for actual, wanted in zip(torch.autograd.grad(ours, (hidden, weight, bias), incoming), expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 17, 63, 64, 150, 202])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_one_logit_that_is_not_a_number_spoils_its_row_and_no_other(
    kernels: Kernels, poison: float, place: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(4, 203, generator=torch.Generator().manual_seed(1)).to(dtype)
    targets, one = torch.tensor([0, 202, 70, 9]), torch.ones(4)
    expected = naive.token_logprobs(logits, targets, one)
    logits[2, place] = poison
    top, mass, chosen = torch.full((4,), -torch.inf), torch.zeros(4), torch.zeros(4)
    for start in range(0, 203, 64):
        kernels.logprob_forward(logits[:, start : start + 64], targets - start, one, top, mass, chosen)
    found = chosen - top - mass.log()
    assert found.isfinite().tolist() == [True, True, False, True]
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]], atol=1e-5, rtol=1e-5)


def test_an_id_outside_the_vocabulary_has_no_log_prob(kernels: Kernels) -> None:
    result = token_logprobs(kernels, Head(torch.zeros(4, 1)), torch.ones(3, 1), torch.tensor([-1, 3, 4]), chunk=3)
    torch.testing.assert_close(result, torch.log(torch.tensor([torch.nan, 0.25, torch.nan])), equal_nan=True)


def test_wrong_targets_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(kernels, Head(torch.zeros(3, 4)), torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
