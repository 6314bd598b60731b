"""What admission remembers of bodies: bounded, because what a node keeps about peers may never grow with what peers send."""

from __future__ import annotations

from collections.abc import Callable

from lru import LRU


class SeenDigests:
    """Digests of admitted bodies: at most `capacity` in all and `per_sender` of one sender, so that nobody can flush the rest."""

    def __init__(self, capacity: int, per_sender: int, senders: int, forgotten: Callable[[str, int], None]) -> None:
        """`forgotten` is called with sender and sequence number of every body whose digest makes room."""
        self._owners: LRU[bytes, tuple[str, int]] = LRU(capacity)
        self._by_sender: LRU[str, LRU[bytes, None]] = LRU(senders)
        self._capacity, self._per_sender = capacity, per_sender
        self._forgotten = forgotten

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, sender: str, digest: bytes, sequence: int) -> None:
        """Remember a body of that sender with that sequence number."""
        if sender not in self._by_sender:
            self._by_sender[sender] = LRU(self._per_sender)
        own = self._by_sender[sender]
        full = own if len(own) == self._per_sender else self._owners if len(self._owners) == self._capacity else None
        if full is not None and (oldest := full.peek_last_item()) is not None:
            self._forget(oldest[0])
        own[digest] = None
        self._owners[digest] = (sender, sequence)

    def _forget(self, digest: bytes) -> None:
        owner = self._owners.pop(digest)
        assert owner is not None  # whatever a sender is held to have sent is held
        sender, sequence = owner
        if sender in self._by_sender:
            self._by_sender[sender].pop(digest, None)
        self._forgotten(sender, sequence)
