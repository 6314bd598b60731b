"""What one step of learning did."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_node.learning.statistics import LossMetrics


@dataclass(frozen=True)
class StepReport:
    """What one call of `Trainer.step` did."""

    step: int
    """Optimiser steps that the policy has taken, over its whole life."""
    stepped: bool = False
    skipped: str = ""
    """Why no optimiser step was taken, in words; empty when one was."""
    loss: float = float("nan")
    grad_norm: float = float("nan")
    """Norm of the whole gradient before clipping."""
    learning_rate: float = float("nan")
    own_groups: int = 0
    """Own groups that had an advantage to learn from."""
    foreign_groups: int = 0
    zero_variance_groups: int = 0
    """Groups left out because all their rewards are the same."""
    small_groups: int = 0
    """Groups left out because fewer than two completions have a reward."""
    unscored_completions: int = 0
    """Completions that left their group because their reward could not be computed."""
    metrics: LossMetrics = field(default_factory=LossMetrics)
    """Over all completions, of the last inner step."""
    foreign_metrics: LossMetrics = field(default_factory=LossMetrics)
    """Over the completions of peers alone."""
    micro_batches: int = 0
    memory_retries: int = 0
    """How often the step was redone, in smaller micro-batches or without a foreign group, because memory ran out."""
    dropped_for_memory: int = 0
    """Groups that were left out because memory did not suffice for one foreign completion of theirs."""
    tokens: int = 0
    """Completion tokens that were learned from, once for each inner step."""
    seconds: float = 0.0

    @property
    def zero_variance_share(self) -> float:
        """Share of comparable groups without any difference in reward; NaN where there was no group."""
        groups = self.own_groups + self.foreign_groups + self.zero_variance_groups
        return self.zero_variance_groups / groups if groups else float("nan")

    @property
    def foreign_share(self) -> float:
        """Foreign share of the groups learned from; NaN where there was none."""
        used = self.own_groups + self.foreign_groups
        return self.foreign_groups / used if used else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Of the whole step; 0 where no time was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0
