"""The paged KV cache: which physical page holds which tokens of which sequence, and who else reads it.

Pages are reference-counted. A group's prompt is written once and its pages are shared by the completions; a completion that writes into a
page that others read (the partial last page of the prompt) gets its own copy first. The cache belongs to one policy step: after a weight
update every sequence is stale, and using one is an error.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from swarm_kernels.layout import LayerCache, PageLayout, allocate, copy_pages
from torch import Tensor

from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.options import RolloutOptions


class OutOfPages(RuntimeError):
    """The request needs more pages than are free; nothing was changed. Release a sequence and ask again."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"{needed} more cache pages are needed, {free} of {total} are free: preempt a sequence, or give the cache more memory"
        )
        self.needed = needed
        self.free = free


class StaleSequence(RuntimeError):
    """The sequence was released, or its keys and values were computed by an earlier policy."""


@dataclass(eq=False)
class CachedSequence:
    """A handle; the cache keeps the rest."""

    row: int
    """Its row in the page table."""
    step: int
    """The policy step that computes its keys and values."""
    open: bool = field(default=True)
    """False once released."""


@dataclass(frozen=True)
class Batch:
    """What a decode step needs to know of its sequences, on the cache's device."""

    table: Tensor
    """(B, M) int32, physical pages."""
    lengths: Tensor
    """(B,) int32, tokens, the new one included."""
    slots: Tensor
    """(B,) int64, where the new token goes."""


