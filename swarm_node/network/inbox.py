"""Bodies that wait for the learner: bounded in number and bytes, the oldest dropped and counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from swarm_node.network.gossip import Received


def newest_of_each(arrived: Sequence[Received], limit: int) -> list[Received]:
    """At most `limit` of the bodies that arrived, the newest first, one sender after the other: no flood crowds anybody out."""
    waiting: dict[str, list[Received]] = {}
    for received in arrived:
        waiting.setdefault(received.sender, []).append(received)
    chosen: list[Received] = []
    while waiting and len(chosen) < limit:
        for sender in list(waiting)[: limit - len(chosen)]:
            chosen.append(waiting[sender].pop())
            if not waiting[sender]:
                del waiting[sender]
    return chosen


class Inbox:
    """Filled by a reader thread, drained by the node."""

    def __init__(self, max_bodies: int, max_bytes: int) -> None:
        self.dropped = 0
        self._limits = (max_bodies, max_bytes)
        self._received: deque[Received] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, received: Received) -> None:
        """Add a body; the oldest ones make room."""
        bodies, size = self._limits
        with self._lock:
            self._received.append(received)
            self._bytes += len(received.body)
            while len(self._received) > bodies or (self._bytes > size and len(self._received) > 1):
                self._bytes -= len(self._received.popleft().body)
                self.dropped += 1

    def drain(self) -> list[Received]:
        """Everything that waits, oldest first."""
        with self._lock:
            drained = list(self._received)
            self._received.clear()
            self._bytes = 0
            return drained
