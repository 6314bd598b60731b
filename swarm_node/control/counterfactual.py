"""What a smaller group would have done: exact straggler probabilities of random subsets, by order statistics.

The completions of a group are independent samples of one distribution, so any `size` of them, picked without looking, are a group of
that size. A group of 16 therefore tells, without extra rollouts, how often 8 or 4 completions would have straggled: the share of its
subsets that do. No subset is enumerated. With lengths sorted, a subset whose middle elements sit at ranks a <= b (a = b where the
size is odd) straggles when its largest element exceeds tau times their mean; for each (a, b) the number of such subsets is a
product of binomial coefficients that depends on the lengths only through how many of them do not exceed that threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

_APART = 1 << 40


@dataclass(frozen=True, eq=False)
class _SubsetTable:
    """Every pair of middle ranks, of every subset size."""

    lows: NDArray[np.intp]
    """Rank a of the lower middle element, 0-based, shape (pairs,)."""
    highs: NDArray[np.intp]
    """Rank b of the upper middle element, shape (pairs,)."""
    shares: NDArray[np.float64]
    """Shape (pairs * (count + 1),): share of all subsets that have their middle at (a, b) and straggle when the smallest k lengths,
    k = 0..count, do not exceed the threshold."""
    offsets: NDArray[np.intp]
    """Where each pair's shares begin, shape (pairs,)."""
    sizes: NDArray[np.float64]
    """Shape (pairs, sizes): 1 where the pair belongs to the size."""


@lru_cache(maxsize=256)
def _subset_table(count: int, sizes: tuple[int, ...]) -> _SubsetTable:
    lows, highs, shares, columns = [], [], [], []
    for column, size in enumerate(sizes):
        below = (size - 1) // 2  # elements under the lower middle one, and as many over the upper middle one
        for low in range(below, count - below):
            for high in [low] if size % 2 else range(low + 1, count - below):
                # A subset is calm when all elements over its middle have ranks within high + 1 .. k - 1.
                calm = [comb(k - high - 1, below) if k > high else 0 for k in range(count + 1)]
                lows.append(low)
                highs.append(high)
                shares.append([comb(low, below) * (calm[count] - c) / comb(count, size) for c in calm])
                columns.append(column)
    offsets = np.arange(len(lows)) * (count + 1)
    return _SubsetTable(np.array(lows), np.array(highs), np.array(shares).ravel(), offsets, np.eye(len(sizes))[columns])


def subset_straggler_probabilities(lengths: Sequence[Sequence[int]], sizes: tuple[int, ...], ratio: float) -> NDArray[np.float64]:
    """Share of each group's subsets, of each size, whose maximum exceeds `ratio` times their median.

    Args:
        lengths: tokens a completion; groups of one common number of completions n.
        sizes: completions in a subset, each within 1..n; at least one.
        ratio: tau of `events.straggles`.

    Returns:
        Probabilities, float64, shape (groups, sizes). With a size of n it is the event itself, 0 or 1.

    Raises:
        ValueError: a size is not within 1..n.
    """
    ordered = np.array(lengths, dtype=np.int64)
    ordered.sort(axis=1)
    groups, count = ordered.shape
    if not all(1 <= size <= count for size in sizes):
        raise ValueError(f"subsets of {sizes} do not fit a group of {count}: choose 1 to {count}")
    table = _subset_table(count, sizes)
    # Lengths are whole, so they exceed a threshold where they exceed its floor.
    thresholds = ((ordered.take(table.lows, axis=1) + ordered.take(table.highs, axis=1)) * (ratio / 2)).astype(np.int64)
    # One search serves all groups, set apart by more than any length or threshold; `rank` counts the group's lengths within it.
    apart = np.arange(groups)[:, None] * _APART
    rank = (ordered + apart).ravel().searchsorted(thresholds + apart, side="right") - np.arange(groups)[:, None] * count
    probabilities: NDArray[np.float64] = table.shares.take(rank + table.offsets) @ table.sizes
    return probabilities
