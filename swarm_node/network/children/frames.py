"""Frames between the main process and its children: a 4-byte length, then a msgpack array whose first item is the kind.

Nothing is ever unpickled. A frame is data for one receiver, and its size is bounded before it is allocated.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgpack

MAX_FRAME = 80 * 1024 * 1024
"""Bytes; more than any body."""
_LENGTH = struct.Struct("<I")

Frame = list[Any]


class FrameError(RuntimeError):
    """The other side sent something that is no frame: a bug, or a stray write into the socket."""


def pack_frame(kind: str, *fields: Any) -> bytes:
    """One frame as bytes."""
    packed: bytes = msgpack.packb([kind, *fields])
    if len(packed) > MAX_FRAME:
        raise FrameError(f"a {kind!r} frame of {len(packed)} bytes exceeds {MAX_FRAME}")
    return _LENGTH.pack(len(packed)) + packed


def unpack_frame(packed: bytes) -> Frame:
    """The frame's kind and fields. Raises FrameError."""
    try:
        frame = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError(f"{len(packed)} bytes are not msgpack: {error}") from None
    if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
        raise FrameError(f"expected an array that starts with a kind, got {type(frame).__name__}")
    return frame


def frame_length(prefix: bytes) -> int:
    """Bytes after a 4-byte length prefix. Raises FrameError when a frame cannot be that long."""
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes exceeds {MAX_FRAME}")
    return int(length)


def read_frame(connection: socket.socket) -> Frame | None:
    """Read one frame from a blocking socket; None when the other side is gone. Raises FrameError."""
    prefix = _read_exactly(connection, _LENGTH.size)
    if prefix is None:
        return None
    packed = _read_exactly(connection, frame_length(prefix))
    return None if packed is None else unpack_frame(packed)


def _read_exactly(connection: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    filled = 0
    while filled < count:
        try:
            received = connection.recv_into(view[filled:])
        except OSError:  # closed on this side, or reset by the other
            return None
        if received == 0:
            return None
        filled += received
    return bytes(buffer)
