"""Prefill's attention equals decode attention of each token by itself, at the length that it sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from swarm_kernels.interface import Attention, Kernels, PromptAttention
from swarm_kernels.layout import LayerCache
from swarm_kernels.naive import attention as naive
from swarm_kernels.naive.backend import TorchKernels
from swarm_kernels.native.backend import NativeKernels
from torch import Tensor

from tests.support.kernel_cases import TOLERANCE, make_case

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module", params=[NativeKernels, TorchKernels], ids=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = request.param()
    return made


def one_by_one(query: Tensor, cache: LayerCache, table: Tensor, chunks: list[tuple[int, int]], scale: float, window: int) -> Tensor:
    rows = torch.cat([row.expand(length - start, -1) for (start, length), row in zip(chunks, table, strict=True)])
    lengths = torch.cat([torch.arange(start + 1, length + 1) for start, length in chunks]).int()
    return naive.attend(cache, Attention(query, rows, lengths, scale, window=window))[0]


# (tokens before a chunk, tokens after it): whole prompts around the sizes of tiles and blocks, and later chunks of longer ones.
WHOLE = [(0, 1), (0, 15), (0, 16), (0, 17), (0, 64), (0, 65), (0, 129)]
LATER = [(5, 6), (16, 33), (100, 180), (127, 130), (250, 385)]


@pytest.mark.parametrize("window", [0, 1, 20, 100])
@pytest.mark.parametrize(
    ("chunks", "group", "head_size", "page_size", "dtype"),
    [
        (WHOLE, 3, 64, 16, BF16),
        (LATER, 3, 64, 16, BF16),
        (WHOLE + LATER, 1, 32, 32, BF16),
        (LATER, 2, 96, 16, BF16),
        (LATER, 8, 128, 32, BF16),
        ([(3, 40)], 16, 64, 16, BF16),
        (WHOLE[:4] + LATER[:2], 2, 64, 16, F32),
        (WHOLE[:4] + LATER[:2], 2, 64, 16, F16),
    ],
    ids=str,
)
def test_every_token_sees_what_it_would_see_alone(
    chunks: list[tuple[int, int]], group: int, head_size: int, page_size: int, dtype: torch.dtype, window: int, kernels: Kernels
) -> None:
    case = make_case(lengths=tuple(length for _, length in chunks), group=group, head_size=head_size, page_size=page_size, dtype=dtype)
    counts = torch.tensor([length - start for start, length in chunks])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    starts = torch.tensor([start for start, _ in chunks], dtype=torch.int32)
    query = torch.randn(int(counts.sum()), 2 * group, head_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = kernels.attend_prompts(case.cache, PromptAttention(query, case.table, bounds, starts, case.scale, window))
    expected = one_by_one(query, case.cache, case.table, chunks, case.scale, window)
    absolute, relative = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=absolute, rtol=relative)


def test_sharp_scores_pick_one_value() -> None:
    """Scores of some hundreds, in rising order, so that each block fades all before it to nothing."""
    case = make_case(lengths=(200,), group=1, dtype=BF16)
    order = torch.linspace(-1, 1, 200)
    for h in range(2):
        for token in range(200):
            case.cache.keys[case.table[0, token // 16], h, token % 16] = order[token]
    query = torch.full((200, 2, 64), 8.0, dtype=BF16)
    bounds, starts = torch.tensor([0, 200], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    actual = NativeKernels().attend_prompts(case.cache, PromptAttention(query, case.table, bounds, starts, 1.0))
    torch.testing.assert_close(actual, one_by_one(query, case.cache, case.table, [(0, 200)], 1.0, 0), atol=1e-2, rtol=2e-2)


def test_strided_queries_and_the_number_of_threads_change_nothing() -> None:
    case = make_case(lengths=(70, 200), group=3, dtype=BF16)
    bounds, starts = torch.tensor([0, 70, 170], dtype=torch.int32), torch.tensor([0, 100], dtype=torch.int32)
    wide = torch.randn(170, 8, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    kernels, before, outs = NativeKernels(), torch.get_num_threads(), []
    try:
        for threads, query in ((1, wide[:, 1:7]), (3, wide[:, 1:7].contiguous())):
            torch.set_num_threads(threads)
            outs.append(kernels.attend_prompts(case.cache, PromptAttention(query, case.table, bounds, starts, case.scale)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": torch.tensor([0, 5], dtype=torch.int32)}, r"bounds are \[0, 5\]; expected ascending numbers from 0 to the 6 tokens"),
        ({"bounds": torch.tensor([0, 6])}, "torch.int64"),
        ({"bounds": torch.tensor([0, 0, 6], dtype=torch.int32)}, r"expected \(2,\)"),
        ({"starts": torch.tensor([-1], dtype=torch.int32)}, "begins at token 0"),
        ({"starts": torch.tensor([60], dtype=torch.int32)}, "66 tokens does not fit into the 4 pages"),
        ({"window": -1}, "window is -1"),
        ({"table": torch.zeros(2, 4, dtype=torch.int32)}, "page table"),
        ({"query": torch.zeros(6, 5, 64)}, "5 query heads over 2 KV heads"),
    ],
)
def test_a_wrong_shape_is_refused_before_memory_is_read(kernels: Kernels, change: dict[str, Any], message: str) -> None:
    case = make_case(lengths=(48,))
    bounds, starts = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([42], dtype=torch.int32)
    attention = PromptAttention(torch.zeros(6, 4, 64), case.table, bounds, starts, scale=1.0)
    with pytest.raises(ValueError, match=message):
        kernels.attend_prompts(case.cache, replace(attention, **change))