class PagedCache:
    """Page bookkeeping over the tensors of all layers. Not safe for several threads."""

    def __init__(self, layout: PageLayout, step: int = 0) -> None:
        self.layout = layout
        self.step = step
        self.layers: list[LayerCache] = allocate(layout)
        self._references: NDArray[np.int32] = np.zeros(layout.pages, dtype=np.int32)
        self._free: list[int] = []
        self._table: NDArray[np.int32] = np.zeros((16, 16), dtype=np.int32)
        self._lengths: NDArray[np.int32] = np.zeros(16, dtype=np.int32)
        self._free_rows: list[int] = []
        self._sequences: set[CachedSequence] = set()
        self._forget()

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def pages_of(self, length: int) -> int:
        """Pages that `length` tokens take."""
        return -(-length // self.layout.page_size)

    def length(self, sequence: CachedSequence) -> int:
        """Tokens that have a slot."""
        self._check([sequence])
        return int(self._lengths[sequence.row])

    def row(self, sequence: CachedSequence) -> Tensor:
        """The physical pages of one sequence, (n,) int32 on the cache's device."""
        pages = self.pages_of(self.length(sequence))
        return self._tensor(self._table[sequence.row, :pages].copy())

    def open(self, length: int) -> CachedSequence:
        """A new sequence with slots for `length` tokens, in as few runs of neighbouring pages as there are. Raises OutOfPages."""
        needed = self.pages_of(length)
        self._require(needed)
        row = self._take_row(needed)
        for index in range(needed):
            self._table[row, index] = self._take_page()
        self._lengths[row] = length
        return self._register(row)

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Another sequence over the same pages. Costs no page until one of the two writes into a partial last page."""
        self._check([sequence])
        pages = self.pages_of(int(self._lengths[sequence.row]))
        row = self._take_row(pages)
        self._table[row, :pages] = self._table[sequence.row, :pages]
        self._references[self._table[row, :pages]] += 1
        self._lengths[row] = self._lengths[sequence.row]
        return self._register(row)

    def grow(self, sequences: Sequence[CachedSequence]) -> Batch:
        """Give each sequence the slot of one more token, in its own copy of a page that others read. Raises OutOfPages; then none grew."""
        self._check(sequences)
        rows = np.fromiter((sequence.row for sequence in sequences), dtype=np.int64, count=len(sequences))
        pages, offsets = np.divmod(self._lengths[rows], self.layout.page_size)
        self._widen(int(pages.max(initial=0)) + 1)
        fresh = offsets == 0
        shared = ~fresh & (self._references[self._table[rows, pages]] > 1)
        if fresh.any() or shared.any():
            self._own_last_pages(rows, pages, fresh, shared)
        slots = self._table[rows, pages].astype(np.int64) * self.layout.page_size + offsets
        self._lengths[rows] += 1
        table = self._table[rows, : int(pages.max(initial=0)) + 1]
        return Batch(self._tensor(table), self._tensor(self._lengths[rows]), self._tensor(slots))

    def slots(self, sequence: CachedSequence, start: int, stop: int) -> Tensor:
        """Slots of the tokens [start, stop) of a sequence, (stop - start,) int64: where prefill writes them."""
        if not 0 <= start <= stop <= self.length(sequence):
            raise ValueError(f"tokens [{start}, {stop}) of a sequence with slots for {self.length(sequence)}")
        pages, offsets = np.divmod(np.arange(start, stop), self.layout.page_size)
        return self._tensor(self._table[sequence.row, pages].astype(np.int64) * self.layout.page_size + offsets)

    def release(self, sequence: CachedSequence) -> None:
        """Give up a sequence; pages that nobody else holds are free again."""
        self._check([sequence])
        pages = self._table[sequence.row, : self.pages_of(int(self._lengths[sequence.row]))]
        self._references[pages] -= 1
        for page in pages[self._references[pages] == 0].tolist():
            heapq.heappush(self._free, page)
        sequence.open = False
        self._sequences.discard(sequence)
        self._free_rows.append(sequence.row)

    def policy_updated(self, step: int) -> None:
        """The weights changed: all sequences become stale and all pages free."""
        self.step = step
        self._forget()

    def _forget(self) -> None:
        for sequence in self._sequences:
            sequence.open = False
        self._sequences.clear()
        self._references[:] = 0
        self._free = list(range(self.layout.pages))  # ascending, so a heap already
        self._free_rows = list(range(len(self._lengths)))[::-1]

    def _own_last_pages(
        self, rows: NDArray[np.int64], pages: NDArray[np.int32], fresh: NDArray[np.bool_], shared: NDArray[np.bool_]
    ) -> None:
        """New pages for the sequences in `fresh`, copies for those in `shared`; the last holder of a page keeps the original."""
        writers = Counter(self._table[rows[shared], pages[shared]].tolist())
        copies = sum(min(count, int(self._references[page]) - 1) for page, count in writers.items())
        self._require(int(fresh.sum()) + copies)
        for index in np.flatnonzero(fresh):
            self._table[rows[index], pages[index]] = self._take_page()
        sources, targets = [], []
        for index in np.flatnonzero(shared):
            page = int(self._table[rows[index], pages[index]])
            if self._references[page] > 1:
                copy = self._take_page()
                self._references[page] -= 1
                self._table[rows[index], pages[index]] = copy
                sources.append(page)
                targets.append(copy)
        if sources:
            copy_pages(self.layers, *(torch.tensor(part, device=self.layout.device) for part in (sources, targets)))

    def _require(self, pages: int) -> None:
        if pages > len(self._free):
            raise OutOfPages(pages, len(self._free), self.layout.pages)

    def _take_page(self) -> int:
        page = heapq.heappop(self._free)  # the lowest: prompts get runs of neighbours, which read as one stream
        self._references[page] = 1
        return page

    def _take_row(self, pages: int) -> int:
        self._widen(pages)
        if not self._free_rows:
            count = len(self._lengths)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._free_rows = list(range(count, 2 * count))[::-1]
        return self._free_rows.pop()

    def _widen(self, pages: int) -> None:
        while pages > self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)

    def _register(self, row: int) -> CachedSequence:
        sequence = CachedSequence(row, self.step)
        self._sequences.add(sequence)
        return sequence

    def _check(self, sequences: Sequence[CachedSequence]) -> None:
        for sequence in sequences:
            if not sequence.open:
                raise StaleSequence(
                    f"a sequence of policy step {sequence.step} is used at step {self.step} after it was released or flushed"
                )

    def _tensor(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.layout.device)


FREE_SHARE = 0.4
"""Of the memory that is free when the cache is made, what it may take by itself; the learner needs the rest."""


class CacheTooSmall(ValueError):
    """One completion by itself does not fit into the cache."""


def cache_pages(layout: PageLayout, requests: Sequence[GroupRequest], max_new_tokens: int, options: RolloutOptions) -> int:
    """Pages for a call of `generate`: as many as its completions need if all that may run at once grow to the limit, or as many as the
    memory allows.

    Args:
        layout: Of the cache, with any number of pages.
        requests: At least one.
        max_new_tokens: Of each completion.
        options: `max_batch` completions run at once; `cache_gib` is the memory, or a share of what is free.

    Raises:
        CacheTooSmall: the memory does not hold one completion of the longest prompt.
    """
    size = layout.page_size
    # A completion may hold a copy of its prompt's partial last page besides its own pages.
    most = sorted(
        (-(-(len(request.prompt) + max_new_tokens) // size) + 1 for request in requests for _ in range(request.size)), reverse=True
    )
    useful = sum(most[: options.max_batch])
    allowed = int(_bytes(layout, options) // layout.page_bytes)
    if allowed < most[0]:
        need, have = (pages * layout.page_bytes / 2**20 for pages in (most[0], allowed))
        raise CacheTooSmall(
            f"one completion of up to {most[0] * size} tokens needs {need:.3g} MiB of cache and {have:.3g} MiB are allowed: "
            "raise rollout.cache_gib, or lower rollout.max_new_tokens"
        )
    return min(useful, allowed)


def _bytes(layout: PageLayout, options: RolloutOptions) -> float:
    if options.cache_gib is not None:
        return options.cache_gib * 2**30
    device = torch.device(layout.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return FREE_SHARE * free
