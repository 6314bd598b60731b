"""Bounded memories: what a node keeps about peers may never grow with what peers send."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A map of at most `capacity` entries; the one not touched for longest goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, without touching it."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def touch(self, key: K, make: Callable[[], V]) -> V:
        """The value, made if it is new."""
        value = self._entries.get(key)
        if value is None:
            value = make()
        self.put(key, value)
        return value

    def pop(self, key: K) -> V:
        return self._entries.pop(key)

    def discard(self, key: K) -> None:
        self._entries.pop(key, None)

    def oldest(self) -> K:
        return next(iter(self._entries))

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


class SeenDigests:
    """Digests of admitted bodies: at most `capacity` in all and `per_sender` of one sender, so that nobody can flush the rest."""

    def __init__(self, capacity: int, per_sender: int, senders: int, forgotten: Callable[[str, int], None]) -> None:
        """`forgotten` is called with sender and sequence number of every body whose digest makes room."""
        self._owners: Recent[bytes, tuple[str, int]] = Recent(capacity)
        self._by_sender: Recent[str, Recent[bytes, None]] = Recent(senders)
        self._capacity, self._per_sender = capacity, per_sender
        self._forgotten = forgotten

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, sender: str, digest: bytes, sequence: int) -> None:
        own = self._by_sender.touch(sender, lambda: Recent(self._per_sender))
        if len(own) == self._per_sender:
            self._forget(own.oldest())
        elif len(self._owners) == self._capacity:
            self._forget(self._owners.oldest())
        own.put(digest, None)
        self._owners.put(digest, (sender, sequence))

    def _forget(self, digest: bytes) -> None:
        sender, sequence = self._owners.pop(digest)
        if own := self._by_sender.get(sender):
            own.discard(digest)
        self._forgotten(sender, sequence)
