"""Isotonic means: a larger group cannot straggle less often, so estimates that say otherwise are pooled."""

from __future__ import annotations

from collections.abc import Sequence


def pool_adjacent_violators(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators; Ayer et al. 1955).

    Both have shape (n,); weights are positive. Neighbours that fall are replaced by their weighted mean until none does.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        members = 1
        while blocks and blocks[-1][0] > value:
            before, mass, count = blocks.pop()
            value = (before * mass + value * weight) / (mass + weight)
            weight, members = weight + mass, members + count
        blocks.append((value, weight, members))
    return [value for value, _, members in blocks for _ in range(members)]
