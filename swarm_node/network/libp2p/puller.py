"""Pulls what the intake wants, over streams."""

from __future__ import annotations

import random

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from swarm_protocols.messages import Announcement

from swarm_node.network.intake import Intake, Wanted, holders_to_ask
from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.libp2p.host import Host
from swarm_node.network.libp2p.pull import PULL_PROTOCOL, fetch


class Puller:
    """A task for every pull under way."""

    def __init__(self, host: Host, guard: PeerGuard, rng: random.Random, timeout_s: float, intake: Intake) -> None:
        self._host = host
        self._guard = guard
        self._rng = rng
        self._timeout_s = timeout_s
        self._intake = intake
        self._idle = trio.lowlevel.ParkingLot()

    def wake(self) -> None:
        """There may be something to pull."""
        self._idle.unpark_all()

    async def run(self) -> None:
        """Pull for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                while (wanted := self._intake.begin_pull()) is not None:
                    nursery.start_soon(self._pull, wanted)
                await self._idle.park()

    async def _pull(self, wanted: Wanted) -> None:
        body = None
        for holder in holders_to_ask(wanted, self._host.peers(), self._rng):
            with self._guard.watch("pull", holder):
                body = await self._pull_from(holder, wanted.announcement)
                break
        else:
            await trio.sleep(wanted.pause_s)
        with self._guard.watch("pull", wanted.sender):
            self._intake.end_pull(wanted, body)
        self.wake()

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
