"""The directory process: `python -m swarm_node.network.directory.process FD`. It imports hivemind, and never libp2p.

Frames from the parent: `start` (config), `announce` (own addresses, policy, step), `stop`.
Frames to the parent: `found` (addresses of others), `report` (state).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from swarm_node.network.children.child import adopt_parent
from swarm_node.network.children.config import ChildConfig
from swarm_node.network.children.frames import Frame, frame_length, pack_frame, unpack_frame
from swarm_node.network.directory.imports import prepare_hivemind


async def serve(connection: socket.socket) -> None:
    """Be the directory until the parent says stop or is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    first = await _read(reader)
    if first is None or first[0] != "start":
        return
    from swarm_node.network.directory.node import Directory  # after the preparations in `main`

    directory = Directory(ChildConfig.model_validate(first[1]), lambda kind, *fields: writer.write(pack_frame(kind, *fields)))

    async def listen_to_parent() -> None:
        while (frame := await _read(reader)) is not None and frame[0] != "stop":
            match frame:
                case ["announce", addresses, policy, step]:
                    directory.announce(addresses, policy, step)

    running = asyncio.create_task(directory.run())
    listening = asyncio.create_task(listen_to_parent())
    await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
    for task in (running, listening):
        if not task.done():
            task.cancel()
    await directory.shutdown()
    if running.done() and not running.cancelled():
        running.result()


async def _read(reader: asyncio.StreamReader) -> Frame | None:
    try:
        prefix = await reader.readexactly(struct.calcsize("<I"))
        return unpack_frame(await reader.readexactly(frame_length(prefix)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def main() -> None:
    """Entry point of the child."""
    connection = adopt_parent()
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    prepare_hivemind()
    asyncio.run(serve(connection))


if __name__ == "__main__":
    main()
