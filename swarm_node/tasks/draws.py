"""Random draws that are the same on every machine: a counter-based stream from BLAKE2b, independent of Python's and numpy's generators."""

from __future__ import annotations

import struct
from hashlib import blake2b

_WORDS = struct.Struct("<16I")


class Draws:
    """Uniform integers from a key. The same key gives the same stream, whatever the platform or library version.

    The key's parts are told apart by their type and length, so ("a", "bc") and ("ab", "c") are different streams.
    """

    def __init__(self, *key: str | int) -> None:
        self._key = b"".join(_encode(part) for part in key)
        self._block = 0
        self._words: tuple[int, ...] = ()
        self._next = 0

    def below(self, limit: int) -> int:
        """An integer in [0, limit), 1 <= limit <= 2**32. The bias is under limit / 2**32."""
        if self._next == len(self._words):
            self._words = _WORDS.unpack(blake2b(self._block.to_bytes(8, "little") + self._key).digest())
            self._block += 1
            self._next = 0
        word = self._words[self._next]
        self._next += 1
        return word * limit >> 32

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)


def hash64(*key: str | int) -> int:
    """A 64-bit hash of the key's parts, the same everywhere."""
    return int.from_bytes(blake2b(b"".join(_encode(part) for part in key), digest_size=8).digest(), "little")


def _encode(part: str | int) -> bytes:
    data = part.encode() if isinstance(part, str) else b"%d" % part
    return b"%s%d:%s" % (b"s" if isinstance(part, str) else b"i", len(data), data)
