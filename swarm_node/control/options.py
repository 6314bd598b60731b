"""Options of the group-size controller."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm_node.options import Options


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
    eta: float = Field(0.2, gt=0, le=10)
    """Step size of the multiplier lambda: how quickly a broken budget makes large groups expensive."""
    gamma: float = Field(0.98, gt=0, le=1)
    """Discount of the straggler counts in a step; 0.98 remembers about 50 steps, 1 forgets nothing."""
    lambda_0: float = Field(0.0, ge=0)
    """Lambda at the first step."""
    lambda_max: float = Field(15.0, gt=0)
    """Upper limit of lambda. Pinned there while even the smallest group breaks the budget, the run is reported as infeasible."""
    hold: int = Field(1, ge=1)
    """Minimum number of steps between two changes of G."""
    event: Literal["group", "any"] = "group"
    """What counts against the budget in a step: the share of straggling groups, or whether `any` group straggled."""
    retreat: bool = True
    """While lambda is pinned at `lambda_max`, step towards the smallest candidate. Without it, candidates that all straggle alike
    cost alike, and the largest wins. Changes nothing below `lambda_max`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.candidates or any(low >= high for low, high in pairwise(self.candidates)):
            raise ValueError(f"control.candidates must be strictly increasing and not empty, got {list(self.candidates)}: sort them")
        if self.lambda_0 > self.lambda_max:
            raise ValueError(f"control.lambda_0 = {self.lambda_0} is above control.lambda_max = {self.lambda_max}: lower it")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that may be chosen: the candidates, or the fixed one."""
        return self.candidates if self.group_size is None else (self.group_size,)
