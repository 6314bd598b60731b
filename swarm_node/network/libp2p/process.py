"""The network process: `python -m swarm_node.network.libp2p.process FD`. It imports neither torch nor hivemind.

Frames from the parent: `start` (config), `publish` (body), `progress` (step, policy), `dial` (addresses), `stop`.
Frames to the parent: `report` (state and totals), `received` (signer, body).
"""

from __future__ import annotations

import logging
import socket
from collections import deque

import trio

from swarm_node.network.children.child import adopt_parent
from swarm_node.network.children.frames import Frame, frame_length, pack_frame, unpack_frame
from swarm_node.network.libp2p.config import MeshConfig
from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.hardening import harden
from swarm_node.network.libp2p.mesh import Mesh

REPORT_EVERY_S = 0.25
OUTGOING_BYTES = 64 * 1024 * 1024
"""Bodies that wait for the parent at most; the learner may stall it for seconds."""


class Parent:
    """The other end of the socket, for trio: reads frames, and writes from a bounded queue."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._outgoing: deque[bytes] = deque()
        self._bytes = 0
        self._filled = trio.Event()
        self.dropped = 0

    def send(self, frame: bytes) -> None:
        """Queue a frame; the oldest go when the parent does not read."""
        self._outgoing.append(frame)
        self._bytes += len(frame)
        while self._bytes > OUTGOING_BYTES and len(self._outgoing) > 1:
            self._bytes -= len(self._outgoing.popleft())
            self.dropped += 1
        self._filled.set()

    async def read(self) -> Frame | None:
        """The next frame, or None when the parent is gone."""
        prefix = await self._read_exactly(4)
        packed = None if prefix is None else await self._read_exactly(frame_length(prefix))
        return None if packed is None else unpack_frame(packed)

    async def write_for_ever(self) -> None:
        """Write what is queued."""
        while True:
            while not self._outgoing:
                self._filled = trio.Event()
                await self._filled.wait()
            frame = self._outgoing.popleft()
            self._bytes -= len(frame)
            await self._stream.send_all(frame)

    async def _read_exactly(self, count: int) -> bytes | None:
        buffer = bytearray()
        while len(buffer) < count:
            try:
                part = await self._stream.receive_some(count - len(buffer))
            except trio.BrokenResourceError:
                return None
            if not part:
                return None
            buffer += part
        return bytes(buffer)


async def serve(connection: socket.socket, guard: PeerGuard) -> None:
    """Be the network until the parent says stop or is gone."""
    parent = Parent(connection)
    first = await parent.read()
    if first is None or first[0] != "start":
        return
    mesh = Mesh(MeshConfig.model_validate(first[1]), guard, lambda sender, body: parent.send(pack_frame("received", sender, body)))

    async def report_for_ever() -> None:
        while True:
            report = mesh.report()
            report["dropped"] += parent.dropped
            parent.send(pack_frame("report", report))
            await trio.sleep(REPORT_EVERY_S)

    async with trio.open_nursery() as nursery:

        async def listen_to_parent() -> None:
            while (frame := await parent.read()) is not None and frame[0] != "stop":
                match frame:
                    case ["publish", body]:
                        mesh.publish(body)
                    case ["progress", step, policy]:
                        mesh.step, mesh.policy = step, policy
                    case ["dial", addresses]:
                        for address in addresses:
                            mesh.learn(address)
            nursery.cancel_scope.cancel()

        nursery.start_soon(parent.write_for_ever)
        nursery.start_soon(listen_to_parent)
        await mesh.run(lambda: nursery.start_soon(report_for_ever))


def main() -> None:
    """Entry point of the child."""
    connection = adopt_parent()
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it logs every peer's nonsense as an error; the guard counts it
    guard = PeerGuard()
    harden(guard)
    trio.run(serve, connection, guard)


if __name__ == "__main__":
    main()
