"""Options of DistillSparse."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swarm_node.options import Options

Direction = Literal["forward", "reverse"]


class DistillOptions(Options):
    """`[distill]`: a low-rank adapter that makes sparse rollouts resemble the dense policy (DistillSparse, arXiv 2606.08446)."""

    enabled: bool = False
    """Train the adapter after each step and wear it while rolling out. It is never part of the policy that is trained or published."""
    rank: int = Field(16, ge=1, le=1024)
    """Rank of the adapter on every linear layer of the decoder blocks."""
    alpha: int = Field(16, ge=1)
    """Scale of the adapter: its product is multiplied by alpha / rank."""
    direction: Direction = "forward"
    """`forward`: KL(dense || sparse), which asks the rollout to cover whatever the policy would say; `reverse`: KL(sparse || dense)."""
    coefficient: float = Field(1.0, gt=0)
    """Factor of the divergence. AdamW does not feel the scale of a loss; the limit on the gradient's norm does."""
    learning_rate: float = Field(2e-4, gt=0)
    """Of AdamW, constant. The adapter starts at zero and bears far larger steps than the policy; too large ones cost acceptance where
    little was missing."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the adapter's gradient; longer ones are scaled down to it."""
    completions_per_step: int = Field(4, ge=1, le=1024)
    """Completions that one update of the adapter learns from, drawn among the step's own ones that were long enough to be sparse."""
