"""What a node does with messages, whatever carries them: open, admit, deliver or want. The mesh and the simulated peer run it alike.

It knows no transport and no clock. Who has them calls `hear` with every message; begins the pulls that `begin_pull` gives, asking the
peers of `holders_to_ask` one after the other; tells `end_pull` how each went; and sends what `wrap` makes of an own body.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_protocols.codec import decode_header, digest
from swarm_protocols.messages import Announcement, GroupMessage
from swarm_protocols.reject import Rejected

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.options import NetworkOptions

QUIET_MESSAGES = 60
"""Messages of one signer, between two greetings of this node, that carry no group and are passed on."""
PULLS_AT_ONCE = 4
PULLS_OF_ONE_ANNOUNCER = 2
"""Of those at once: whoever announces and then delivers slowly must not hold every place."""
PULLS_WAITING = 256
TRIES = 3
"""A neighbour that passed the news on may still be pulling itself."""
RETRY_PAUSE_S = 0.5
"""Pause after the first failed try; as much longer after each further one."""
OTHER_HOLDERS = 3
"""Neighbours that are asked on the off chance."""


class Held:
    """Large bodies by digest, own and pulled, so that others can pull them here; the oldest go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, digest: bytes, body: bytes) -> None:
        """Hold a body, and let go of the oldest ones when there is no room."""
        if digest in self._bodies:
            self._bodies.move_to_end(digest)
            return
        self._bodies[digest] = body
        self.bytes += len(body)
        while self.bytes > self.max_bytes and len(self._bodies) > 1:
            _, gone = self._bodies.popitem(last=False)
            self.bytes -= len(gone)

    def get(self, digest: bytes) -> bytes | None:
        """The body, or None when it is not held (any more)."""
        return self._bodies.get(digest)

    def __len__(self) -> int:
        return len(self._bodies)


@dataclass
class Wanted:
    """An announced body that is to be pulled."""

    sender: str
    """Who signed the announcement."""
    forwarder: str
    """Who passed it on."""
    announcement: Announcement
    tries: int = 0
    """Pulls that were begun."""

    @property
    def pause_s(self) -> float:
        """Seconds between a pull in which nobody delivered and its end, when it takes its place among the others again."""
        return RETRY_PAUSE_S * self.tries if self.tries < TRIES else 0.0


def holders_to_ask(wanted: Wanted, connected: Sequence[str], rng: random.Random) -> list[str]:
    """Whom to ask for a body, in order: the announcer, who passed the news on, some other neighbours."""
    likely = dict.fromkeys((wanted.sender, wanted.forwarder))
    others = [peer for peer in connected if peer not in likely]
    return [peer for peer in likely if peer in connected] + rng.sample(others, min(OTHER_HOLDERS, len(others)))


class Intake:
    """One node's judgement and wishes; `deliver` gets (signer's peer id, body) of every admitted group."""

    def __init__(self, own: str, options: NetworkOptions, admission: CheapAdmission, deliver: Callable[[str, bytes], None]) -> None:
        """`own` is this node's peer id."""
        self.held = Held(options.held_bytes)
        self.received = self.pulled = 0
        self.pull_failures = 0
        """Bodies that were given up after `TRIES` pulls."""
        self.dropped = 0
        """Wishes dropped because too many waited."""
        self._own = own
        self._inline_limit = options.inline_limit
        self._admission = admission
        self._deliver = deliver
        self._quiet: Counter[str] = Counter()
        self._wishes: deque[Wanted] = deque()
        self._pulling: Counter[str] = Counter()
        """Announcer -> pulls of its bodies under way."""

    def hear(self, sender: str, forwarder: str, raw: bytes) -> bool:
        """Judge a message that `sender` signed and `forwarder` brought; whether it may be passed on."""
        if sender == self._own:
            return True
        try:
            match self._admission.open(raw):
                case GroupMessage(body):
                    self.received += 1
                    self._admission.admit(sender, body)
                    self._deliver(sender, body)
                    return True
                case Announcement() as announcement:
                    self.received += 1
                    self._admission.admit_announcement(sender, announcement)
                    self._want(Wanted(sender, forwarder, announcement))
                    return True
        except Rejected:  # counted by admission
            return False
        self._quiet[sender] += 1
        return self._quiet[sender] <= QUIET_MESSAGES

    def greeted(self) -> None:
        """This node greets: everybody may be quiet for `QUIET_MESSAGES` again."""
        self._quiet.clear()

    def wrap(self, body: bytes, policy: str) -> GroupMessage | Announcement:
        """The message that publishes an own body: the body itself, or, of a large one, which is then held, an announcement.

        Raises:
            Rejected: a large body has no header to announce.
        """
        if len(body) <= self._inline_limit:
            return GroupMessage(body)
        header = decode_header(body, self._admission.limits)
        announcement = Announcement(digest(body), len(body), header.completions, header.tokens, policy)
        self.held.add(announcement.digest, body)
        return announcement

    def begin_pull(self) -> Wanted | None:
        """The oldest wish that may be pulled now, if any; `end_pull` must follow."""
        if self._pulling.total() < PULLS_AT_ONCE:
            for wanted in self._wishes:
                if self._pulling[wanted.sender] < PULLS_OF_ONE_ANNOUNCER:
                    self._wishes.remove(wanted)
                    self._pulling[wanted.sender] += 1
                    wanted.tries += 1
                    return wanted
        return None

    def end_pull(self, wanted: Wanted, body: bytes | None) -> None:
        """A pull brought the announced body, or nobody delivered it, `wanted.pause_s` ago: then it is wanted again, or given up."""
        self._pulling[wanted.sender] -= 1
        if not self._pulling[wanted.sender]:
            del self._pulling[wanted.sender]
        if body is not None:
            self.pulled += 1
            try:
                self._admission.admit(wanted.sender, body)
            except Rejected:  # counted by admission
                return
            self.held.add(wanted.announcement.digest, body)
            self._deliver(wanted.sender, body)
        elif wanted.tries < TRIES:
            self._want(wanted)
        else:
            self.pull_failures += 1

    def _want(self, wanted: Wanted) -> None:
        """Queue a wish; the oldest one goes when there are too many."""
        self._wishes.append(wanted)
        if len(self._wishes) > PULLS_WAITING:
            self._wishes.popleft()
            self.dropped += 1
