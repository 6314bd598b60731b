"""What the network process needs to know to judge groups: plain values, because it gets them over a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm_protocols.group import ProblemRef

from swarm_node.network.admission.halves import CheapAdmission
from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.tasks.assignment import EVERYBODY, is_assigned


@dataclass(frozen=True)
class AdmissionRules:
    """The cheap half of admission, as data."""

    tasks: tuple[str, ...]
    """Canonical names of the tasks that this swarm trains on."""
    task_seed: int
    """Seed of the problem stream, the same for every node of the swarm."""
    options: AdmissionOptions = field(default_factory=AdmissionOptions)
    shared_problems: bool = False
    """Whether all peers work on the same problems (horizontal collaboration) instead of each on its own."""

    def build(self, clock: Callable[[], float] = time.monotonic) -> CheapAdmission:
        """The checks themselves; `clock` gives seconds."""
        return CheapAdmission(self.options, tasks=self.tasks, assigned=self._is_assigned, clock=clock)

    def _is_assigned(self, sender: str, problem: ProblemRef, step: int) -> bool:
        owner = EVERYBODY if self.shared_problems else sender
        return problem.seed == self.task_seed and is_assigned(problem.index, owner, step, self.task_seed)
