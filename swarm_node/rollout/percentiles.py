"""The statistic of sparse decoding: the 5th percentile of acceptance, per bin of positions. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm_node.rollout.schedule import BIN_TOKENS

RESERVED = 3
"""Pages that a sparse step reads besides its budget: the first and the last two."""
TAIL = 0.05
"""The share of tokens that the percentile leaves below it: it separates stable from collapsing training, the mean does not
(arXiv 2606.08446)."""


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of some tokens."""

    mean: float
    p5: float
    count: int
    """Tokens; under 20 of them the percentile is the minimum."""


def fifth_percentile(values: NDArray[np.floating]) -> float:
    """The smallest of the values (n,) that at least 5 % of them do not exceed: the one of rank ceil(n / 20), never interpolated.

    NaN where there are none. Of up to 20 values it is the minimum: few tokens look worse than they are, never better.
    """
    if not len(values):
        return math.nan
    rank = -(-len(values) // 20) - 1
    return float(np.partition(values, rank)[rank])


def summarise(values: NDArray[np.floating]) -> Acceptance:
    """Mean, 5th percentile and count of acceptances (n,)."""
    return Acceptance(float(values.mean()) if len(values) else math.nan, fifth_percentile(values), len(values))


def summarise_by_bin(positions: NDArray[np.int64], acceptances: NDArray[np.floating]) -> Mapping[int, Acceptance]:
    """Acceptance of every bin of 2,000 positions that has tokens, in order. Both arrays (n,)."""
    bins = positions // BIN_TOKENS
    return {int(bin): summarise(acceptances[bins == bin]) for bin in np.unique(bins)}


def is_sparse(positions: NDArray[np.int64], budgets: NDArray[np.integer] | int, page_size: int) -> NDArray[np.bool_]:
    """Whether a token at each position leaves pages unread: its sequence, itself included, has more than budget + 3. Shapes broadcast."""
    return positions // page_size + 1 > np.asarray(budgets, dtype=np.int64) + RESERVED
