"""Who is on a simulated network: nodes behind the `Gossip` interface, and adversaries that send what they like."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from swarm_protocols.messages import Announcement, encode_message

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.gossip import NetworkReport, Received
from swarm_node.network.inbox import Inbox
from swarm_node.network.intake import Held, Intake, Wanted, holders_to_ask
from swarm_node.network.options import NetworkOptions


class Transport(Protocol):
    """What peers need of the simulated network."""

    def reachable(self, member: Member) -> list[Member]:
        """Everybody else that is connected to `member` now."""

    def send(self, sender: Member, raw: bytes, to: Collection[str] | None = None) -> None:
        """Put a message on the way to everybody connected, or to the peer ids in `to`."""

    def fetch(self, puller: Member, holder: str, announcement: Announcement, done: Callable[[bytes | None], None]) -> None:
        """Ask one holder for an announced body; `done` gets None when it does not deliver."""

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen so many virtual seconds from now."""

    def remove(self, member: Member) -> None:
        """Take somebody off the network for good."""


class Member:
    """Somebody on the network."""

    def __init__(self, network: Transport, peer_id: str, held: Held) -> None:
        self.network = network
        self.peer_id = peer_id
        self.held = held
        """What it serves to whoever pulls."""
        self.up = True

    def hear(self, sender: str, raw: bytes) -> None:
        """A message arrived; `sender` is who really sent it."""
        raise NotImplementedError


class SimulatedGossip(Member):
    """A node's view of the simulated swarm; implements `Gossip`."""

    def __init__(self, network: Transport, peer_id: str, options: NetworkOptions, admission: CheapAdmission, rng: random.Random) -> None:
        self._inbox = Inbox(options.inbox_bodies, options.inbox_bytes)
        self._intake = Intake(peer_id, options, admission, lambda sender, body: self._inbox.put(Received(sender, body)))
        super().__init__(network, peer_id, self._intake.held)
        self._admission = admission
        self._rng = rng
        self._policy = ""
        self._published = 0

    def publish(self, body: bytes) -> None:
        """Send the group, or where it is large its announcement, over the simulated links."""
        self.network.send(self, encode_message(self._intake.wrap(body, self._policy)))
        self._published += 1

    def drain(self) -> list[Received]:
        """See `Gossip.drain`."""
        return self._inbox.drain()

    def progress(self, step: int, policy: str) -> None:
        """Announcements carry `policy` from now on; the step is not used."""
        self._policy = policy

    def report(self) -> NetworkReport:
        """As of this virtual moment; peers are those reachable now."""
        peers = len(self.network.reachable(self))
        trouble = "" if peers else "no peers: the simulated link is down" if not self.up else "no peers yet"
        return NetworkReport(
            peers=peers,
            addresses=(f"/memory/{self.peer_id}",),
            published=self._published,
            received=self._intake.received,
            dropped=self._intake.dropped + self._inbox.dropped,
            rejections=self._admission.rejections,
            ignored=self._admission.ignored,
            trouble=trouble,
        )

    def close(self) -> None:
        """Leave the network for good; what was sent still arrives."""
        self.network.remove(self)

    def hear(self, sender: str, raw: bytes) -> None:
        """Judge a message, and ask for the body where it announces a wanted one."""
        self._intake.hear(sender, sender, raw)
        self._begin_pulls()

    def _begin_pulls(self) -> None:
        while (wanted := self._intake.begin_pull()) is not None:
            connected = [member.peer_id for member in self.network.reachable(self)]
            self._ask(wanted, iter(holders_to_ask(wanted, connected, self._rng)))

    def _ask(self, wanted: Wanted, holders: Iterator[str]) -> None:
        """Ask one holder after the other."""

        def end(body: bytes | None) -> None:
            self._intake.end_pull(wanted, body)
            self._begin_pulls()

        holder = next(holders, None)
        if holder is None:
            self.network.after(wanted.pause_s, lambda: end(None))
        else:
            self.network.fetch(self, holder, wanted.announcement, lambda body: self._ask(wanted, holders) if body is None else end(body))


class RawPeer(Member):
    """An adversary: sends any bytes, hears everything, and serves whatever it holds."""

    def __init__(self, network: Transport, peer_id: str, options: NetworkOptions) -> None:
        super().__init__(network, peer_id, Held(options.held_bytes))
        self.heard: deque[tuple[str, bytes]] = deque(maxlen=4096)
        """The latest (sender, message) pairs."""

    def send_bytes(self, raw: bytes, to: Collection[str] | None = None) -> None:
        """Send a message as it is, to everybody or to some."""
        self.network.send(self, raw, to)

    def hear(self, sender: str, raw: bytes) -> None:
        """Keep it in `heard`, unjudged."""
        self.heard.append((sender, raw))
