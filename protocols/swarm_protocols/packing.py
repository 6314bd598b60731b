"""Strict reading of msgpack arrays: exact types, bounded sizes, one canonical form, and `Rejected` as the only exception."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack

from swarm_protocols.reject import Reason, Rejected

NATURAL_MAX = 2**63 - 1
"""Largest integer on the wire: what a signed 64-bit field of any language holds."""


def pack(fields: Sequence[Any]) -> bytes:
    """The canonical msgpack form of an array: shortest integers and lengths, 64-bit floats."""
    packed: bytes = msgpack.packb(list(fields), use_bin_type=True)
    return packed


def unpack(raw: bytes, *, max_array: int) -> Fields:
    """Read one msgpack array that fills `raw`.

    Raises:
        Rejected: `bad_encoding` for anything but one canonical msgpack value, `bad_schema` if that value is no array.
    """
    try:
        value = msgpack.unpackb(
            raw, raw=False, max_str_len=len(raw), max_bin_len=len(raw), max_array_len=max_array, max_map_len=0, max_ext_len=0
        )
        canonical = msgpack.packb(value, use_bin_type=True)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        # msgpack's own exceptions (extra data, stack, format, truncation, bad UTF-8) are ValueErrors.
        raise Rejected(Reason.BAD_ENCODING, f"no msgpack array: {type(error).__name__}") from None
    if canonical != raw:
        raise Rejected(Reason.BAD_ENCODING, "msgpack is not in its canonical form")
    if not isinstance(value, list):
        raise Rejected(Reason.BAD_SCHEMA, f"expected an array, got {type(value).__name__}")
    return Fields(value)


class Fields:
    """A cursor over an array's items: each read names the field, its type and its limit, and raises `Rejected`."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._next = 0

    def _take(self, name: str, kind: type) -> Any:
        if self._next >= len(self._items):
            raise Rejected(Reason.BAD_SCHEMA, f"{name} is missing: only {len(self._items)} fields")
        value = self._items[self._next]
        self._next += 1
        # `type(...) is`: a bool is an int to isinstance, and not to us.
        if type(value) is not kind:
            raise Rejected(Reason.BAD_SCHEMA, f"{name} must be {kind.__name__}, got {type(value).__name__}")
        return value

    def natural(self, name: str, *, low: int = 0, high: int = NATURAL_MAX, over: Reason = Reason.BAD_SCHEMA) -> int:
        """An integer in [low, high]; `over` is the reason when it exceeds `high`."""
        value: int = self._take(name, int)
        if value > high:
            raise Rejected(over, f"{name} is {value}, limit {high}")
        if value < low:
            raise Rejected(Reason.BAD_SCHEMA, f"{name} is {value}, minimum {low}")
        return value

    def real(self, name: str) -> float:
        """A finite float."""
        value: float = self._take(name, float)
        if not math.isfinite(value):
            raise Rejected(Reason.BAD_SCHEMA, f"{name} is {value}")
        return value

    def text(self, name: str, *, max_bytes: int) -> str:
        """A printable string: names from peers end up on terminals, so control characters are refused."""
        value: str = self._take(name, str)
        size = len(value.encode())
        if size > max_bytes:
            raise Rejected(Reason.TOO_LARGE, f"{name} has {size} bytes, limit {max_bytes}")
        if not value.isprintable():
            raise Rejected(Reason.BAD_SCHEMA, f"{name} has characters that cannot be printed")
        return value

    def binary(self, name: str, *, size: int | None = None, max_bytes: int | None = None) -> bytes:
        """A byte string of exactly `size` bytes, or of at most `max_bytes`."""
        value: bytes = self._take(name, bytes)
        if size is not None and len(value) != size:
            raise Rejected(Reason.BAD_SCHEMA, f"{name} has {len(value)} bytes, expected {size}")
        if max_bytes is not None and len(value) > max_bytes:
            raise Rejected(Reason.TOO_LARGE, f"{name} has {len(value)} bytes, limit {max_bytes}")
        return value

    def array(self, name: str, *, max_items: int) -> Fields:
        """A nested array."""
        value: list[Any] = self._take(name, list)
        if len(value) > max_items:
            raise Rejected(Reason.TOO_LARGE, f"{name} has {len(value)} items, limit {max_items}")
        return Fields(value)

    def __len__(self) -> int:
        return len(self._items)

    def end(self) -> None:
        """Everything was read.

        Raises:
            Rejected: `bad_schema` if items are left.
        """
        if self._next != len(self._items):
            raise Rejected(Reason.BAD_SCHEMA, f"{len(self._items) - self._next} fields too many")
