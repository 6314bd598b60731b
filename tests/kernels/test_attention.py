"""Decode attention on the CPU equals the naive version: compiled kernels over the whole grid, torch operations over a part of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from swarm_kernels.interface import Attention, Kernels
from swarm_kernels.layout import LayerCache, PageLayout, allocate
from swarm_kernels.naive import attention as naive
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels

from tests.support.kernel_cases import LENGTHS, assert_same, make_case, random_lists

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def native() -> Kernels:
    return NativeKernels()


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return NativeKernels() if request.param == "native" else TorchKernels()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
@pytest.mark.parametrize("page_size", [16, 32])
def test_dense_and_sparse_equal_naive_for_all_groups_and_splits(
    native: Kernels, dtype: torch.dtype, head_size: int, page_size: int
) -> None:
    for group in (1, 2, 3, 4, 8):
        case = make_case(group=group, head_size=head_size, page_size=page_size, dtype=dtype)
        lists = random_lists(case, width=11)
        dense = naive.attend(case.cache, case.attention())
        sparse = naive.attend(case.cache, case.attention(pages=lists))
        for splits in range(1, 9):
            assert_same(native.attend(case.cache, case.attention(splits=splits)), dense)
            assert_same(native.attend(case.cache, case.attention(pages=lists, splits=splits)), sparse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("march", "needs"), [("x86-64-v2", "ssse3"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512f"), ("cooperlake", "avx512_bf16")]
)
def test_older_processors_get_the_same_result(march: str, needs: str) -> None:
    if needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor cannot run code for {march}")
    kernels = NativeKernels(march)
    for dtype, head_size, group in itertools.product(DTYPES, (32, 64, 96, 128), (1, 3, 8)):
        case = make_case(group=group, head_size=head_size, dtype=dtype)
        expected = naive.attend(case.cache, case.attention())
        assert_same(kernels.attend(case.cache, case.attention(splits=3)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_backends_equal_naive_with_lists_windows_and_splits(kernels: Kernels, dtype: torch.dtype) -> None:
    case = make_case(group=3, dtype=dtype)
    for pages, window, splits in itertools.product((None, random_lists(case, width=7)), (0, 1, 20, 40), (None, 3)):
        expected = naive.attend(case.cache, case.attention(pages=pages, window=window))
        assert_same(kernels.attend(case.cache, case.attention(pages=pages, window=window, splits=splits)), expected)


def test_a_hand_computed_pair_of_tokens(kernels: Kernels) -> None:
    case = make_case(lengths=(2,), group=1, kv_heads=1, head_size=32)
    page = int(case.table[0, 0])
    case.query.fill_(0)
    case.query[0, 0, 0] = 1
    case.cache.keys[page, 0, :2] = 0
    case.cache.keys[page, 0, 1, 0] = math.log(3)
    case.cache.values[page, 0, 0] = 1
    case.cache.values[page, 0, 1] = 5
    out, lse = kernels.attend(case.cache, case.attention(scale=1.0))
    torch.testing.assert_close(out, torch.full_like(out, 0.25 * 1 + 0.75 * 5))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(1 + 3)))


def test_a_full_list_equals_dense(kernels: Kernels) -> None:
    case = make_case(dtype=torch.bfloat16)
    count = -(-LENGTHS[-1] // 16)
    everything = torch.arange(count, dtype=torch.int32).expand(len(LENGTHS), 2, -1)
    dense = kernels.attend(case.cache, case.attention(splits=1))
    listed = kernels.attend(case.cache, case.attention(splits=1, pages=everything))
    assert torch.equal(dense[0], listed[0])
    assert torch.equal(dense[1], listed[1])


def test_nothing_to_read_gives_zero_and_minus_infinity(kernels: Kernels) -> None:
    case = make_case(lengths=(17, 40))
    empty = torch.full((2, 2, 4), -1, dtype=torch.int32)
    for lengths, pages in ((case.lengths, empty), (torch.zeros_like(case.lengths), None)):
        out, lse = kernels.attend(case.cache, case.attention(lengths=lengths, pages=pages, splits=2))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_large_scores_neither_overflow_nor_lose_the_winner(kernels: Kernels) -> None:
    case = make_case(lengths=(40,), group=1)
    case.query.mul_(1e4)
    expected = naive.attend(case.cache, case.attention(scale=1.0))
    out, lse = kernels.attend(case.cache, case.attention(scale=1.0, splits=3))
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=0)


def test_with_fixed_splits_a_sequence_does_not_feel_its_neighbours(native: Kernels) -> None:
    case = make_case(group=3, dtype=torch.bfloat16)
    together = native.attend(case.cache, case.attention(splits=4))
    for b in range(len(LENGTHS)):
        one = slice(b, b + 1)
        alone = native.attend(case.cache, Attention(case.query[one], case.table[one], case.lengths[one], case.scale, splits=4))
        assert torch.equal(alone[0], together[0][one])
        assert torch.equal(alone[1], together[1][one])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(native: Kernels, threads: int) -> None:
    case = make_case(group=2, dtype=torch.float16)
    expected = native.attend(case.cache, case.attention(splits=4))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = native.attend(case.cache, case.attention(splits=4))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_strided_queries_are_read_as_they_lie(native: Kernels) -> None:
    case = make_case(group=2)
    fused = torch.randn(len(LENGTHS), 12, 64)
    fused[:, 3:7] = case.query
    expected = native.attend(case.cache, case.attention())
    actual = native.attend(case.cache, case.attention(query=fused[:, 3:7]))
    assert torch.equal(actual[0], expected[0])


def test_offsets_past_two_to_the_31_elements(kernels: Kernels) -> None:
    # The buffer is never touched but for a few pages, so it costs address space, not memory.
    page_elements, last = 2 * 16 * 64, 2**31 // (2 * 16 * 64) + 3
    pages = torch.empty((last + 1) * page_elements, dtype=torch.bfloat16).view(last + 1, 1, 2, 16, 64)
    cache = LayerCache(pages[:, :, 0], pages[:, :, 1], torch.empty(1, 1, 64, dtype=torch.bfloat16).expand(last + 1, 1, 64))
    case = make_case(lengths=(33,), kv_heads=1, dtype=torch.bfloat16)
    far = torch.tensor([[last, 0, last - 1]], dtype=torch.int32)
    for index in range(3):
        pages[far[0, index], 0, 0] = case.cache.keys[case.table[0, index], 0]
        pages[far[0, index], 0, 1] = case.cache.values[case.table[0, index], 0]
    assert int(far.max()) * cache.keys.stride(0) > 2**31
    assert_same(
        kernels.attend(cache, case.attention(table=far, splits=2)),
        naive.attend(case.cache, case.attention()),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, "lengths"),
        ({"table": torch.zeros(5, 4, dtype=torch.int64)}, "page table"),
        ({"query": torch.zeros(5, 5, 64)}, "query heads"),
        ({"query": torch.zeros(5, 4, 64, dtype=torch.float16)}, "must agree"),
        ({"pages": torch.zeros(5, 3, 4, dtype=torch.int32)}, "page lists"),
        ({"splits": -1}, "splits"),
        ({"window": -1}, "window"),
    ],
)
def test_a_wrong_shape_is_refused_before_memory_is_read(kernels: Kernels, change: dict[str, object], message: str) -> None:
    case = make_case()
    with pytest.raises(ValueError, match=message):
        kernels.attend(case.cache, case.attention(**change))


def test_how_a_list_is_cut_does_not_depend_on_its_padding() -> None:
    """The longest list of a batch pads the others: 23 entries are cut after 16, and 43 would be after 22."""
    torch.manual_seed(0)
    cache = allocate(PageLayout(layers=1, pages=64, kv_heads=2, head_size=64, dtype=torch.float32))[0]
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    query, table = torch.randn(1, 4, 64), torch.randperm(64, dtype=torch.int32)[None]
    pages = torch.arange(0, 46, 2, dtype=torch.int32).expand(1, 2, -1).contiguous()
    padded = torch.nn.functional.pad(pages, (0, 20), value=-1)
    length = torch.tensor([64 * 16], dtype=torch.int32)
    kernels = NativeKernels()
    outs = [kernels.attend(cache, Attention(query, table, length, 0.3, part, splits=2))[0] for part in (pages, padded)]
    assert torch.equal(*outs)
