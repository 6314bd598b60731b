"""What admission remembers of bodies: bounded, because what a node keeps about peers may never grow with what peers send."""

from __future__ import annotations

from lru import LRU


class SeenDigests:
    """Digests of admitted bodies: at most `capacity` in all and `per_sender` of one sender, so that nobody can flush the rest."""

    def __init__(self, capacity: int, per_sender: int, senders: int) -> None:
        self._owners: LRU[bytes, str] = LRU(capacity)
        self._by_sender: LRU[str, LRU[bytes, None]] = LRU(senders)
        self._per_sender = per_sender

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, sender: str, digest: bytes) -> None:
        """Remember an admitted body; where a bound is reached the least recent one is forgotten, first of the same sender."""
        if sender not in self._by_sender:
            self._by_sender[sender] = LRU(self._per_sender)
        own = self._by_sender[sender]
        if len(own) == self._per_sender:
            forgotten, _ = own.popitem()
            self._owners.pop(forgotten, None)
        own[digest] = None
        self._owners[digest] = sender
