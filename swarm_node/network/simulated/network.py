"""A swarm in memory and in virtual time: the same messages, codec, intake and admission as the real network, over a transport that a
test controls.

    network = SimulatedNetwork(seed=1, link=Link(loss=0.1))
    alice = network.join("alice", CheapAdmission(tasks=..., assigned=..., clock=network.clock))
    bob = network.join("bob", CheapAdmission(tasks=..., assigned=..., clock=network.clock))
    alice.publish(body)
    network.advance(1.0)
    bob.drain()

Everybody is connected to everybody who is up and on the same side of a partition. Time moves only in `advance`, and everything that
happens is drawn from the seed: each link and each peer has its own stream, so that one more peer changes nothing for the others.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable
from functools import partial

from swarm_protocols.codec import digest
from swarm_protocols.messages import Announcement

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.options import NetworkOptions
from swarm_node.network.simulated.peers import Member, RawPeer, SimulatedGossip
from swarm_node.network.simulated.weather import Churn, Link

_REQUEST_BYTES = 64
"""A pull's request, or a refusal: digest and framing."""


class SimulatedNetwork:
    """The swarm's transport and its clock."""

    def __init__(self, seed: int, *, link: Link | None = None, options: NetworkOptions | None = None) -> None:
        """
        Args:
            seed: of every draw: losses, delays, churn and the order of pulls.
            link: what connects any two peers unless `set_link` says otherwise.
            options: what travels inline, and bounds of what a node holds and of what waits for its `drain`.
        """
        self.now = 0.0
        self._seed = seed
        self._link = link or Link()
        self._options = options or NetworkOptions()
        self._members: dict[str, Member] = {}
        self._sides: dict[str, int] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._streams: dict[tuple[str, ...], random.Random] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()

    def clock(self) -> float:
        """Virtual seconds: what admission and nodes take as their clock."""
        return self.now

    # -- who is here --------------------------------------------------------------------------------------------------------------

    def join(self, peer_id: str, admission: CheapAdmission) -> SimulatedGossip:
        """A new node.

        Raises:
            ValueError: somebody of that name is here.
        """
        gossip = SimulatedGossip(self, peer_id, self._options, admission, self._stream("pull", peer_id))
        self._add(gossip)
        return gossip

    def join_raw(self, peer_id: str) -> RawPeer:
        """A new adversary.

        Raises:
            ValueError: somebody of that name is here.
        """
        peer = RawPeer(self, peer_id, self._options)
        self._add(peer)
        return peer

    def remove(self, member: Member) -> None:
        """Somebody is gone for good; what they sent still arrives."""
        if self._members.get(member.peer_id) is member:
            del self._members[member.peer_id]
        member.up = False

    def _add(self, member: Member) -> None:
        if member.peer_id in self._members:
            raise ValueError(f"peer {member.peer_id!r} is on the network already")
        self._members[member.peer_id] = member

    # -- weather ------------------------------------------------------------------------------------------------------------------

    def set_link(self, one: str, other: str, link: Link) -> None:
        """Connect two peers by a link of their own, in both directions."""
        self._links[one, other] = self._links[other, one] = link

    def partition(self, *sides: Iterable[str]) -> None:
        """Split the swarm: peers of different sides do not hear each other, nor those who are on no side."""
        self._sides = {peer_id: number for number, side in enumerate(sides, start=1) for peer_id in side}

    def heal(self) -> None:
        """End the partition."""
        self._sides = {}

    def leave(self, peer_id: str) -> None:
        """Take a peer off the network until `rejoin`; what is sent to it is lost."""
        self._members[peer_id].up = False

    def rejoin(self, peer_id: str) -> None:
        """Bring a peer back after `leave`, with everything that it remembers."""
        self._members[peer_id].up = True

    def churn(self, peer_ids: Iterable[str], churn: Churn) -> None:
        """Let peers leave and rejoin from now on, until they close."""
        for peer_id in peer_ids:
            self._schedule_flip(self._members[peer_id], churn)

    def _schedule_flip(self, member: Member, churn: Churn) -> None:
        mean = churn.mean_up_s if member.up else churn.mean_down_s

        def flip() -> None:
            if self._members.get(member.peer_id) is member:
                member.up = not member.up
                self._schedule_flip(member, churn)

        self.after(self._stream("churn", member.peer_id).expovariate(1 / mean), flip)

    def connected(self, one: Member, other: Member) -> bool:
        """Whether messages between them arrive now."""
        return one.up and other.up and self._sides.get(one.peer_id, 0) == self._sides.get(other.peer_id, 0)

    def reachable(self, member: Member) -> list[Member]:
        """Everybody else that is connected to `member`, in order of joining."""
        return [other for other in self._members.values() if other is not member and self.connected(member, other)]

    # -- time ---------------------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass; everything that is due happens at its own time, in order."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.now = until

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen so many virtual seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._ticket), happen))

    # -- transport ----------------------------------------------------------------------------------------------------------------

    def send(self, sender: Member, raw: bytes, to: Collection[str] | None = None) -> None:
        """Put a message on the way to everybody connected now, or to some of them."""
        for receiver in self.reachable(sender):
            if to is not None and receiver.peer_id not in to:
                continue
            link, draws = self._between(sender.peer_id, receiver.peer_id)
            if draws.random() < link.loss:
                continue
            for _ in range(1 + (draws.random() < link.duplication)):
                self.after(link.delay(len(raw), draws), partial(self._deliver, sender, receiver, raw))

    def _deliver(self, sender: Member, receiver: Member, raw: bytes) -> None:
        # A sender that left meanwhile is heard all the same; a receiver that left, or went to another side, is not reached.
        if receiver.up and self._sides.get(sender.peer_id, 0) == self._sides.get(receiver.peer_id, 0):
            receiver.hear(sender.peer_id, raw)

    def fetch(self, puller: Member, holder: str, announcement: Announcement, done: Callable[[bytes | None], None]) -> None:
        """Ask one holder for an announced body over a stream; `done` gets None when it does not deliver."""

        def answer() -> None:
            member = self._members.get(holder)
            body = member.held.get(announcement.digest) if member and self.connected(puller, member) else None
            link, draws = self._between(holder, puller.peer_id)
            if member is None or body is None:
                self.after(link.delay(_REQUEST_BYTES, draws), lambda: done(None))
            else:  # the puller stops at the first byte too many
                self.after(link.delay(min(len(body), announcement.size + 1), draws), partial(arrive, member, body))

        def arrive(member: Member, body: bytes) -> None:
            is_announced = len(body) == announcement.size and digest(body) == announcement.digest
            done(body if is_announced and self.connected(puller, member) else None)

        link, draws = self._between(puller.peer_id, holder)
        self.after(link.delay(_REQUEST_BYTES, draws), answer)

    def _between(self, sender: str, receiver: str) -> tuple[Link, random.Random]:
        return self._links.get((sender, receiver), self._link), self._stream("link", sender, receiver)

    def _stream(self, *name: str) -> random.Random:
        if name not in self._streams:
            self._streams[name] = random.Random(repr((self._seed, *name)))
        return self._streams[name]
