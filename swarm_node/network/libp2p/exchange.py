"""Peer exchange: whoever is connected tells whom else it knows, so that a swarm that began around one node survives it.

Over a stream of `/swarm-node/<swarm>/peers/1.0.0` the answer comes unasked: a length in 4 bytes (big-endian), then a msgpack array of
multiaddrs. Nothing in it is believed: an address is dialled, and Noise proves who is there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgpack
import trio

from swarm_node.network.addresses import AddressError, parse_with_peer
from swarm_node.network.libp2p.pull import PullError, Stream, read_exactly

MAX_TOLD = 32
"""Addresses in one answer."""
MAX_BYTES = 8 * 1024
_LENGTH = struct.Struct(">I")


def peers_protocol(swarm: str) -> str:
    """The protocol's name in a swarm: nodes of other swarms know nobody of interest."""
    return f"/swarm-node/{swarm}/peers/1.0.0"


async def tell(stream: Stream, addresses: Iterable[str], timeout_s: float) -> None:
    """Answer on a stream that a peer opened. Raises trio.TooSlowError when it does not read."""
    packed = msgpack.packb(list(addresses)[:MAX_TOLD])
    with trio.fail_after(timeout_s):
        await stream.write(_LENGTH.pack(len(packed)) + packed)
        await stream.close()


async def ask(stream: Stream, timeout_s: float) -> list[str]:
    """The addresses that a peer tells. Raises PullError when it tells something else, trio.TooSlowError when it is silent."""
    with trio.fail_after(timeout_s):
        (length,) = _LENGTH.unpack(await read_exactly(stream, _LENGTH.size))
        if length > MAX_BYTES:
            raise PullError(f"a list of addresses of {length} bytes exceeds {MAX_BYTES}")
        packed = await read_exactly(stream, length)
    try:
        told = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise PullError(f"a list of addresses is not msgpack: {error}") from None
    if not isinstance(told, list):
        raise PullError(f"a list of addresses is a {type(told).__name__}")
    return [text for text in told[:MAX_TOLD] if isinstance(text, str) and _is_usable(text)]


def _is_usable(text: str) -> bool:
    try:
        parse_with_peer(text)
    except AddressError:
        return False
    return True
