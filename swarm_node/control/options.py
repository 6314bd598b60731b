"""Options of the group-size controller."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm_node.options import Options, constant


class SagcOptions(Options):
    """`[control]`: how many completions each group gets (SAGC, arXiv 2606.02218; its constants are not public)."""

    group_size: Annotated[int, Field(ge=2, le=1024)] | None = None
    """A fixed G, at least 2 (a group of one has no advantage); it switches the controller off."""
    candidates: tuple[Annotated[int, Field(ge=2, le=1024)], ...] = (4, 8, 16)
    """Group sizes to choose from, strictly increasing, each at least 2. The first step starts from the smallest."""
    straggler_ratio: float = Field(2.0, gt=1)
    """Tau: a group straggles when its longest completion exceeds tau times its median length."""
    delta: float = Field(0.35, gt=0, lt=1)
    """Straggler budget: the long-run share of straggling groups that is accepted."""
    eta: float = constant(0.2, gt=0, le=10)
    """Step size of the multiplier lambda: how quickly a broken budget makes large groups expensive."""
    gamma: float = constant(0.98, gt=0, le=1)
    """Discount of the straggler counts in a step; 0.98 remembers about 50 steps, 1 forgets nothing."""
    lambda_0: float = constant(0.0, ge=0)
    """Lambda at the first step."""
    lambda_max: float = constant(15.0, gt=0)
    """Upper limit of lambda. Pinned there while even the smallest group breaks the budget, the run is reported as infeasible."""
    hold: int = constant(1, ge=1)
    """Minimum number of steps between two changes of G."""
    event: Literal["group", "any"] = "group"
    """What counts against the budget in a step: the share of straggling groups, or whether `any` group straggled."""
    retreat: bool = True
    """Once lambda reaches `lambda_max`, step towards the smallest candidate until it is below 90 % of it. Without this, candidates that
    straggle alike cost alike and the largest wins, however far the budget is broken. Changes nothing below `lambda_max`."""
    counterfactual: float = Field(0.0, ge=0, le=1)
    """Weight at which a group also counts for every smaller candidate, by the share of its subsets of that size that would have
    straggled; 0 switches it off."""
    monotone: bool = False
    """Believe that the straggler probability cannot fall as G grows: pool posterior means that say otherwise."""
    prompt_aware: bool = False
    """Choose G for each group by what is known of its prompt (task, level, length), all under the one budget; needs `event = "group"`."""
    utility: Literal["log2", "rate"] = "log2"
    """What a size is worth before its stragglers are charged: `log2` G, or the logarithm of variance reduction per second, by step times
    learned from the engine's reports."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.candidates or any(low >= high for low, high in pairwise(self.candidates)):
            raise ValueError(f"control.candidates must be strictly increasing and not empty, got {list(self.candidates)}: sort them")
        if self.lambda_0 > self.lambda_max:
            raise ValueError(f"control.lambda_0 = {self.lambda_0} is above control.lambda_max = {self.lambda_max}: lower it")
        if self.prompt_aware and self.event == "any":
            raise ValueError('control.prompt_aware charges each group by itself: set control.event = "group"')
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that may be chosen: the candidates, or the fixed one."""
        return self.candidates if self.group_size is None else (self.group_size,)
