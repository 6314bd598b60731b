"""Fetches announced bodies: from the announcer first, then from whoever passed the news on, then from other neighbours."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from swarm_protocols.messages import Announcement

from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.host import Host
from swarm_node.network.libp2p.pull import PULL_PROTOCOL, fetch

PULLS_AT_ONCE = 4
PULLS_OF_ONE_ANNOUNCER = 2
"""Of those at once: whoever announces and then delivers slowly must not hold every worker."""
PULLS_WAITING = 256
TRIES = 3
"""A neighbour that passed the news on may still be pulling itself."""
OTHER_HOLDERS = 3
"""Neighbours that are asked on the off chance."""


@dataclass
class Wanted:
    """An announced body that is to be pulled."""

    sender: str
    """Who signed the announcement."""
    forwarder: str
    """Who passed it on."""
    announcement: Announcement
    tries: int = field(default=0)


class Puller:
    """A bounded queue of wanted bodies and a few workers; `take` gets (what was wanted, body) of each."""

    def __init__(self, host: Host, guard: PeerGuard, rng: random.Random, timeout_s: float, take: Callable[[Wanted, bytes], None]) -> None:
        self.pulled = 0
        self.failures = 0
        self.dropped = 0
        self._host = host
        self._guard = guard
        self._rng = rng
        self._timeout_s = timeout_s
        self._take = take
        self._queue: deque[Wanted] = deque()
        self._busy: Counter[str] = Counter()  # announcer -> workers that pull its bodies
        self._idle = trio.lowlevel.ParkingLot()

    def want(self, wanted: Wanted) -> None:
        """Queue a body; the oldest wish goes when there are too many."""
        self._queue.append(wanted)
        if len(self._queue) > PULLS_WAITING:
            self._queue.popleft()
            self.dropped += 1
        self._idle.unpark_all()

    async def run(self) -> None:
        """Pull for ever."""
        async with trio.open_nursery() as nursery:
            for _ in range(PULLS_AT_ONCE):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while (wanted := self._next()) is None:
                await self._idle.park()
            self._busy[wanted.sender] += 1
            with self._guard.watch("pull", wanted.sender):
                await self._pull(wanted)
            self._busy[wanted.sender] -= 1
            if not self._busy[wanted.sender]:
                del self._busy[wanted.sender]
            self._idle.unpark_all()

    def _next(self) -> Wanted | None:
        """Take out the oldest wish whose announcer has a worker free."""
        for wanted in self._queue:
            if self._busy[wanted.sender] < PULLS_OF_ONE_ANNOUNCER:
                self._queue.remove(wanted)
                return wanted
        return None

    async def _pull(self, wanted: Wanted) -> None:
        connected = self._host.peers()
        others = [peer for peer in connected if peer not in (wanted.sender, wanted.forwarder)]
        self._rng.shuffle(others)
        for holder in dict.fromkeys([wanted.sender, wanted.forwarder, *others[:OTHER_HOLDERS]]):
            if holder in connected:
                with self._guard.watch("pull", holder):
                    body = await self._pull_from(holder, wanted.announcement)
                    self.pulled += 1
                    self._take(wanted, body)
                    return
        wanted.tries += 1
        if wanted.tries < TRIES:
            await trio.sleep(0.5 * wanted.tries)
            self.want(wanted)
        else:
            self.failures += 1

    async def _pull_from(self, holder: str, announcement: Announcement) -> bytes:
        """One try with one holder. Raises PullError, trio.TooSlowError, and whatever the holder's bytes make libp2p raise."""
        with trio.fail_after(self._timeout_s):
            stream = await self._host.host.new_stream(ID.from_string(holder), [TProtocol(PULL_PROTOCOL)])
        done = False
        try:
            body = await fetch(stream, announcement.digest, announcement.size, self._timeout_s)
            done = True
            return body
        finally:
            with trio.move_on_after(1) as scope:
                scope.shield = True
                await (stream.close() if done else stream.reset())
