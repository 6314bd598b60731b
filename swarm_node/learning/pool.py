"""The pool: own and foreign groups that wait to be learned from, bounded in number, tokens, age and share.

Each group is used once. Own groups are all used in the next step. Foreign ones fill up to their share, newest first, one peer after the
other, so that neither a flood nor a fast machine crowds the others out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from swarm_protocols.group import Group

from swarm_node.learning.options import PoolOptions
from swarm_node.learning.scored import ScoredGroup


@dataclass
class Tally:
    """Groups that went one way, with their lengths: whether long answers are lost more often than short ones must be visible."""

    groups: int = 0
    completions: int = 0
    tokens: int = 0
    longest: int = 0
    histogram: dict[int, int] = field(default_factory=dict)
    """Completions by length: key n counts lengths from n up to 2n - 1, n a power of two."""

    def count(self, group: Group) -> None:
        """Add one group."""
        lengths = [len(completion) for completion in group.completions]
        self.groups += 1
        self.completions += len(lengths)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)
        for length in lengths:
            power = 1 << (length.bit_length() - 1)
            self.histogram[power] = self.histogram.get(power, 0) + 1

    @property
    def mean_length(self) -> float:
        """Tokens a completion, NaN before the first."""
        return self.tokens / self.completions if self.completions else math.nan


@dataclass(frozen=True)
class PoolReport:
    """The pool as it is now, and running totals of where groups went."""

    groups: int
    tokens: int
    own: int
    peers: Mapping[str, int]
    """Peer id -> foreign groups held."""
    used: Tally
    too_old: Tally
    """Left unused because of `max_age_steps`."""
    too_many: Tally
    """Left unused because the pool was full."""


@dataclass(frozen=True)
class PoolState:
    """What a checkpoint keeps: encoded groups, and JSON beside them."""

    bodies: list[bytes]
    """Encoded groups, oldest first."""
    metadata: dict[str, Any]


class Pool:
    """Holds groups between their arrival and the step that uses them. Not thread-safe: the node's main loop owns it."""

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self._groups: list[ScoredGroup] = []  # in order of arrival
        self._tallies = {name: Tally() for name in ("used", "too_old", "too_many")}
        self._foreign_drawn: Counter[str] = Counter()  # by peer, in the step of the last draw
        self._foreign_tokens = 0  # of those

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: ScoredGroup) -> None:
        """Take a group. When the pool overflows, the oldest group of the peer that holds most tokens leaves; own groups leave last.

        Duplicates are the business of admission and not looked for here.
        """
        self._groups.append(group)
        while len(self._groups) > self.options.max_groups or sum(held.group.tokens for held in self._groups) > self.options.max_tokens:
            self._drop(self._most_crowded(), "too_many")

    def draw(self, step: int) -> list[ScoredGroup]:
        """Take out the groups of the node's own step `step`: all own ones, then foreign ones within their caps, and forget those too old.

        With `own` groups and a foreign share f, at most own * f / (1 - f) groups are foreign, so that they are at most f of all.
        """
        self._forget_old(step)
        own = [held for held in self._groups if held.own]
        for group in own:
            self._drop(group, "used")
        self._foreign_drawn.clear()
        self._foreign_tokens = 0
        return own + self._draw_foreign(step, self._foreign_slots(len(own)))

    def draw_parts(self, step: int) -> list[ScoredGroup]:
        """Horizontal collaboration: take out the own groups that arrived before `step`, and every peer's part of their problems.

        Foreign caps do not apply: a part without its counterparts would be another group. Foreign parts whose problem this node has
        not sampled yet wait, and leave when they are too old.
        """
        self._forget_old(step)
        own = [held for held in self._groups if held.own and held.arrived_step < step]
        problems = {held.group.problem for held in own}
        parts = own + [held for held in self._groups if not held.own and held.group.problem in problems]
        for group in parts:
            self._drop(group, "used")
        return parts

    def replace(self, step: int, useless: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """DAPO's dynamic sampling: foreign groups in place of those foreign ones among `useless` that `draw(step)` gave, by the same caps.

        An own group is not replaced by a foreign one, which would break the foreign share: only a further rollout can replace it.
        """
        freed = Counter(group.sender for group in useless if not group.own)
        slots = sum(self._foreign_drawn.values())
        self._foreign_drawn -= freed
        self._foreign_tokens -= sum(group.group.tokens for group in useless if not group.own)
        return self._draw_foreign(step, slots)

    def report(self) -> PoolReport:
        """Counts now, and running totals."""
        peers = Counter(held.sender for held in self._groups if not held.own)
        own = len(self._groups) - peers.total()
        return PoolReport(len(self._groups), sum(held.group.tokens for held in self._groups), own, dict(peers), **self._tallies)

    def state(self) -> PoolState:
        """Everything that `restore` needs. Bodies may hold log-probs in half precision; a foreign group was decoded from its body and comes
        back as it was, an own one comes back as its peers see it (a step uses up its own groups, so between steps there are none)."""
        groups = [
            {
                "prompt": held.prompt.tolist(),
                "rewards": list(held.rewards),
                "sender": held.sender,
                "own": held.own,
                "arrived_step": held.arrived_step,
            }
            for held in self._groups
        ]
        tallies = {
            name: {
                "groups": t.groups,
                "completions": t.completions,
                "tokens": t.tokens,
                "longest": t.longest,
                "histogram": list(t.histogram.items()),
            }
            for name, t in self._tallies.items()
        }
        return PoolState([held.body for held in self._groups], {"groups": groups, "tallies": tallies})

    def restore(self, state: PoolState, decode: Callable[[bytes], Group]) -> None:
        """Become the pool that `state` was taken from; `decode` reads a body.

        Raises:
            ValueError: bodies and metadata do not belong together.
        """
        groups = state.metadata["groups"]
        if len(groups) != len(state.bodies):
            raise ValueError(f"the pool's state names {len(groups)} groups and has {len(state.bodies)} bodies: the checkpoint is not whole")
        self._groups = [
            ScoredGroup(
                group=decode(body),
                prompt=np.array(held["prompt"], dtype=np.int32),
                rewards=tuple(held["rewards"]),
                sender=held["sender"],
                own=held["own"],
                arrived_step=held["arrived_step"],
                body=body,
            )
            for body, held in zip(state.bodies, groups, strict=True)
        ]
        self._tallies = {
            name: Tally(**{**tally, "histogram": {int(power): count for power, count in tally["histogram"]}})
            for name, tally in state.metadata["tallies"].items()
        }
        self._foreign_drawn.clear()
        self._foreign_tokens = 0

    def _forget_old(self, step: int) -> None:
        for group in [held for held in self._groups if step - held.arrived_step > self.options.max_age_steps]:
            self._drop(group, "too_old")

    def _foreign_slots(self, own: int) -> int:
        share = self.options.foreign_share
        if share == 1:
            return self.options.foreign_per_step
        # The small term undoes what floating point takes from products that are whole numbers.
        return min(self.options.foreign_per_step, math.floor(own * share / (1 - share) + 1e-9))

    def _draw_foreign(self, step: int, slots: int) -> list[ScoredGroup]:
        """Fill up to `slots` foreign places of the step, counting those already filled. A group that has more tokens than the step has
        left waits, and the peer's next one is looked at."""
        peer_cap = max(1, math.floor(slots * self.options.peer_share + 1e-9))
        waiting: dict[str, list[ScoredGroup]] = {}
        for held in self._groups:
            if not held.own:
                waiting.setdefault(held.sender, []).append(held)
        peers = sorted(waiting)
        if not peers:
            return []
        # Another peer begins each step: with fewer slots than peers, nobody is left out for ever.
        peers = peers[step % len(peers) :] + peers[: step % len(peers)]
        drawn: list[ScoredGroup] = []
        while peers and self._foreign_drawn.total() < slots:
            peer = peers.pop(0)
            if not waiting[peer] or self._foreign_drawn[peer] >= peer_cap:
                continue
            peers.append(peer)
            group = waiting[peer].pop()
            if self._foreign_tokens + group.group.tokens > self.options.foreign_tokens_per_step:
                continue
            self._drop(group, "used")
            self._foreign_drawn[peer] += 1
            self._foreign_tokens += group.group.tokens
            drawn.append(group)
        return drawn

    def _most_crowded(self) -> ScoredGroup:
        tokens: Counter[str] = Counter()
        for held in self._groups:
            if not held.own:
                tokens[held.sender] += held.group.tokens
        if not tokens:
            return self._groups[0]
        peer = max(sorted(tokens), key=lambda sender: tokens[sender])
        return next(held for held in self._groups if held.sender == peer and not held.own)

    def _drop(self, group: ScoredGroup, tally: str) -> None:
        self._groups.remove(group)
        self._tallies[tally].count(group.group)
