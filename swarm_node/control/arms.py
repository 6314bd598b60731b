"""What the controller believes about each candidate size: discounted counts of straggling and calm groups."""

from __future__ import annotations

from collections.abc import Sequence

Beta = tuple[float, float]
"""Parameters (a, b) of a Beta distribution: mean a / (a + b), strength a + b."""

UNIFORM: Beta = (1.0, 1.0)


class Arms:
    """One pair of counts (alpha, beta) a candidate, ascending in size; priors stay outside the discounted counts."""

    def __init__(self, count: int) -> None:
        self.counts = [[0.0, 0.0] for _ in range(count)]

    def discount(self, factor: float) -> None:
        """Multiply all counts by `factor`, in [0, 1]: what was seen long ago counts less."""
        for pair in self.counts:
            pair[0] *= factor
            pair[1] *= factor

    def add(self, index: int, share: float, weight: float = 1.0) -> None:
        """Count `weight` groups of which a share in [0, 1] straggled."""
        self.counts[index][0] += weight * share
        self.counts[index][1] += weight * (1.0 - share)

    def posteriors(self, priors: Sequence[Beta], *, monotone: bool) -> list[Beta]:
        """Posterior of each arm's straggler probability; with `monotone`, their means cannot fall as the size grows."""
        posteriors = [(a + alpha, b + beta) for (a, b), (alpha, beta) in zip(priors, self.counts, strict=True)]
        if not monotone:
            return posteriors
        strengths = [a + b for a, b in posteriors]
        means = pool_adjacent_violators([a / (a + b) for a, b in posteriors], strengths)
        return [(mean * strength, (1.0 - mean) * strength) for mean, strength in zip(means, strengths, strict=True)]


def mean(beta: Beta) -> float:
    """The expected probability, a / (a + b)."""
    return beta[0] / (beta[0] + beta[1])


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
