"""Straggler-aware group control (arXiv 2606.02218): the largest group size whose stragglers stay within a budget.

A bandit with a constraint. Each candidate size G is an arm; an arm's cost p(G) is the probability that a group of G straggles
(`events.straggles`), known through discounted Beta counts; its value is log2 G. A multiplier lambda prices stragglers and
follows the budget delta. Pure arithmetic on completion lengths: no torch, no I/O, microseconds a step.

    choose:  for G within one step of the current index: p ~ Beta(1 + alpha_G, 1 + beta_G);  G = argmax log2 G - lambda p
    observe: S = share of the step's groups that straggled
    update:  all arms: alpha, beta *= gamma;  alpha_G += S, beta_G += 1 - S;  lambda = clip(lambda + eta (S - delta), 0, lambda_max)
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm_node.control.events import straggler_share, straggles
from swarm_node.control.options import SagcOptions

STATE_VERSION = 1


class ControlStateError(ValueError):
    """A saved controller state cannot be restored; the message says why."""


@dataclass(frozen=True)
class Decision:
    """How many completions each group of the next step gets."""

    size: int
    """G."""
    multiplier: float
    """Lambda that the decision was made with."""
    sampled: Mapping[int, float]
    """Candidate size -> straggler probability drawn for it; only the candidates within reach."""
    changed: bool
    """Whether G differs from the step before."""


@dataclass(frozen=True)
class Observation:
    """What the controller learned from one step's groups."""

    stragglers: int
    """Groups with the straggler event."""
    groups: int
    share: float
    """S: what was held against the budget in this step, in [0, 1]."""
    multiplier: float
    """Lambda after the update."""
    infeasible: bool
    """Lambda is pinned at its limit and the smallest size is believed to break the budget: no candidate can keep it."""
    truncated_groups: int
    """Groups whose every completion hit the token limit: their ratio is 1 and no event can fire, however long they would be."""
    censored_groups: int
    """Groups without the event in which some completion hit the token limit (`truncated_groups` among them): the event is unknown."""

    @property
    def rate(self) -> float:
        """Share of the step's groups that straggled."""
        return self.stragglers / self.groups


class Controller:
    """Chooses G for a step, then learns from the step's lengths. Same seed and same lengths give the same path.

    With a fixed `group_size` it only counts: G never changes and lambda stays at `lambda_0`.
    """

    def __init__(self, options: SagcOptions, seed: int) -> None:
        self.options = options
        self._random = random.Random(seed)
        self._sizes = options.sizes
        self._counts = [[0.0, 0.0] for _ in self._sizes]  # alpha, beta an arm, without the Beta(1, 1) prior
        self._index = 0
        self._age = options.hold  # steps since G last changed; the first step may change it
        self._steps = 0
        self.multiplier = options.lambda_0

    @property
    def posterior(self) -> dict[int, float]:
        """Candidate size -> posterior mean of its straggler probability."""
        return {size: (1 + alpha) / (2 + alpha + beta) for size, (alpha, beta) in zip(self._sizes, self._counts, strict=True)}

    @property
    def infeasible(self) -> bool:
        """See `Observation.infeasible`."""
        pinned = self.options.group_size is None and self.multiplier >= self.options.lambda_max
        alpha, beta = self._counts[0]
        return pinned and (1 + alpha) / (2 + alpha + beta) > self.options.delta

    def choose(self) -> Decision:
        """The group size of the next step, at most one candidate away from the last one."""
        reach = self._reach()
        sampled = {self._sizes[i]: self._random.betavariate(1 + self._counts[i][0], 1 + self._counts[i][1]) for i in reach}
        if self.options.retreat and self.multiplier >= self.options.lambda_max:
            best = reach[0]
        else:
            best = max(reach, key=lambda i: math.log2(self._sizes[i]) - self.multiplier * sampled[self._sizes[i]])
        changed = best != self._index
        self._index = best
        self._age = 1 if changed else self._age + 1
        return Decision(self._sizes[best], self.multiplier, sampled, changed)

    def _reach(self) -> range:
        """Indices of the candidates that the next step may use, ascending."""
        if self._age < self.options.hold:
            return range(self._index, self._index + 1)
        return range(max(self._index - 1, 0), min(self._index + 2, len(self._sizes)))

    def observe(self, lengths: Sequence[Sequence[int]], truncated: Sequence[Sequence[bool]] = ()) -> Observation:
        """Learn from the groups sampled after the last `choose`.

        Args:
            lengths: tokens of each completion, one sequence a group.
            truncated: whether each completion was cut at the token limit, in the same order; empty: none was.

        Raises:
            ValueError: no group, an empty group, or a length below 1.
        """
        events = [straggles(group, self.options.straggler_ratio) for group in lengths]
        blind = sum(all(cut) for cut in truncated)
        censored = sum(any(cut) and not event for cut, event in zip(truncated, events, strict=False))
        return self.observe_events(events, truncated_groups=blind, censored_groups=censored)

    def observe_events(self, events: Sequence[bool], *, truncated_groups: int = 0, censored_groups: int = 0) -> Observation:
        """Learn from straggler events alone, one a group. Raises ValueError when there is none."""
        if not events:
            raise ValueError("a step without groups teaches the controller nothing: observe at least one group")
        share = straggler_share(events, self.options.event)
        self._update(share)
        return Observation(sum(events), len(events), share, self.multiplier, self.infeasible, truncated_groups, censored_groups)

    def _update(self, share: float) -> None:
        options = self.options
        for counts in self._counts:
            counts[0] *= options.gamma
            counts[1] *= options.gamma
        self._counts[self._index][0] += share
        self._counts[self._index][1] += 1.0 - share
        if options.group_size is None:
            self.multiplier = min(max(self.multiplier + options.eta * (share - options.delta), 0.0), options.lambda_max)
        self._steps += 1

    def state(self) -> dict[str, Any]:
        """Everything that the path from here on depends on, as JSON."""
        version, words, gauss = self._random.getstate()
        return {
            "version": STATE_VERSION,
            "size": self._sizes[self._index],
            "age": self._age,
            "steps": self._steps,
            "multiplier": self.multiplier,
            "counts": {str(size): list(counts) for size, counts in zip(self._sizes, self._counts, strict=True)},
            "random": [version, list(words), gauss],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Candidates that the state does not know start without counts; G becomes the nearest candidate
        that is not above the saved one.

        Raises:
            ControlStateError: another version, or not a controller's state.
        """
        if state.get("version") != STATE_VERSION:
            raise ControlStateError(f"controller state has version {state.get('version')}, this build reads {STATE_VERSION}")
        try:
            counts = [[float(value) for value in state["counts"].get(str(size), (0.0, 0.0))] for size in self._sizes]
            index = max((i for i, size in enumerate(self._sizes) if size <= int(state["size"])), default=0)
            age, steps, multiplier = int(state["age"]), int(state["steps"]), float(state["multiplier"])
            version, words, gauss = state["random"]
            self._random.setstate((version, tuple(words), gauss))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ControlStateError(f"not a controller state: {error!r}") from error
        self._counts, self._index, self._age, self._steps = counts, index, age, steps
        self.multiplier = min(max(multiplier, 0.0), self.options.lambda_max)
