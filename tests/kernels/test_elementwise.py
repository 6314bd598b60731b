"""Residual sum with norm, and the gated MLP's middle: the compiled kernels against plain torch and against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from swarm_kernels.naive import elementwise as naive
from swarm_kernels.native.backend import NativeKernels
from transformers.models.llama.modeling_llama import LlamaRMSNorm

# One unit in the last place of values near 4.
ULP = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("shape", [(1, 32), (8, 576), (3, 100), (200, 512)])
def test_the_norm_equals_the_naive_one_and_that_of_the_module(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    hidden, delta, weight = (random(*size, dtype=dtype, seed=seed) for seed, size in enumerate([shape, shape, shape[1:]]))
    module = LlamaRMSNorm(shape[1], eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    total, out = NativeKernels().add_norm(hidden, delta, weight, 1e-5)
    assert torch.equal(total, hidden + delta)
    with torch.no_grad():
        torch.testing.assert_close(out, module(hidden + delta), atol=ULP[dtype], rtol=0)
    torch.testing.assert_close(out, naive.add_norm(hidden, delta, weight, 1e-5)[1], atol=ULP[dtype], rtol=0)
    same, first = NativeKernels().add_norm(hidden, None, weight, 1e-5)
    assert same is hidden
    torch.testing.assert_close(first, naive.add_norm(hidden, None, weight, 1e-5)[1], atol=ULP[dtype], rtol=0)


def test_the_norm_of_three_and_four() -> None:
    hidden = torch.zeros(1, 32)
    hidden[0, :2] = torch.tensor([3.0, 1.0])
    delta = torch.zeros(1, 32)
    delta[0, 1] = 3.0
    weight = torch.full((32,), 2.0)
    for kernels in (NativeKernels(), naive):
        total, out = kernels.add_norm(hidden, delta, weight, 0.0)
        assert total[0, :3].tolist() == [3.0, 4.0, 0.0]
        # The mean square is 25 / 32.
        torch.testing.assert_close(out[0, :2], torch.tensor([3.0, 4.0]) * 2 / (25 / 32) ** 0.5)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("shape", [(1, 32), (8, 1536), (3, 100), (64, 2048)])
def test_the_gate_equals_the_naive_one(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gates, values = (random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    torch.testing.assert_close(NativeKernels().gate(gates, values), naive.gate(gates, values), atol=ULP[dtype], rtol=ULP[dtype])


def test_the_gate_stays_finite_far_from_zero() -> None:
    gates = torch.tensor([-1000.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1000.0] + [0.0] * 25)
    out = NativeKernels().gate(gates, torch.ones(32))
    torch.testing.assert_close(out[:7], torch.tensor([0.0, 0.0, -0.26894143, 0.0, 0.7310586, 90.0, 1000.0]), atol=1e-6, rtol=1e-6)
