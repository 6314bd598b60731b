"""Cache writes: new tokens reach their slots rotated, completed pages get their centroid, and a decode layer is the sum of its kernels."""

from __future__ import annotations

import pytest
import torch
from swarm_kernels.interface import DecodeStep, Kernels, NewTokens, Selection
from swarm_kernels.layout import LayerCache, PageLayout, allocate, copy_pages, gather
from swarm_kernels.naive import append as naive
from swarm_kernels.naive.attention import attend
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.naive.selection import select_pages
from swarm_kernels.native.backend import NativeKernels
from torch import Tensor

from tests.support.kernel_cases import assert_same, make_case

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return NativeKernels() if request.param == "native" else TorchKernels()


def new_tokens(count: int, dtype: torch.dtype, head_size: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, query, cosines, sines: views into one fused projection, as a model's runner has them."""
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(count, 6 + 2 + 2, head_size, generator=generator).to(dtype)
    angles = torch.rand(count, head_size // 2, generator=generator).repeat(1, 2) * 6
    return fused[:, 6:8], fused[:, 8:], fused[:, :6], angles.cos().to(dtype), angles.sin().to(dtype)


def filled_cache(dtype: torch.dtype, page_size: int = 16, head_size: int = 64) -> LayerCache:
    cache = allocate(PageLayout(layers=1, pages=6, kv_heads=2, head_size=head_size, page_size=page_size, dtype=dtype))[0]
    generator = torch.Generator().manual_seed(4)
    for part in (cache.keys, cache.values, cache.centroids):
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page_size", "head_size"), [(16, 32), (16, 64), (32, 96), (32, 128)])
@pytest.mark.parametrize("rotary", [True, False])
def test_equals_naive(kernels: Kernels, dtype: torch.dtype, page_size: int, head_size: int, rotary: bool) -> None:
    slots = torch.tensor([page_size - 1, -1, 3 * page_size, 5 * page_size + 7, 2 * page_size - 1])
    results = []
    for run in (naive.append, kernels.append):
        keys, values, query, cosines, sines = new_tokens(5, dtype, head_size)
        query = query.clone()
        cache = filled_cache(dtype, page_size, head_size)
        run(cache, NewTokens(keys, values, slots, query, *((cosines, sines) if rotary else ())))
        results.append((cache.keys, cache.values, cache.centroids, query))
    bound = 1e-6 if dtype == torch.float32 else 0  # products fuse with sums in float32; in the short types every rounding is the same
    for ours, reference in zip(results[1][:2] + results[1][3:], results[0][:2] + results[0][3:], strict=True):
        torch.testing.assert_close(ours, reference, atol=bound, rtol=0)
    torch.testing.assert_close(results[1][2], results[0][2], atol=1e-6, rtol={torch.float32: 1e-6}.get(dtype, 1e-2))


def test_a_centroid_is_the_mean_of_its_page_and_only_complete_pages_get_one(kernels: Kernels) -> None:
    cache = filled_cache(torch.float32)
    before = cache.centroids.clone()
    keys = torch.arange(17.0)[:, None, None].expand(17, 2, 64).contiguous()
    kernels.append(cache, NewTokens(keys, keys, torch.arange(17) + 16))
    assert torch.equal(cache.centroids[1], torch.full((2, 64), 7.5))
    assert torch.equal(cache.centroids[2], before[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_a_decode_layer_equals_append_select_attend(kernels: Kernels, dtype: torch.dtype, sparse: bool, splits: int) -> None:
    """Of 48 tokens the last completes its page; of 270 the last page is a split by itself."""
    case = make_case(lengths=(1, 48, 33, 400, 270), group=3, dtype=dtype)
    slots = torch.tensor([int(case.table[b, (n - 1) // 16]) * 16 + (n - 1) % 16 for b, n in enumerate(case.lengths.tolist())])
    budgets = torch.tensor([1, 2, 3, 4, 4], dtype=torch.int32)
    reference = LayerCache(case.cache.keys.clone(), case.cache.values.clone(), case.cache.centroids.clone())
    step: DecodeStep | None = None
    for layer in range(2):  # the second layer runs on what the first prepared
        keys, values, query, cosines, sines = new_tokens(5, dtype)
        step = step or DecodeStep(case.table, case.lengths, slots, case.scale, splits, cosines, sines, budgets, list_width=7)
        query, other = query + layer, query + layer
        out = kernels.decode_layer(step, case.cache, query, keys, values, sparse=sparse, window=0 if layer else 50)
        naive.append(reference, NewTokens(keys, values, slots, other, cosines, sines))
        pages = select_pages(reference, Selection(other, case.table, case.lengths, budgets, 7)) if sparse else None
        expected = attend(reference, case.attention(query=other, pages=pages, window=0 if layer else 50))
        assert_same((out, expected[1]), expected)
        torch.testing.assert_close(query, other, atol=1e-6, rtol=0)
        for part, other_part in ((case.cache.keys, reference.keys), (case.cache.values, reference.values)):
            torch.testing.assert_close(part, other_part, atol=1e-6, rtol=0, equal_nan=True)
        torch.testing.assert_close(case.cache.centroids, reference.centroids, atol=1e-6, rtol=1e-2, equal_nan=True)


def test_gather_returns_a_sequence_in_token_order_and_copies_are_whole_pages() -> None:
    case = make_case(lengths=(40,))
    keys, values = gather(case.cache, case.table[0], 40)
    for position in (0, 15, 16, 39):
        page = int(case.table[0, position // 16])
        assert torch.equal(keys[:, position], case.cache.keys[page, :, position % 16])
        assert torch.equal(values[:, position], case.cache.values[page, :, position % 16])
    source, target = case.table[0, :1].long(), torch.tensor([case.cache.keys.shape[0] - 1])
    copy_pages([case.cache], source, target)
    for part in (case.cache.keys, case.cache.values, case.cache.centroids):
        assert torch.equal(part[target], part[source])
