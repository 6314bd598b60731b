"""Who is dialled when: every known peer, for ever, with jittered back-off; those that were lost soon."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

from swarm_node.network.addresses import Address

FIRST_PAUSE_S = 0.5
FORGET_AFTER = 12
"""Failures in a row after which an address that nobody configured is forgotten."""
MAX_TARGETS = 512


class Source(IntEnum):
    """Where an address comes from; a smaller one is kept longer."""

    CONFIGURED = 0
    """The user said so: never forgotten."""
    REMEMBERED = 1
    """It worked before."""
    FOUND = 2
    """The directory or another peer said so."""


@dataclass
class Target:
    """One address and how dialling it went."""

    address: Address
    source: Source
    due: float
    """When it is to be dialled next, seconds of the caller's clock."""
    failures: int = 0
    reason: str = ""
    """Why the last attempt failed."""
    peer: str = ""
    """Who answered there, once that is known."""
    busy: bool = field(default=False)


class Dialler:
    """Plans the dials; somebody else makes them and tells how they went. Pure: no sockets, no clock of its own."""

    def __init__(self, own: str, longest_pause_s: float, rng: random.Random) -> None:
        """`own` is this node's peer id, which is never dialled."""
        self._own = own
        self._longest = longest_pause_s
        self._rng = rng
        self._targets: dict[str, Target] = {}

    def add(self, address: Address, source: Source, now: float) -> None:
        """Learn an address; one that is known keeps its history."""
        if address.peer == self._own:
            return
        key = str(address)
        known = self._targets.get(key)
        if known is not None:
            known.source = min(known.source, source)
            return
        if len(self._targets) >= MAX_TARGETS and not self._make_room():
            return
        self._targets[key] = Target(address, source, now + self._rng.uniform(0, 0.1), peer=address.peer)

    def due(self, now: float, connected: Collection[str], at_most: int, only_configured: bool = False) -> list[Target]:
        """Targets to dial now, configured ones first; each is busy until its outcome is told."""
        ready = [t for t in self._targets.values() if not t.busy and t.due <= now and t.peer not in connected]
        if only_configured:
            ready = [t for t in ready if t.source is Source.CONFIGURED]
        ready.sort(key=lambda t: (t.source, t.failures, t.due))
        chosen: list[Target] = []
        peers: set[str] = set()
        for target in ready:
            if len(chosen) >= at_most:
                break
            if target.peer and target.peer in peers:  # one address of a peer at a time
                continue
            peers.add(target.peer)
            target.busy = True
            chosen.append(target)
        return chosen

    def next_due(self, connected: Collection[str]) -> float | None:
        """When the next dial is due, or None when there is none."""
        return min((t.due for t in self._targets.values() if not t.busy and t.peer not in connected), default=None)

    def succeeded(self, target: Target, peer: str, now: float) -> None:
        """The target answered as `peer`."""
        target.busy = False
        target.failures = 0
        target.reason = ""
        target.peer = peer
        target.due = now + FIRST_PAUSE_S
        if peer == self._own:  # a name that leads here: look again later, it may lead elsewhere then
            target.due = now + self._longest

    def failed(self, target: Target, reason: str, now: float) -> None:
        """The target did not answer: later again."""
        target.busy = False
        target.failures += 1
        target.reason = reason
        target.due = now + self._pause(target.failures)
        if target.source is not Source.CONFIGURED and target.failures >= FORGET_AFTER:
            self._targets.pop(str(target.address), None)

    def lost(self, peer: str, now: float) -> None:
        """The connection to a peer ended: dial it soon, but not in step with its other peers."""
        for target in self._targets.values():
            if target.peer == peer and not target.busy:
                target.failures = 0
                target.due = now + self._rng.uniform(0.2, 1.0)

    def isolated(self, now: float) -> None:
        """Nobody is connected: whatever pause a target has left is cut short."""
        for target in self._targets.values():
            target.due = min(target.due, now + self._rng.uniform(0, 5.0))

    def waiting_for(self, now: float) -> str:
        """In words what is being dialled, for a node that has no peer."""
        targets = [t for t in self._targets.values() if t.peer != self._own]
        if not targets:
            return "no peers yet: this node knows no address to dial and waits for others to dial it"
        target = min(targets, key=lambda t: (t.source, t.due))
        more = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
        if not target.failures:
            return f"no peers yet: dialling {target.address}{more}"
        times = "once" if target.failures == 1 else f"{target.failures} times"
        when = f"again in {target.due - now:.0f} s" if target.due > now and not target.busy else "dialling again"
        return f"no peers yet: {target.address}{more} did not answer {times} ({target.reason}), {when}"

    def _pause(self, failures: int) -> float:
        pause = min(self._longest, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20))
        return pause * self._rng.uniform(0.75, 1.25)

    def _make_room(self) -> bool:
        worst = max(self._targets.values(), key=lambda t: (t.source, t.failures))
        if worst.source is Source.CONFIGURED or worst.busy or not worst.failures:
            return False
        del self._targets[str(worst.address)]
        return True
