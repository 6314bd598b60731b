"""The paged cache shares a prompt's pages, copies what is written while shared, reports exhaustion, and forgets at a weight update."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_kernels.interface import NewTokens
from swarm_kernels.layout import PageLayout, gather
from swarm_kernels.naive.append import append
from torch import Tensor

from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.cache import CachedSequence, OutOfPages, PagedCache, StaleSequence, cache_pages


def make_cache(pages: int, layers: int = 1) -> PagedCache:
    return PagedCache(PageLayout(layers=layers, pages=pages, kv_heads=1, head_size=32, page_size=16, dtype=torch.float32))


def used(cache: PagedCache) -> int:
    return cache.layout.pages - cache.free_pages


def write(cache: PagedCache, slots: Tensor, values: list[float]) -> None:
    """Tokens whose keys and values are all the given number."""
    tokens = torch.tensor(values)[:, None, None].expand(-1, 1, 32).contiguous()
    for layer in cache.layers:
        append(layer, NewTokens(tokens, -tokens, slots))


def read(cache: PagedCache, sequence: CachedSequence) -> list[float]:
    """The first key number of every token, checked to be the same in every layer and in the values."""
    rows = []
    for layer in cache.layers:
        keys, values = gather(layer, cache.row(sequence), cache.length(sequence))
        assert torch.equal(keys, -values)
        rows.append(keys[0, :, 0].tolist())
    assert all(row == rows[0] for row in rows)
    return rows[0]


def prefilled(cache: PagedCache, length: int) -> CachedSequence:
    sequence = cache.open(length)
    write(cache, cache.slots(sequence, 0, length), [float(i) for i in range(length)])
    return sequence


def test_a_group_shares_its_prompt_and_each_completion_copies_the_partial_page_once() -> None:
    cache = make_cache(pages=20, layers=3)
    prompt = prefilled(cache, 40)
    group = [cache.fork(prompt) for _ in range(4)]
    cache.release(prompt)
    assert used(cache) == 3  # 40 tokens, once
    batch = cache.grow(group)
    assert used(cache) == 2 + 4  # two full pages shared, the partial one copied for all but the last holder
    assert batch.table[:, :2].unique(dim=0).shape[0] == 1
    assert batch.table[:, 2].unique().numel() == 4
    write(cache, batch.slots, [100.0, 101.0, 102.0, 103.0])
    for index, sequence in enumerate(group):
        assert read(cache, sequence) == [float(i) for i in range(40)] + [100.0 + index]
    cache.grow(group)
    assert used(cache) == 6


def test_a_prompt_that_fills_its_pages_is_shared_without_a_copy() -> None:
    cache = make_cache(pages=10)
    prompt = prefilled(cache, 32)
    group = [cache.fork(prompt) for _ in range(3)]
    batch = cache.grow(group)
    assert used(cache) == 2 + 3
    assert batch.lengths.tolist() == [33, 33, 33]
    assert (batch.slots % 16).tolist() == [0, 0, 0]
    assert read(cache, prompt) == [float(i) for i in range(32)]


def test_pages_are_free_when_their_last_holder_is_gone() -> None:
    cache = make_cache(pages=8)
    prompt = prefilled(cache, 20)
    twin = cache.fork(prompt)
    cache.release(prompt)
    assert used(cache) == 2
    cache.release(twin)
    assert cache.free_pages == 8


def test_exhaustion_is_reported_and_changes_nothing() -> None:
    cache = make_cache(pages=4)
    first, second = prefilled(cache, 32), prefilled(cache, 17)
    with pytest.raises(OutOfPages, match="1 more cache pages are needed, 0 of 4 are free"):
        cache.grow([second, first])
    assert (cache.length(first), cache.length(second), used(cache)) == (32, 17, 4)
    with pytest.raises(OutOfPages):
        cache.open(1)
    cache.release(second)  # the caller preempts one and goes on with the other
    assert cache.grow([first]).lengths.tolist() == [33]


def test_exhaustion_counts_the_copies_that_a_group_will_need() -> None:
    cache = make_cache(pages=4)
    prompt = prefilled(cache, 5)
    group = [cache.fork(prompt) for _ in range(4)]
    with pytest.raises(OutOfPages) as raised:
        cache.grow(group)  # the prompt still holds the page, so all four need a copy
    assert (raised.value.needed, raised.value.free) == (4, 3)
    cache.release(prompt)
    cache.grow(group)  # now the last of them keeps the original
    assert cache.free_pages == 0


def test_a_weight_update_makes_everything_stale() -> None:
    cache = make_cache(pages=4)
    old = prefilled(cache, 20)
    cache.policy_updated(7)
    assert cache.free_pages == 4
    for use in (cache.fork, cache.release, cache.row, cache.length, lambda sequence: cache.grow([sequence])):
        with pytest.raises(StaleSequence, match="policy step 0 is used at step 7"):
            use(old)
    assert cache.open(64).step == 7


def test_a_released_sequence_cannot_be_used_again() -> None:
    cache = make_cache(pages=4)
    sequence = cache.open(3)
    cache.release(sequence)
    with pytest.raises(StaleSequence):
        cache.grow([sequence])


def test_a_prompt_gets_neighbouring_pages() -> None:
    cache = make_cache(pages=16)
    blocker, prompt = cache.open(16), cache.open(100)
    assert cache.row(prompt).tolist() == [1, 2, 3, 4, 5, 6, 7]
    cache.release(blocker)
    assert cache.row(cache.open(16)).tolist() == [0]


def test_slots_outside_a_sequence_are_refused() -> None:
    cache = make_cache(pages=4)
    with pytest.raises(ValueError, match=r"tokens \[0, 21\) of a sequence with slots for 20"):
        cache.slots(cache.open(20), 0, 21)


def test_without_a_size_of_its_own_the_cache_takes_two_fifths_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_cache(pages=1).layout
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * layout.page_bytes))
    requests = [GroupRequest(np.zeros(16, np.int32), 50, 0)]  # 50 completions of two pages and one for a copy
    assert cache_pages(layout, requests, 16, RolloutOptions()) == 40
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * layout.page_bytes))
    assert cache_pages(layout, requests, 16, RolloutOptions()) == 150


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "fork", "grow", "release", "update"]), st.integers(0, 40)), max_size=40))
def test_whatever_happens_sequences_read_what_they_wrote(actions: list[tuple[str, int]]) -> None:
    """A model of plain lists beside the cache: same contents always, and references add up."""
    cache = make_cache(pages=12)
    contents: dict[CachedSequence, list[float]] = {}
    stamp = 1000.0
    for action, number in actions:
        exhausted: OutOfPages | None = None
        chosen = list(contents)[number % len(contents)] if contents else None
        try:
            if action == "open":
                contents[prefilled(cache, number)] = [float(i) for i in range(number)]
            elif action == "update":
                cache.policy_updated(cache.step + 1)
                contents.clear()
            elif chosen is not None and action == "fork":
                contents[cache.fork(chosen)] = list(contents[chosen])
            elif chosen is not None and action == "release":
                cache.release(chosen)
                del contents[chosen]
            elif action == "grow":
                batch = cache.grow(list(contents))
                numbers = [stamp + i for i in range(len(contents))]
                stamp += len(contents)
                write(cache, batch.slots, numbers)
                for tokens, number_written in zip(contents.values(), numbers, strict=True):
                    tokens.append(number_written)
        except OutOfPages as error:
            exhausted = error
        if exhausted is not None:
            assert exhausted.needed > exhausted.free == cache.free_pages
        for sequence, tokens in contents.items():
            assert read(cache, sequence) == tokens
        held = {page for sequence in contents for page in cache.row(sequence).tolist()}
        assert used(cache) == len(held)


def test_the_table_grows_with_many_and_long_sequences() -> None:
    cache = make_cache(pages=200)
    long = cache.open(16 * 100)
    many = [cache.open(1) for _ in range(40)]
    batch = cache.grow([long, *many])
    assert batch.table.shape == (41, 101)
    assert np.array_equal(batch.table[0].numpy(), cache.row(long).numpy())
    assert batch.lengths.tolist() == [1601] + [2] * 40
