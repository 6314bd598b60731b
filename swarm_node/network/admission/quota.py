"""Quotas: how many groups, tokens and bytes one sender may deliver a minute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lru import LRU
from swarm_protocols.reject import Reason, Rejected

from swarm_node.network.admission.options import AdmissionOptions


@dataclass
class Bucket:
    """A token bucket: starts full, holds one minute's worth, refills evenly."""

    per_minute: float
    level: float
    updated: float
    """Clock at the last refill, seconds."""

    def refill(self, now: float) -> None:
        """Add what `now` (seconds) gives since the last refill; nothing when the clock went back."""
        self.level = min(self.per_minute, self.level + self.per_minute * max(0.0, now - self.updated) / 60)
        self.updated = now


class Quota:
    """Buckets of every sender, for groups, tokens and bytes, and for announcements."""

    def __init__(self, options: AdmissionOptions, clock: Callable[[], float]) -> None:
        self._limits = {
            "groups": options.groups_per_minute,
            "tokens": options.tokens_per_minute,
            "bytes": options.bytes_per_minute,
            "announcements": options.groups_per_minute,
        }
        self._clock = clock
        self._senders: LRU[str, dict[str, Bucket]] = LRU(options.senders)

    def require(self, sender: str, **amounts: int) -> None:
        """Leave everything as it is if the sender may deliver these amounts (groups=, tokens=, bytes=, announcements=) now.

        Raises:
            Rejected: `over_quota`.
        """
        buckets = self._refilled(sender)
        for name, amount in amounts.items():
            if amount > buckets[name].level:
                limit = self._limits[name]
                raise Rejected(Reason.OVER_QUOTA, f"{amount} {name} with {buckets[name].level:.0f} left of {limit} a minute")

    def take(self, sender: str, **amounts: int) -> None:
        """Charge these amounts, or none of them.

        Raises:
            Rejected: `over_quota`.
        """
        self.require(sender, **amounts)
        buckets = self._refilled(sender)
        for name, amount in amounts.items():
            buckets[name].level -= amount

    def _refilled(self, sender: str) -> dict[str, Bucket]:
        now = self._clock()
        if sender not in self._senders:
            self._senders[sender] = {name: Bucket(limit, limit, now) for name, limit in self._limits.items()}
        buckets = self._senders[sender]
        for bucket in buckets.values():
            bucket.refill(now)
        return buckets
