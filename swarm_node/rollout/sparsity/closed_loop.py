"""Holding the 5th percentile of acceptance at its threshold while the policy changes: budgets go up quickly and down slowly.

A pure controller over numbers. Each step it is fed the acceptance of a few rescored completions; per bin of 2,000 positions it keeps a
sliding window of those whose attention was sparse, made under the bin's present budget:

- A miss that chance does not explain raises the budget at once, by more the larger the miss. Any miss of a full window raises it.
- A full window with a margin lowers it by one notch. If that turns out to be too low, the next attempt waits twice as long.
- A bin whose budget would have to cover its whole context becomes dense, and is tried again later, each time later.
- A bin without data moves as the nearest bin with data does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from swarm_node.rollout.sparsity.acceptance import RESERVED, TAIL, fifth_percentile, is_sparse
from swarm_node.rollout.sparsity.schedule import BIN_TOKENS, DENSE, Schedule

NOTCHES = 4
"""Budgets to a doubling of the pages that are read: a notch is 19 %."""
WINDOW = 2000
"""Tokens of a full window."""
SHARE = WINDOW // 8
"""Tokens that one completion may give a bin's window: neighbouring tokens resemble each other, so eight completions at least fill it."""
MARGIN = 0.01
"""By how much a full window must exceed the threshold before the budget goes down."""
MISS = 0.02
"""A raise is one notch, and another for each such part of the miss."""
MAX_RAISE = 8
SIGNIFICANCE = 2.5
"""Standard errors by which the share of tokens below the threshold must exceed 5 % to raise a budget before the window is full."""
CLUSTERING = 2.0
"""How many times larger the variance of that share is than for independent tokens."""
MAX_PATIENCE = 16
RETRY = 50
"""Observations of a dense bin before sparse attention is tried again; doubles with each failure."""
MAX_RETRY = 800
_UNIT = 10_000
"""Acceptances are kept as integers of this fraction: the state is JSON."""
_FORGET = "leave it out, and the loop starts from its schedule again"


class ClosedLoopError(ValueError):
    """A saved state cannot be used. The message says what to do."""


class _Bin(BaseModel):
    """One bin of positions."""

    model_config = ConfigDict(extra="forbid")

    known: bool = False
    """Whether it had sparse tokens of its own; otherwise it follows a neighbour."""
    shift: int = 0
    """Notches above the starting schedule."""
    dense: bool = False
    samples: list[list[int]] = []
    """The window: acceptances of each completion, oldest first."""
    fresh: int = 0
    """Tokens since the budget was last judged over a full window."""
    calm: int = 0
    """Full windows in a row that exceeded the threshold by the margin."""
    patience: int = 1
    """How many of those lower the budget."""
    lowered: bool = False
    """Whether the last move was down, and no full window has confirmed it yet."""
    waited: int = 0
    """Observations since the bin became dense."""
    retry: int = RETRY

    def values(self) -> NDArray[np.float64]:
        return np.array([value for completion in self.samples for value in completion], dtype=np.float64) / _UNIT

    def add(self, values: NDArray[np.floating]) -> None:
        """Append one completion's acceptances, thinned evenly, and forget the oldest ones that the window does not need."""
        kept = values[np.linspace(0, len(values) - 1, min(len(values), SHARE)).round().astype(np.int64)]
        self.samples.append(np.floor(kept * _UNIT).astype(np.int64).tolist())
        self.fresh += len(kept)
        total = sum(map(len, self.samples))
        while total - len(self.samples[0]) >= WINDOW:
            total -= len(self.samples.pop(0))

    def restart(self) -> None:
        """The budget changed: what was measured under the old one says nothing of the new one."""
        self.samples, self.fresh, self.calm = [], 0, 0


