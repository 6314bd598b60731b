"""The Triton kernels equal the naive versions, run by Triton's interpreter.

The interpreter is chosen when triton is imported, so the cases run in a process of their own: seen from the test run this file is one test,
which runs the file again with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.support.kernel_cases import assert_same, make_case, random_lists
from tests.support.waiting import HANG_S

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_triton_kernels_equal_naive_in_the_interpreter() -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not slow", __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=6 * HANG_S, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

    @pytest.mark.slow
    def test_triton_kernels_equal_naive_in_the_interpreter_over_the_whole_grid() -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "slow", __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=6 * HANG_S, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

else:
    from swarm_kernels.gpu.backend import TritonKernels
    from swarm_kernels.interface import Attention, NewTokens, Selection
    from swarm_kernels.layout import LayerCache
    from swarm_kernels.naive import append as naive_append
    from swarm_kernels.naive import attention as naive
    from swarm_kernels.naive import selection as naive_selection

    KERNELS = TritonKernels()
    F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

    @pytest.fixture(autouse=True)
    def _quiet() -> Iterator[None]:
        with warnings.catch_warnings():  # numpy, which stands for the device, remarks on log2(0) in rows that are masked
            warnings.filterwarnings("ignore", "divide by zero", RuntimeWarning)
            yield

    # Every length, group, head size, page size, type and number of splits at least once; long ones in few shapes: the interpreter is slow.
    COVER = [
        ((1, 15, 16, 17), 1, 64, 16, F32, 1),
        ((1, 15, 16, 17), 2, 128, 16, F16, 2),
        ((1, 16, 17), 3, 96, 32, BF16, 3),
        ((15, 17), 4, 32, 16, F32, 4),
        ((1025,), 8, 64, 32, BF16, 5),
        ((17, 1025), 3, 64, 16, F16, 8),
        ((1, 33), 2, 96, 16, F32, 7),
        ((15, 65), 8, 128, 32, F32, 6),
    ]
    GRID = [
        ((1, 15, 16, 17, 1025), group, size, page, dtype, splits)
        for group in (1, 2, 3, 4, 8)
        for size in (64, 96, 128)
        for page in (16, 32)
        for dtype in (F32, F16, BF16)
        for splits in (1, 3, 8)
    ]

    def compare(lengths: tuple[int, ...], group: int, size: int, page: int, dtype: torch.dtype, splits: int) -> None:
        case = make_case(lengths=lengths, group=group, head_size=size, page_size=page, dtype=dtype, kv_heads=2)
        for pages in (None, random_lists(case, width=5)):
            expected = naive.attend(case.cache, case.attention(pages=pages))
            assert_same(KERNELS.attend(case.cache, case.attention(pages=pages, splits=splits)), expected)

    @pytest.mark.parametrize("shape", COVER, ids=str)
    def test_attention(shape: tuple[tuple[int, ...], int, int, int, torch.dtype, int]) -> None:
        compare(*shape)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", GRID, ids=str)
    def test_attention_over_the_whole_grid(shape: tuple[tuple[int, ...], int, int, int, torch.dtype, int]) -> None:
        compare(*shape)

    def test_windows_and_a_full_list() -> None:
        case = make_case(lengths=(17, 70), group=2)
        expected = naive.attend(case.cache, case.attention(window=20))
        assert_same(KERNELS.attend(case.cache, case.attention(window=20, splits=2)), expected)
        everything = torch.arange(5, dtype=torch.int32).expand(2, 2, -1)
        dense, full = (KERNELS.attend(case.cache, case.attention(splits=1, pages=pages)) for pages in (None, everything))
        assert torch.equal(dense[0], full[0])
        assert torch.equal(dense[1], full[1])

    def test_padding_changes_no_bit() -> None:
        """Of the lists, of the page table, and by rows of no sequence: a recorded step is padded in all three ways."""
        case = make_case(lengths=(300, 700), group=3)
        budgets = torch.tensor([9, 20], dtype=torch.int32)
        lists = KERNELS.select_pages(case.cache, case.selection(budgets, 23))
        query, table, lengths, more = (
            torch.cat([part, torch.zeros_like(part[:1])]) for part in (case.query, case.table, case.lengths, budgets)
        )
        wide = torch.nn.functional.pad(table, (0, 30), value=10**9)
        padded = KERNELS.select_pages(case.cache, Selection(query, wide, lengths, more, 40))
        assert torch.equal(padded[:2, :, :23], lists)
        assert (padded[:2, :, 23:] == -1).all()
        assert (padded[2] == -1).all()
        for pages, padded_pages in ((None, None), (lists, padded)):
            out = KERNELS.attend(case.cache, case.attention(pages=pages, splits=3))
            padded_out = KERNELS.attend(case.cache, Attention(query, wide, lengths, case.scale, padded_pages, splits=3))
            for part, padded_part in zip(out, padded_out, strict=True):
                assert torch.equal(padded_part[:2], part)
            assert torch.equal(padded_out[0][2], torch.zeros_like(padded_out[0][2]))

    def test_nothing_to_read_gives_zero_and_minus_infinity() -> None:
        case = make_case(lengths=(17, 40))
        empty = torch.full((2, 2, 8), -1, dtype=torch.int32)
        for splits in (1, 2):
            out, lse = KERNELS.attend(case.cache, case.attention(scale=1.0, pages=empty, splits=splits))
            assert torch.equal(out, torch.zeros_like(out))
            assert torch.equal(lse, torch.full_like(lse, -torch.inf))

    def test_offsets_past_two_to_the_31_elements() -> None:
        # The buffer is never touched but for a few pages, so it costs address space, not memory.
        last = 2**31 // (2 * 16 * 64) + 3
        pages = torch.empty((last + 1) * 2 * 16 * 64, dtype=F16).view(last + 1, 1, 2, 16, 64)
        cache = LayerCache(pages[:, :, 0], pages[:, :, 1], torch.empty(1, 1, 64, dtype=F16).expand(last + 1, 1, 64))
        case = make_case(lengths=(33,), kv_heads=1, dtype=F16)
        far = torch.tensor([[last, 0, last - 1]], dtype=torch.int32)
        slots = far[0].long().repeat_interleave(16) * 16 + torch.arange(16).repeat(3)
        keys, values = (part[case.table[0, :3].long(), 0].reshape(48, 1, 64)[:33] for part in (case.cache.keys, case.cache.values))
        KERNELS.append(cache, NewTokens(keys.contiguous(), values.contiguous(), slots[:33]))
        actual = KERNELS.attend(cache, case.attention(table=far, splits=2))
        assert_same(actual, naive.attend(case.cache, case.attention()))

    @pytest.mark.parametrize(("size", "page", "dtype", "group"), [(64, 16, F32, 3), (96, 32, BF16, 2), (128, 16, F16, 8)])
    def test_selection(size: int, page: int, dtype: torch.dtype, group: int) -> None:
        case = make_case(lengths=(1, 15, 17, 97, 1025), group=group, head_size=size, page_size=page, dtype=dtype)
        for budget, width in ((0, 3), (2, 5), (30, 20)):
            budgets = torch.tensor([0, 1, budget, budget, budget], dtype=torch.int32)
            selection = case.selection(budgets, width)
            assert torch.equal(KERNELS.select_pages(case.cache, selection), naive_selection.select_pages(case.cache, selection))

    def test_of_equal_scores_the_earlier_page_is_kept() -> None:
        case = make_case(lengths=(16 * 9,), kv_heads=1)
        case.cache.centroids.fill_(-0.25)
        lists = KERNELS.select_pages(case.cache, case.selection([3], 6))
        assert lists[0, 0].tolist() == [0, 1, 2, 3, 7, 8]

    @pytest.mark.parametrize("dtype", [F32, F16])
    @pytest.mark.parametrize(("size", "page"), [(64, 16), (96, 32)])
    @pytest.mark.parametrize("rotary", [True, False])
    def test_append(dtype: torch.dtype, size: int, page: int, rotary: bool) -> None:
        slots = torch.tensor([page - 1, -1, 2 * page, 3 * page + 7, 2 * page - 1])
        generator = torch.Generator().manual_seed(1)
        query, keys, values = (torch.randn(5, heads, size, generator=generator).to(dtype) for heads in (6, 2, 2))
        angles = torch.rand(5, size // 2, generator=generator).repeat(1, 2)
        extra = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary else ()
        results = []
        for run in (naive_append.append, KERNELS.append):
            pages = torch.randn(4, 2, 2, page, size, generator=torch.Generator().manual_seed(2)).to(dtype)
            cache, rotated = LayerCache(pages[:, :, 0], pages[:, :, 1], torch.zeros(4, 2, size, dtype=dtype)), query.clone()
            run(cache, NewTokens(keys, values, slots, rotated, *extra))
            results.append((pages, cache.centroids, rotated))
        for ours, reference in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(ours, reference, atol=2e-6, rtol=1e-3 if dtype == F16 else 1e-6)
