"""The straggler event: one completion of a group is much longer than the others."""

from __future__ import annotations

from collections.abc import Sequence


def median(lengths: Sequence[int]) -> float:
    """Median of at least one length; of an even count, the mean of the middle two."""
    ordered = sorted(lengths)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def straggles(lengths: Sequence[int], ratio: float) -> bool:
    """Whether the group's longest completion exceeds `ratio` times its median length (strictly).

    Raises:
        ValueError: the group is empty, or a length is below 1.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a group needs at least one completion of at least one token, got lengths {list(lengths)}")
    return max(lengths) > ratio * median(lengths)


def straggler_share(events: Sequence[float], event: str) -> float:
    """S of one step from its groups' events (or their probabilities), shape (groups,).

    `group`: their mean; `any`: the probability that at least one happens, groups being independent.
    """
    if event == "group":
        return sum(events) / len(events)
    none = 1.0
    for probability in events:
        none *= 1.0 - probability
    return 1.0 - none