class _State(BaseModel):
    """Everything that a checkpoint keeps."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    pages: list[int]
    source: str
    model: str
    bins: list[_Bin]


class ClosedLoop:
    """Moves a schedule so that every bin holds the threshold. Deterministic: equal observations, equal budgets."""

    def __init__(self, start: Schedule, *, threshold: float, context: int | None = None, page_size: int = 16) -> None:
        """
        Args:
            start: Where budgets begin; a bin beyond its table begins with the table's last entry.
            threshold: The 5th percentile of acceptance to hold.
            context: Tokens that the model's positions allow; None: no limit, and the last bin holds beyond the table.
            page_size: Tokens of a page.
        """
        self.threshold = threshold
        self.reason = ""
        """What the last `observe` changed and why, for the step line; empty when nothing changed."""
        self._context = context
        self._page_size = page_size
        count = len(start.pages) if context is None else -(-context // BIN_TOKENS)
        pages = [start.pages[min(bin, len(start.pages) - 1)] for bin in range(count)]
        self._state = _State(pages=pages, source=start.source, model=start.model, bins=[_Bin() for _ in pages])
        for index, bin in enumerate(self._state.bins):
            bin.dense = pages[index] >= self._limit(index)
            # Where it begins dense, the first try is the largest sparse budget.
            self._state.pages[index] = max(1, min(pages[index], self._limit(index) - 1))

    @property
    def schedule(self) -> Schedule:
        """The budgets as they are now; completions observed next must have been sampled with these."""
        state = self._state
        moved = any(bin.shift or bin.dense for bin in state.bins)
        source = f"closed loop from {state.source}" if moved else state.source
        return Schedule(tuple(map(self._pages, range(len(state.bins)))), self.threshold, source, state.model)

    def observe(self, completions: Sequence[tuple[NDArray[np.int64], NDArray[np.floating]]]) -> Schedule:
        """Take in rescored completions of one step and return the schedule for the next.

        completions: pairs (positions (n,), acceptances (n,) in [0, 1]), as `acceptance.decoded` gives them.
        """
        touched: set[int] = set()
        for positions, acceptances in completions:
            bins = np.minimum(positions // BIN_TOKENS, len(self._state.bins) - 1)
            for index in map(int, np.unique(bins)):
                inside = bins == index
                bin = self._state.bins[index]
                touched.add(index)
                sparse = is_sparse(positions[inside], self._pages(index), self._page_size)
                if sparse.any():
                    self._claim(index)
                    bin.add(acceptances[inside][sparse])
        moves = [move for index in sorted(touched) if (move := self._judge(index))]
        self.reason = "; ".join(moves)
        return self.schedule

    def state(self) -> dict[str, Any]:
        """The state as JSON values, for the checkpoint."""
        return self._state.model_dump(mode="json")

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where a saved state ended; the start schedule is the saved one.

        Raises:
            ClosedLoopError: another version, or another number of bins; nothing is changed.
        """
        try:
            loaded = _State.model_validate(state)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ClosedLoopError(f"the saved sparsity state is not readable here ({where}: {first['msg']}): {_FORGET}") from error
        if len(loaded.bins) != len(self._state.bins) or len(loaded.pages) != len(loaded.bins):
            raise ClosedLoopError(
                f"the saved sparsity state has {len(loaded.bins)} bins of {BIN_TOKENS} positions and this model "
                f"{len(self._state.bins)}: {_FORGET}"
            )
        self._state = loaded

    def starts_as(self, state: dict[str, Any]) -> bool:
        """Whether a saved state began from the schedule that this loop begins from."""
        own = self._state
        return (state.get("source"), state.get("model"), state.get("pages")) == (own.source, own.model, own.pages)

    def _judge(self, index: int) -> str:
        """Move a bin's budget if its window asks for it; says what was done."""
        bin = self._state.bins[index]
        if bin.dense:
            return self._wait(index)
        values = bin.values()
        if not len(values):
            return ""
        p5 = fifth_percentile(values)
        below = float((values < self.threshold).sum())
        chance = SIGNIFICANCE * math.sqrt(CLUSTERING * TAIL * (1 - TAIL) * len(values))
        full = bin.fresh >= WINDOW
        if p5 < self.threshold and (full or below > TAIL * len(values) + chance):
            return self._raise(index, p5)
        if not full:
            return ""
        bin.fresh = 0
        if bin.lowered:
            bin.lowered, bin.patience = False, max(1, bin.patience // 2)
        bin.calm = bin.calm + 1 if p5 >= self.threshold + MARGIN else 0
        if bin.calm < bin.patience or self._pages(index) == 1:
            return ""
        return self._lower(index, p5)

    def _raise(self, index: int, p5: float) -> str:
        bin, before = self._state.bins[index], self._pages(index)
        if bin.lowered:
            bin.lowered, bin.patience = False, min(2 * bin.patience, MAX_PATIENCE)
        bin.restart()
        bin.shift += min(1 + int((self.threshold - p5) / MISS), MAX_RAISE)
        while self._moved(index) == before:
            bin.shift += 1
        if self._moved(index) >= self._limit(index):
            self._shrink(index)  # the largest sparse budget is tried before none
        measured = f"p5 {p5:.3f} < {self.threshold:g}"
        if self._moved(index) > before:
            return f"bin {index}: {before} → {self._pages(index)} pages ({measured})"
        bin.dense, bin.waited = True, 0
        return (
            f"bin {index}: dense, {before} of {self._limit(index) + RESERVED} pages do not hold it ({measured}), again in {bin.retry} steps"
        )

    def _lower(self, index: int, p5: float) -> str:
        bin, before = self._state.bins[index], self._pages(index)
        bin.restart()
        bin.lowered = True
        while self._moved(index) == before:
            bin.shift -= 1
        bin.retry = RETRY
        return f"bin {index}: {before} → {self._pages(index)} pages (p5 {p5:.3f})"

    def _wait(self, index: int) -> str:
        """Count an observation of a dense bin; after enough of them try the largest sparse budget."""
        bin = self._state.bins[index]
        bin.waited += 1
        if bin.waited < bin.retry:
            return ""
        bin.dense, bin.retry = False, min(2 * bin.retry, MAX_RETRY)
        self._claim(index)
        self._shrink(index)
        return f"bin {index}: dense → {self._pages(index)} pages, tried again"

    def _shrink(self, index: int) -> None:
        """Move a bin's budget to the largest notch at which its last positions are sparse."""
        while self._moved(index) >= self._limit(index) and self._moved(index) > 1:
            self._state.bins[index].shift -= 1

    def _claim(self, index: int) -> None:
        """From its first sparse token on, a bin moves by itself, starting where its neighbour had brought it."""
        bin = self._state.bins[index]
        if not bin.known:
            bin.shift, bin.known = self._state.bins[self._source(index)].shift, True

    def _source(self, index: int) -> int:
        """The bin whose moves a bin makes: itself, else the nearest with data (of two the later, which needs more), else itself."""
        known = [other for other, bin in enumerate(self._state.bins) if bin.known]
        if not known or self._state.bins[index].known:
            return index
        return min(known, key=lambda other: (abs(other - index), -other))

    def _pages(self, index: int) -> int:
        return DENSE if self._state.bins[index].dense else self._moved(index)

    def _moved(self, index: int) -> int:
        """The starting budget moved by the notches of its source; at shift 0 it is the starting budget exactly."""
        start, shift = self._state.pages[index], self._state.bins[self._source(index)].shift
        moved: int = round((start + RESERVED) * 2.0 ** (shift / NOTCHES)) - RESERVED
        return min(max(moved, 1), DENSE)

    def _limit(self, index: int) -> int:
        """The budget from which on every position of the bin is dense anyway."""
        end = (index + 1) * BIN_TOKENS
        if index == len(self._state.bins) - 1:
            end = DENSE if self._context is None else self._context
        return max(1, -(-end // self._page_size) - RESERVED)
