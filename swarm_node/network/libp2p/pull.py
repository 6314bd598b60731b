"""Pulls: large bodies by digest over a stream of their own.

The puller opens a stream of `/swarm-node/group/1.0.0` and writes a 32-byte digest. The holder answers with chunks, each after its
length in 4 bytes (big-endian), and ends with a length of 0; whoever does not hold the body ends at once. The puller knows size and
digest beforehand and reads not one byte more than the size.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import trio

from swarm_node.network.intake import Held

PULL_PROTOCOL = "/swarm-node/group/1.0.0"
DIGEST_BYTES = 32
CHUNK_BYTES = 256 * 1024
MINIMUM_RATE = 64 * 1024
"""Bytes a second that a holder must keep up on the whole, or one that sends a byte now and then would be waited for for hours."""
_LENGTH = struct.Struct(">I")


class PullError(RuntimeError):
    """A holder did not deliver: it has not got the body, was too slow, or sent something else."""


class Stream(Protocol):
    """What pulls need of a libp2p stream."""

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes, empty at the end of the stream."""

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""

    async def close(self) -> None:
        """End our side; the other one reads the end."""


class Server:
    """Serves held bodies: a few at once, fewer to one peer, with a deadline on every read and write."""

    def __init__(self, held: Held, timeout_s: float, at_once: int = 8, per_peer: int = 2) -> None:
        self._held = held
        self._timeout_s = timeout_s
        self._slots = trio.Semaphore(at_once)
        self._per_peer = per_peer
        self._busy: Counter[str] = Counter()

    async def serve(self, stream: Stream, peer: str) -> None:
        """Answer one request. Raises trio.TooSlowError when the peer stops reading or writing."""
        if self._busy[peer] >= self._per_peer:
            await stream.write(_LENGTH.pack(0))
            await stream.close()
            return
        self._busy[peer] += 1
        try:
            with trio.fail_after(self._timeout_s):
                digest = await read_exactly(stream, DIGEST_BYTES)
            body = self._held.get(digest)
            if body is not None:
                async with self._slots:
                    await self._send(stream, body)
            with trio.fail_after(self._timeout_s):
                await stream.write(_LENGTH.pack(0))
                await stream.close()
        finally:
            self._busy[peer] -= 1
            if not self._busy[peer]:
                del self._busy[peer]

    async def _send(self, stream: Stream, body: bytes) -> None:
        for start in range(0, len(body), CHUNK_BYTES):
            chunk = body[start : start + CHUNK_BYTES]
            with trio.fail_after(self._timeout_s):
                await stream.write(_LENGTH.pack(len(chunk)) + chunk)


async def fetch(stream: Stream, digest: bytes, size: int, timeout_s: float, progress: Callable[[int], None] = lambda count: None) -> bytes:
    """Pull one body from one holder.

    Args:
        stream: just opened.
        digest: SHA-256 of the body.
        size: bytes of the body, as announced.
        timeout_s: seconds that a chunk may take before the holder is given up; the whole body may take these and its size at MINIMUM_RATE.
        progress: called with the bytes of each chunk.

    Raises:
        PullError: the holder has not got it, is too slow, or sent other or more bytes.
    """
    body = bytearray()
    allowed_s = timeout_s + size / MINIMUM_RATE
    with trio.move_on_after(allowed_s) as whole:
        await _fetch_into(body, stream, digest, size, timeout_s, progress)
    if whole.cancelled_caught:
        raise PullError(f"the holder sent {len(body)} of {size} bytes in whole chunks in {allowed_s:.0f} s")
    if not body:
        raise PullError("the holder has not got it")
    if len(body) != size or hashlib.sha256(body).digest() != digest:
        raise PullError(f"the holder sent {len(body)} bytes that are not the {size} bytes that were announced")
    return bytes(body)


async def _fetch_into(body: bytearray, stream: Stream, digest: bytes, size: int, timeout_s: float, progress: Callable[[int], None]) -> None:
    """Append what the holder sends, until its end."""
    try:
        with trio.fail_after(timeout_s):
            await stream.write(digest)
        while True:
            with trio.fail_after(timeout_s):
                (length,) = _LENGTH.unpack(await read_exactly(stream, _LENGTH.size))
            if length == 0:
                break
            if len(body) + length > size:
                raise PullError(f"the holder sends more than the {size} bytes that were announced")
            with trio.fail_after(timeout_s):
                body += await read_exactly(stream, length)
            progress(length)
    except trio.TooSlowError:
        raise PullError(f"the holder was silent for {timeout_s:.0f} s after {len(body)} of {size} bytes") from None


async def read_exactly(stream: Stream, count: int) -> bytes:
    """Read exactly so many bytes. Raises PullError when the stream ends before."""
    buffer = bytearray()
    while len(buffer) < count:
        part = await stream.read(count - len(buffer))
        if not part:
            raise PullError(f"the stream ended after {len(buffer)} of {count} bytes")
        buffer += part
    return bytes(buffer)
