"""What every group-size controller answers and learns, so that SAGC and its baselines are interchangeable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class ControlStateError(ValueError):
    """A saved controller state cannot be restored; the message says why."""


@dataclass(frozen=True)
class Decision:
    """How many completions each group of the next step gets."""

    size: int
    """G; where groups differ, the (lower) median of `sizes`."""
    multiplier: float
    """Lambda that the decision was made with."""
    sampled: Mapping[int, float]
    """Candidate size -> straggler probability drawn for it; only the candidates within reach. Empty where groups were decided one by
    one."""
    changed: bool
    """Whether G differs from the step before (of any feature, where groups were decided one by one)."""
    sizes: tuple[int, ...] = ()
    """G of each group in the order of the features given to `choose`; empty when none were given."""
    extra: int = 0
    """Completions started above G in every group, of which the last to finish are thrown away (`OverSampling`)."""


@dataclass(frozen=True)
class Cost:
    """What sampling one step's groups cost, from the engine's report."""

    seconds: float
    slot_idle_share: float
    """Share of slot-steps in which a slot of the batch held a finished completion, in [0, 1)."""


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
    """Lambda is at its limit and the smallest size is believed to break the budget: no candidate can keep it."""
    truncated_groups: int
    """Groups whose every completion hit the token limit: their ratio is 1 and no event can fire, however long they would be."""
    censored_groups: int
    """Groups without the event in which some completion hit the token limit (`truncated_groups` among them): the event is unknown."""
    counterfactual: Mapping[int, float] = field(default_factory=dict)
    """Smaller candidate -> how often groups of that size, cut out of this step's groups, would have straggled."""

    @property
    def rate(self) -> float:
        """Share of the step's groups that straggled."""
        return self.stragglers / self.groups


class GroupController(Protocol):
    """Chooses before each step and observes after it; its state is JSON."""

    def choose(self, features: Sequence[str] = ()) -> Decision:
        """The group sizes of the next step. `features`: what is known of each prompt; empty: one size for all groups."""

    def observe(self, lengths: Sequence[Sequence[int]], truncated: Sequence[Sequence[bool]] = (), cost: Cost | None = None) -> Observation:
        """Learn from the groups sampled after the last `choose`.

        Args:
            lengths: tokens of each completion, one sequence a group.
            truncated: whether each completion was cut at the token limit; empty: none was.
            cost: what sampling them cost, where it was measured.
        """

    def state(self) -> dict[str, Any]:
        """Everything that the path from here on depends on, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`.

        Raises:
            ControlStateError: another version, or not a controller's state. The controller is then as it was.
        """
