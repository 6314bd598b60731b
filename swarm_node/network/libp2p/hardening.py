"""Every change to py-libp2p, in one place: each with its reason, for the one version it was measured with.

A patched attribute that is missing ends the process with a message that says so: an unhardened host is not safe to run.
Behaviour that a subclass can change is changed in `router.py`; here is what only a patch can reach.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import libp2p.host.basic_host as basic_host
import libp2p.network.connection.raw_connection as raw_connection
import libp2p.network.connection.swarm_connection as swarm_connection
import libp2p.network.swarm as swarm
import libp2p.protocol_muxer.multiselect_communicator as communicator
import libp2p.pubsub.pubsub as pubsub
import libp2p.stream_muxer.yamux.yamux as yamux
import libp2p.tools.anyio_service.trio_tasks as trio_tasks
import libp2p.transport.tcp.tcp as tcp
import trio
from libp2p.exceptions import BaseLibp2pError, ParseError, ValidationError
from libp2p.io.exceptions import MessageTooLarge
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.pull import PullError

EXPECTED_VERSION = "0.8.1"

NEGOTIATION_BYTES = 1024
"""Longest protocol name in a negotiation; the longest of ours has 40."""
STREAMS_PER_CONNECTION = 64
"""Streams that a peer may have open on one connection."""
RECEIVE_WINDOW = 1024 * 1024
"""Bytes of one stream that may wait unread. Enough for 10 MB/s over 100 ms."""
OUTBOUND_RPCS = 256
"""Messages that may wait for one slow peer; stock: 32."""
WRITE_PATIENCE_S = 10.0
"""Seconds that a peer may take over the rest of a message whose first byte it sent."""

_applied = False


class HardeningError(RuntimeError):
    """The installed libp2p is not the one that the patches were written for."""


def harden(guard: PeerGuard) -> None:
    """Apply every patch, once per process. Raises HardeningError."""
    global _applied
    if version("libp2p") != EXPECTED_VERSION:
        raise HardeningError(
            f"libp2p {version('libp2p')} is installed, but this node's hardening was measured with {EXPECTED_VERSION}: install that version"
        )
    if _applied:
        raise HardeningError("libp2p is hardened once per process")
    _applied = True
    guard.is_breakage = is_breakage
    _guard_tasks(guard)
    _guard_streams(guard)
    _guard_identify(guard)
    _guard_dead_peers(guard)
    _release_inbound_connections()
    _bound_negotiation()
    _bound_message_time()
    _bound_receive_windows()
    _bound_outbound_queues()
    _own_the_port()


def is_breakage(error: BaseException) -> bool:
    """Whether an error says that a connection or stream ended or fell silent, not that a peer sent nonsense."""
    if isinstance(error, ParseError | MessageTooLarge | ValidationError):
        return False
    return isinstance(
        error, BaseLibp2pError | OSError | trio.TooSlowError | trio.BrokenResourceError | trio.ClosedResourceError | PullError
    )


def _replace(owner: Any, name: str, build: Callable[[Any], Any]) -> None:
    """Set `owner.name` to `build(old)`. Raises HardeningError when there is no old one."""
    old = getattr(owner, name, None)
    if old is None:
        raise HardeningError(f"{getattr(owner, '__name__', owner)}.{name} is gone from libp2p: its hardening must be written anew")
    setattr(owner, name, build(old))


def _guard_tasks(guard: PeerGuard) -> None:
    # A task of a service that raises cancels the whole service: one push_msg with a garbage key, one connection whose muxer trips,
    # and the host is gone. Tasks that serve a single message or connection end alone. Daemons and the service's own run are left
    # as they are: without them there is no service, and the process is restarted.
    def build(run: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(run)
        async def guarded(self: Any) -> None:
            if self.daemon or not self.count_in_stats:
                await run(self)
                return
            with guard.watch(f"task {self.name}"):
                await run(self)

        return guarded

    _replace(trio_tasks.FunctionTask, "run", build)


def _guard_streams(guard: PeerGuard) -> None:
    # Whatever escapes a stream handler cancels the nursery of the connection, and with it the swarm.
    def build(handle: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(handle)
        async def guarded(self: Any, muxed_stream: Any) -> None:
            peer = str(self.muxed_conn.peer_id)
            if len(self.streams) >= STREAMS_PER_CONNECTION:
                guard.counts["too many streams"] += 1
                with guard.watch("stream reset", peer):
                    await muxed_stream.reset()
                return
            with guard.watch("stream handler", peer) as watch:
                await handle(self, muxed_stream)
            if watch.failed:
                with guard.watch("stream reset", peer), trio.move_on_after(1):
                    await muxed_stream.reset()

        return guarded

    _replace(swarm_connection.SwarmConn, "_handle_muxed_stream", build)


def _guard_identify(guard: PeerGuard) -> None:
    # It runs as a system task: an escaping error is a TrioInternalError, which ends the process.
    def build(entry: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(entry)
        async def guarded(self: Any, peer_id: Any, reason: str) -> None:
            with guard.watch("identify", str(peer_id)):
                await entry(self, peer_id, reason)

        return guarded

    _replace(basic_host.BasicHost, "_identify_task_entry", build)


def _guard_dead_peers(guard: PeerGuard) -> None:
    # Called from daemons (which must not end) while a peer's state is half gone.
    def build(handle: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(handle)
        def guarded(self: Any, peer_id: Any) -> None:
            with guard.watch("dead peer", str(peer_id)):
                handle(self, peer_id)

        return guarded

    _replace(pubsub.Pubsub, "_handle_dead_peer", build)


def _release_inbound_connections() -> None:
    # Stock keeps a task and a slot of the inbound limit for every connection that ever came in, until the host ends: after as many
    # as the limit allows, however short they were, nobody gets in any more.
    def build(_: Any) -> Callable[..., Awaitable[None]]:
        async def handle(self: Any, read_write_closer: Any, maddr: Any, failure_event: Any) -> None:
            raw = raw_connection.RawConnection(read_write_closer, False)
            try:
                muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
                await muxed.event_closed.wait()
            finally:  # what is raised here ends at the listener, which only logs it
                with trio.move_on_after(1) as scope:
                    scope.shield = True
                    await raw.close()

        return handle

    _replace(swarm.Swarm, "_do_handle_inbound_connection", build)


def _bound_negotiation() -> None:
    # Stock reads as many bytes as the peer announces, before it knows who the peer is.
    def build(_: Any) -> Callable[..., Awaitable[bytes]]:
        async def read_delim(reader: Any) -> bytes:
            try:
                line = await read_varint_prefixed_bytes_limited(reader, NEGOTIATION_BYTES)
                line.decode()
            except (MessageTooLarge, UnicodeDecodeError) as error:
                raise ParseError(str(error)) from error
            if line[-1:] != b"\n":
                raise ParseError("a line of the negotiation does not end")
            return line[:-1]

        return read_delim

    _replace(communicator, "read_delim", build)


def _bound_message_time() -> None:
    # A peer may be silent between messages for as long as it likes, but not inside one: a varint that never ends, or a megabyte
    # that never comes, would hold its reader and its buffer for ever.
    class _Started:
        """Gives back the first byte, then reads on."""

        def __init__(self, first: bytes, reader: Any) -> None:
            self._first = first
            self._reader = reader

        async def read(self, count: int | None = None) -> bytes:
            first, self._first = self._first, b""
            return first or bytes(await self._reader.read(count))

    def build(read: Callable[..., Awaitable[bytes]]) -> Callable[..., Awaitable[bytes]]:
        @functools.wraps(read)
        async def bounded(reader: Any, max_length: int) -> bytes:
            first = await reader.read(1)
            if not first:
                return await read(reader, max_length)
            with trio.fail_after(WRITE_PATIENCE_S):
                return await read(_Started(first, reader), max_length)

        return bounded

    _replace(pubsub, "read_varint_prefixed_bytes_limited", build)


def _bound_receive_windows() -> None:
    # Stock lets a window grow to 16 MiB and only logs a sender who ignores it (104 MB in 0.4 s were accepted).
    class Buffer(bytearray):
        def extend(self, data: Any, /) -> None:
            if len(self) + len(data) > 2 * RECEIVE_WINDOW:  # stock's credit drifts, so an honest sender may exceed one window
                raise MessageTooLarge(f"a stream holds {len(self)} unread bytes: its sender ignores the window")
            super().extend(data)

    class Buffers(dict[int, bytearray]):
        def __setitem__(self, stream: int, buffer: bytearray) -> None:
            super().__setitem__(stream, Buffer(buffer))

    def build(create: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(create)
        def bounded(self: Any, *args: Any, **kwargs: Any) -> None:
            create(self, *args, **kwargs)
            self.stream_buffers = Buffers()

        return bounded

    _replace(yamux, "MAX_WINDOW_SIZE", lambda _: RECEIVE_WINDOW)
    _replace(yamux.Yamux, "__init__", build)


def _bound_outbound_queues() -> None:
    # 32 messages for one peer, then drops without a word; a burst of groups and the mesh's own traffic share them.
    _replace(pubsub, "RpcQueue", lambda _: functools.partial(RpcQueue, max_size=OUTBOUND_RPCS))


def _own_the_port() -> None:
    # Stock listens with SO_REUSEPORT: a second node on the same port would take every other connection instead of an error.
    def build(_: Any) -> Callable[[Any], None]:
        def set_flags(sock: Any) -> None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        return set_flags

    _replace(tcp, "_set_reuse_flags", build)
