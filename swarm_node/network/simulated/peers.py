"""Who is on a simulated network: nodes behind the `Gossip` interface, and adversaries that send what they like."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from swarm_protocols.codec import decode_header, digest
from swarm_protocols.messages import Announcement, GroupMessage, encode_message
from swarm_protocols.reject import Rejected

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.gossip import NetworkReport, Received

if TYPE_CHECKING:
    from swarm_node.network.simulated.network import SimulatedNetwork

_HELD_BYTES = 64 * 1024 * 1024
"""Large bodies that one member keeps so that others can pull them."""
_MAX_PULLS = 32
"""Pulls that one member has under way at most; an announcement beyond that is dropped and counted."""


class Member:
    """Somebody on the network."""

    def __init__(self, network: SimulatedNetwork, peer_id: str) -> None:
        self.network = network
        self.peer_id = peer_id
        self.up = True
        self._held: OrderedDict[bytes, bytes] = OrderedDict()

    def hear(self, sender: str, raw: bytes) -> None:
        """A message arrived; `sender` is who really sent it."""
        raise NotImplementedError

    def hold(self, name: bytes, body: bytes) -> None:
        """Serve `body` to whoever pulls the digest `name`."""
        self._held[name] = body
        while sum(map(len, self._held.values())) > _HELD_BYTES:
            self._held.popitem(last=False)

    def serve(self, name: bytes) -> bytes | None:
        return self._held.get(name)


class SimulatedGossip(Member):
    """A node's view of the simulated swarm; implements `Gossip`."""

    def __init__(self, network: SimulatedNetwork, peer_id: str, admission: CheapAdmission, inbox_bodies: int) -> None:
        super().__init__(network, peer_id)
        self.admission = admission
        self._inbox: deque[Received] = deque()
        self._inbox_bodies = inbox_bodies
        self._pulling: set[tuple[str, bytes]] = set()
        self._policy = ""
        self._published = self._received = self._dropped = 0

    def publish(self, body: bytes) -> None:
        limits = self.network.limits
        self._published += 1
        if len(body) <= limits.inline_bytes:
            self.network.send(self, encode_message(GroupMessage(body)))
            return
        header, name = decode_header(body, limits), digest(body)
        self.hold(name, body)
        self.network.send(self, encode_message(Announcement(name, len(body), header.completions, header.tokens, self._policy)))

    def drain(self) -> list[Received]:
        arrived = list(self._inbox)
        self._inbox.clear()
        return arrived

    def progress(self, step: int, policy: str) -> None:
        self._policy = f"{policy} at step {step}"

    def report(self) -> NetworkReport:
        peers = len(self.network.reachable(self))
        trouble = "" if peers else "no peers: the simulated link is down" if not self.up else "no peers yet"
        return NetworkReport(
            peers=peers,
            addresses=(f"/memory/{self.peer_id}",),
            published=self._published,
            received=self._received,
            dropped=self._dropped,
            rejections=self.admission.rejections,
            trouble=trouble,
        )

    def close(self) -> None:
        self.network.remove(self)

    def hear(self, sender: str, raw: bytes) -> None:
        try:
            message = self.admission.open(raw)
            match message:
                case GroupMessage(body):
                    self._received += 1
                    self._take(sender, body)
                case Announcement():
                    self._received += 1
                    self._consider(sender, message)
        except Rejected:
            return  # counted by admission

    def _consider(self, sender: str, announcement: Announcement) -> None:
        # Two senders may announce one digest, and only one of them made it: each is pulled and judged as its announcer's.
        key = (sender, announcement.digest)
        if key in self._pulling:
            return
        self.admission.admit_announcement(sender, announcement)
        if len(self._pulling) >= _MAX_PULLS:
            self._dropped += 1
            return
        self._pulling.add(key)
        self.network.pull(self, sender, announcement, lambda body: self._pulled(key, body))

    def _pulled(self, key: tuple[str, bytes], body: bytes | None) -> None:
        self._pulling.discard(key)
        if body is None:
            return
        sender, name = key
        try:
            self._take(sender, body)
        except Rejected:
            return  # counted by admission
        self.hold(name, body)

    def _take(self, sender: str, body: bytes) -> None:
        self.admission.admit(sender, body)
        if len(self._inbox) >= self._inbox_bodies:
            self._inbox.popleft()
            self._dropped += 1
        self._inbox.append(Received(sender, body))


class RawPeer(Member):
    """An adversary: sends any bytes, hears everything, and serves whatever it holds."""

    def __init__(self, network: SimulatedNetwork, peer_id: str) -> None:
        super().__init__(network, peer_id)
        self.heard: deque[tuple[str, bytes]] = deque(maxlen=4096)
        """The latest (sender, message) pairs."""

    def send_bytes(self, raw: bytes, to: Collection[str] | None = None) -> None:
        """Send a message as it is, to everybody or to some."""
        self.network.send(self, raw, to)

    def hear(self, sender: str, raw: bytes) -> None:
        self.heard.append((sender, raw))
