"""Continuous batching over all groups of a step: who is computed next, who waits, and who gives way when the cache is full.

Prompts are computed in the order of the requests, some tokens at a time; the completions of a computed prompt take free slots as they
come; a slot is taken again as soon as its completion ends. When pages run out, prompts whose completions have not all begun give up
theirs first, then the completion that began last. Both are computed again later: nothing that was drawn is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swarm_node.rollout.paged.cache import Batch, OutOfPages, PagedCache
from swarm_node.rollout.paged.runner import Chunk
from swarm_node.rollout.paged.sequence import Prompt, Sequence


class Scheduler:
    """Bookkeeping of one call of `generate`; it moves sequences and never computes."""

    def __init__(
        self, prompts: Ordered[Prompt], streams: NDArray[np.uint64], cache: PagedCache, *, limit: int, slots: int, chunk: int
    ) -> None:
        """
        Args:
            prompts: In the order in which they are computed.
            streams: The random stream of every completion, in the order of the prompts and members.
            cache: Empty, and large enough for any one completion by itself.
            limit: Tokens of a completion.
            slots: Completions that may run at once.
            chunk: Tokens that prefill computes between two decode steps.
        """
        self.cache = cache
        self.running: list[Sequence] = []
        """In the order in which they began."""
        self.finished: list[Sequence] = []
        self.preemptions = 0
        self._slots = slots
        self._chunk = chunk
        self._waiting = deque(prompts)
        self._open: list[Prompt] = []
        """Prompts with pages, of which some completions have not begun."""
        self._preempted: deque[Sequence] = deque()
        self._unstarted: dict[Prompt, deque[Sequence]] = {}
        first = 0
        for prompt in prompts:
            members = [
                Sequence(prompt, member, int(streams[first + member]), np.zeros(limit, np.int32), np.zeros(limit, np.float32))
                for member in range(prompt.request.size)
            ]
            self._unstarted[prompt] = deque(members)
            first += prompt.request.size

    @property
    def unfinished(self) -> bool:
        """Whether any completion is still to be sampled."""
        return bool(self.running or self._waiting or self._open or self._preempted)

    def next_chunks(self) -> list[tuple[Prompt | Sequence, Chunk]]:
        """What prefill shall compute now; at most `chunk` tokens, empty when there is nothing to compute or no room for it."""
        room = self._chunk
        chunks: list[tuple[Prompt | Sequence, Chunk]] = []
        for owner in self._to_compute():
            if room == 0:
                break
            if owner.cached is None and not self._open_pages(owner, spare=bool(self.running or chunks)):
                break
            assert owner.cached is not None
            tokens = owner.request.prompt if isinstance(owner, Prompt) else owner.history
            piece = tokens[owner.filled : owner.filled + room]
            chunks.append((owner, Chunk(owner.cached, piece, owner.filled)))
            owner.filled += len(piece)
            room -= len(piece)
        return chunks

    def resume(self) -> None:
        """Let preempted completions run that are computed again."""
        while self._preempted and self._preempted[0].filled == self._preempted[0].length:
            self.running.append(self._preempted.popleft())

    def start(self) -> list[tuple[Sequence, Tensor]]:
        """Completions that begin now, on the pages of their prompts, each with the hidden state (H,) that its first token is drawn from."""
        begun: list[tuple[Sequence, Tensor]] = []
        for prompt in list(self._open):
            members = self._unstarted[prompt]
            while prompt.hidden is not None and members and self._free_slots() > 0 and self._has_page_for_another():
                assert prompt.cached is not None
                sequence = members.popleft()
                sequence.cached = self.cache.fork(prompt.cached)
                self.running.append(sequence)
                begun.append((sequence, prompt.hidden))
            if not members:
                self._close(prompt)
                self._open.remove(prompt)
        return begun

    def grow(self) -> Batch | None:
        """A slot in the cache for the last token of every running completion; preempts until there is room. None: nothing runs."""
        while self.running:
            try:
                return self.cache.grow([sequence.cached for sequence in self.running if sequence.cached is not None])
            except OutOfPages:
                self._make_room()
        return None

    def retire(self, sequences: Ordered[Sequence]) -> None:
        """Take finished completions out and free their pages."""
        for sequence in sequences:
            assert sequence.cached is not None
            self.cache.release(sequence.cached)
            sequence.cached = None
            self.finished.append(sequence)
        self.running = [sequence for sequence in self.running if sequence.finish is None]

    def _to_compute(self) -> list[Prompt | Sequence]:
        """Preempted completions first, then as many prompts as free slots can use."""
        owners: list[Prompt | Sequence] = [sequence for sequence in self._preempted if sequence.filled < sequence.length]
        wanted = self._free_slots() - sum(len(self._unstarted[prompt]) for prompt in self._open)
        owners += [prompt for prompt in self._open if prompt.filled < prompt.length]
        for prompt in self._waiting:
            if wanted <= 0 or self._preempted:
                break
            owners.append(prompt)
            wanted -= len(self._unstarted[prompt])
        return owners

    def _free_slots(self) -> int:
        return self._slots - len(self.running) - len(self._preempted)

    def _has_page_for_another(self) -> bool:
        """Whether every completion that runs, and one more, could take a page; else the next step would preempt what began just now."""
        return not self.running or self.cache.free_pages > len(self.running)

    def _open_pages(self, owner: Prompt | Sequence, *, spare: bool) -> bool:
        """Pages for a prompt or a preempted completion. With `spare` only if that leaves one to each completion that runs; else others that
        wait give up theirs until it fits."""
        needed = self.cache.pages_of(owner.length)
        if spare and self.cache.free_pages < needed + len(self.running) + 1:
            return False
        while self.cache.free_pages < needed:
            self._make_room(keep=owner)
        owner.cached = self.cache.open(owner.length)
        if isinstance(owner, Prompt):
            self._waiting.remove(owner)
            self._open.append(owner)
        return True

    def _make_room(self, keep: Prompt | Sequence | None = None) -> None:
        """Give up the pages of the last open prompt, else of the completion that began last."""
        idle = [prompt for prompt in self._open if prompt is not keep]
        if idle:
            prompt = idle[-1]
            self._close(prompt)
            self._open.remove(prompt)
            self._waiting.appendleft(prompt)
            return
        holders = [sequence for sequence in self._preempted if sequence.cached is not None and sequence is not keep]
        victim = holders[-1] if holders else self.running.pop()
        assert victim.cached is not None
        self.cache.release(victim.cached)
        victim.cached, victim.filled = None, 0
        if not holders:
            self.preemptions += 1
            self._preempted.appendleft(victim)

    def _close(self, prompt: Prompt) -> None:
        assert prompt.cached is not None
        self.cache.release(prompt.cached)
        prompt.cached, prompt.hidden, prompt.filled = None, None, 0
