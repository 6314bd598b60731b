"""What people do without a controller, in the controller's interface.

A fixed G is `Controller` with `group_size` set. Over-sampling starts more completions than it needs and keeps the first to finish: no
step waits for its stragglers, and the policy is trained on its short answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swarm_node.control.decision import Cost, Decision, Observation
from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller


def first_to_finish(lengths: Sequence[int], keep: int) -> tuple[int, ...]:
    """Indices of the `keep` shortest completions, in their own order: those that finish first when all start together.

    Ties go to the earlier index. Raises ValueError when there are fewer than `keep`.
    """
    if len(lengths) < keep:
        raise ValueError(f"cannot keep {keep} of {len(lengths)} completions: start at least {keep}")
    return tuple(sorted(sorted(range(len(lengths)), key=lambda i: lengths[i])[:keep]))


class OverSampling:
    """A fixed G with `extra` completions started above it; observes the kept ones."""

    def __init__(self, options: SagcOptions, seed: int, extra: int) -> None:
        if options.group_size is None or extra < 1:
            raise ValueError(f"over-sampling needs a fixed group_size and extra >= 1, got {options.group_size} and {extra}")
        self.extra = extra
        self._fixed = Controller(options, seed)

    def choose(self, features: Sequence[str] = ()) -> Decision:
        decision = self._fixed.choose(features)
        return Decision(decision.size, decision.multiplier, decision.sampled, decision.changed, decision.sizes, self.extra)

    def observe(self, lengths: Sequence[Sequence[int]], truncated: Sequence[Sequence[bool]] = (), cost: Cost | None = None) -> Observation:
        return self._fixed.observe(lengths, truncated, cost)

    def state(self) -> dict[str, Any]:
        return self._fixed.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._fixed.restore(state)
