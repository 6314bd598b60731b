"""Page selection on the CPU equals the naive version, and keeps the pages that Sparrow keeps."""

from __future__ import annotations

import pytest
import torch
from swarm_kernels.interface import Kernels
from swarm_kernels.naive import selection as naive
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels

from tests.support.kernel_cases import make_case

LENGTHS = (1, 15, 16, 17, 81, 96, 97, 1025)


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return NativeKernels() if request.param == "native" else TorchKernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128])
@pytest.mark.parametrize("page_size", [16, 32])
def test_equals_naive_for_all_groups_and_budgets(kernels: Kernels, dtype: torch.dtype, head_size: int, page_size: int) -> None:
    for group in (1, 2, 3, 4, 8):
        case = make_case(lengths=LENGTHS, group=group, head_size=head_size, page_size=page_size, dtype=dtype)
        for budget, width in ((0, 3), (3, 6), (40, 43), (100, 103)):
            budgets = torch.full((len(LENGTHS),), budget, dtype=torch.int32)
            budgets[-1] += 2  # the width cuts what a sequence of a larger budget may read
            selection = case.selection(budgets, width)
            assert torch.equal(kernels.select_pages(case.cache, selection), naive.select_pages(case.cache, selection))


def test_reserved_pages_and_the_best_others_in_ascending_order(kernels: Kernels) -> None:
    case = make_case(lengths=(16 * 7 + 1,), group=2, kv_heads=1, head_size=32)  # pages 0 to 7, the last holds one token
    scores = {1: 3.0, 2: -9.0, 3: 8.0, 4: 0.0, 5: 5.0}
    case.query.fill_(0)
    case.query[0, 0, 0], case.query[0, 1, 0] = 0.5, 1.5  # the group's mean query is 1 in the first dimension
    for page, score in scores.items():
        case.cache.centroids[case.table[0, page], 0] = torch.nn.functional.one_hot(torch.tensor(0), 32) * score
    for budget, expected in ((0, [0, 6, 7]), (1, [0, 3, 6, 7]), (3, [0, 1, 3, 5, 6, 7]), (5, list(range(8))), (9, list(range(8)))):
        lists = kernels.select_pages(case.cache, case.selection([budget], 12))
        assert lists[0, 0].tolist() == expected + [-1] * (12 - len(expected))


def test_of_equal_scores_the_earlier_page_is_kept(kernels: Kernels) -> None:
    case = make_case(lengths=(16 * 9,), kv_heads=1)
    case.cache.centroids.fill_(0.25)
    lists = kernels.select_pages(case.cache, case.selection([3], 6))
    assert lists[0, 0].tolist() == [0, 1, 2, 3, 7, 8]


def test_budgets_differ_between_sequences(kernels: Kernels) -> None:
    case = make_case(lengths=(400, 400), kv_heads=1)
    lists = kernels.select_pages(case.cache, case.selection([2, 6], 9))
    assert (lists[0, 0] >= 0).sum() == 5
    assert (lists[1, 0] >= 0).sum() == 9


def test_a_list_without_room_for_the_reserved_pages_is_refused(kernels: Kernels) -> None:
    case = make_case()
    with pytest.raises(ValueError, match="reserved"):
        kernels.select_pages(case.cache, case.selection([0] * 5, 2))
