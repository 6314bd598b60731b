"""Linear layers: the compiled kernels against float32, and where torch computes them."""

from __future__ import annotations

import pytest
import torch
from swarm_kernels.naive import linear as naive
from swarm_kernels.native import backend
from swarm_kernels.native.backend import NativeKernels
from swarm_kernels.native.stack import FEW_ROWS


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 8, 15, 16, 17, 31, 32, 33, 48, 64, 200, 257, 300, 1000])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 32), (576, 192), (64, 1536), (1536, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_is_the_float32_product_rounded_once(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, weight = random(rows, inputs, seed=rows), random(outputs, inputs, seed=outputs)
    bias = random(outputs, seed=7) if biased else None
    exact = naive.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = NativeKernels().linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16, and what float32 sums of so many products lose near zero.
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-8, atol=1e-5 * inputs**0.5)


def test_a_row_does_not_depend_on_the_others() -> None:
    kernels = NativeKernels()
    x, weight = random(FEW_ROWS + 40, 576), random(96, 576, seed=1)
    if not kernels.library.swarm_has_linear():
        assert torch.equal(kernels.linear(x, weight), naive.linear(x, weight))  # torch's kernels promise no more
        return
    together = kernels.linear(x, weight)
    for rows in (1, 7, 16, 20, FEW_ROWS + 1):
        assert torch.equal(kernels.linear(x[:rows].contiguous(), weight), together[:rows])


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_many_rows_may_be_shared_out_among_any_number_of_threads(threads: int) -> None:
    """More threads than panels of weights: rows are shared out too."""
    kernels, before = NativeKernels(), torch.get_num_threads()
    x, weight, bias = random(FEW_ROWS + 45, 576), random(96, 576, seed=1), random(96, seed=2)
    try:
        torch.set_num_threads(threads)
        out = kernels.linear(x, weight, bias)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out.double(), naive.linear(x.double(), weight.double(), bias.double()), rtol=2.0**-8, atol=3e-4)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (random(4, 48), random(32, 48)),
        (random(4, 64), random(40, 64)),
        (random(0, 64), random(32, 64)),
        (random(64, 4).t(), random(32, 64)),
        (random(4, 64, dtype=torch.float32), random(32, 64, dtype=torch.float32)),
    ],
)
def test_whatever_the_kernel_does_not_take_is_torch_s(x: torch.Tensor, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = NativeKernels()
    monkeypatch.setattr(backend, "LinearArguments", None)  # calling it would fail
    assert torch.equal(kernels.linear(x, weight), naive.linear(x, weight))


def test_shapes_that_do_not_fit_are_torch_s_error() -> None:
    weight = random(32, 64)
    for x, bias in ((random(4, 96), None), (random(4, 64), random(16))):
        with pytest.raises(RuntimeError):
            NativeKernels().linear(x, weight, bias)
