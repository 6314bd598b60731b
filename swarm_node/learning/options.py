"""Options of learning: the loss, the optimiser, the pool that feeds them, and DistillSparse."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from swarm_node.options import Options, constant

Algorithm = Literal["grpo", "dr-grpo", "dapo"]
OffPolicy = Literal["f-tis", "tis", "f-vis", "vis", "f-nois", "nois"]
Estimator = Literal["k1", "k2", "k3"]


class LearningOptions(Options):
    """`[learning]`: how the policy learns from groups, its own and those of peers."""

    algorithm: Algorithm = "grpo"
    """How tokens are averaged. `grpo`: over each completion, then over the group, then over groups (arXiv 2402.03300, eq. 3); `dr-grpo`: as
    `grpo`, but every completion's sum is divided by one constant (arXiv 2503.20783); `dapo`: over all tokens of the step, one-reward groups
    dropped (arXiv 2503.14476, eq. 8 and 11)."""
    off_policy: OffPolicy = "f-tis"
    """Correction for samples of another policy: `tis` truncated importance weights, `vis` the untruncated ratio inside PPO's clip,
    `nois` none; `f-` puts the filter before it (arXiv 2605.22537)."""
    advantage: Literal["center", "standardize"] = "center"
    """`center`: reward minus the group's mean (Dr. GRPO); `standardize`: also divided by the group's standard deviation + 1e-4 (GRPO)."""
    filter: Literal["both", "either", "none"] = "both"
    """Which completions an `f-` correction drops: `both` those without positive advantage that are also too far from the policy (the
    authors' code), `either` those with one of the two faults, `none` nothing."""
    normalizer: Literal["all", "kept"] = "all"
    """What the averages divide by: `all` completions, so that a dropped one counts as zero, or only those `kept`."""
    kl_estimator: Estimator = "k3"
    """Per-token estimate of KL(generator || policy) from x = log generator - log policy: k1 = x, k2 = x^2 / 2, k3 = exp(x) - x - 1."""
    kl_reduction: Literal["mean", "sum"] = "mean"
    """How a completion's per-token estimates become its distance."""
    kl_threshold: float = Field(50.0, ge=0)
    """A completion is too far when its distance exceeds this many nats, in the unit that estimator and reduction make; `inf` is allowed."""
    truncation: float = Field(2.0, gt=0)
    """C: importance weights are cut at this value; `inf` gives plain importance sampling."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """PPO's clip below: the ratio counts down to 1 - this."""
    clip_high: float | None = Field(None, ge=0)
    """PPO's clip above: the ratio counts up to 1 + this. Unset: 0.28 for `dapo`, else 0.2."""
    constant_length: int = constant(192, ge=1)
    """The constant that `dr-grpo` divides a completion's sum by, in tokens: the token limit of a rollout."""
    mask_truncated: bool = False
    """Completions that ended at the token limit give no gradient; they still count in their group's mean (DAPO's overlong filtering)."""
    overlong_start: int | None = Field(None, ge=0)
    """`dapo` only: length in tokens from which the reward falls linearly (DAPO, eq. 13). Unset: no penalty."""
    overlong_limit: int | None = Field(None, ge=1)
    """`dapo` only: length in tokens at which the penalty reaches its full 1."""
    collaboration: Literal["vertical", "horizontal"] = "vertical"
    """`vertical`: each group is one node's; `horizontal`: groups of one problem from several nodes are one group, with one mean. The
    paper measured horizontal as worse."""
    learning_rate: float | None = Field(None, gt=0)
    """Unset: 1e-6 when all weights are trained, 1e-5 for LoRA; a hundred times that for models below 10 M parameters."""
    warmup_steps: int = Field(5, ge=0)
    """Optimiser steps over which the learning rate rises linearly; constant afterwards."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled decay (arXiv 1711.05101), on matrices only: norms and biases never decay."""
    beta1: float = constant(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = constant(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the whole gradient; longer ones are scaled down to it."""
    inner_steps: int = Field(1, ge=1, le=64)
    """Optimiser steps on one batch."""
    tokens_per_micro_batch: int = Field(2048, ge=1)
    """Prompt, completion and padding tokens in one forward and backward; gradients accumulate over micro-batches. Halved when memory
    runs out."""
    autocast: Literal["auto", "on", "off"] = "auto"
    """bfloat16 autocast of the forward; `auto`: on CUDA devices that have bfloat16, else off (on a CPU it was measured slower)."""

    @property
    def ratio_cap(self) -> float:
        """Upper clip bound minus one: `clip_high`, or the algorithm's own."""
        if self.clip_high is not None:
            return self.clip_high
        return 0.28 if self.algorithm == "dapo" else 0.2

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.algorithm == "dr-grpo" and self.advantage == "standardize":
            raise ValueError("algorithm 'dr-grpo' never divides by the standard deviation: set advantage = 'center', or algorithm = 'grpo'")
        if (self.overlong_start is None) != (self.overlong_limit is None):
            raise ValueError("overlong_start and overlong_limit belong together: set both, or neither")
        if self.overlong_start is not None and self.overlong_limit is not None:
            if self.algorithm != "dapo":
                raise ValueError(
                    f"the over-long penalty is part of 'dapo' and algorithm is {self.algorithm!r}: unset overlong_start and overlong_limit"
                )
            if self.overlong_start >= self.overlong_limit:
                raise ValueError(f"overlong_start {self.overlong_start} must be below overlong_limit {self.overlong_limit}")
        return self


class PoolOptions(Options):
    """`[pool]`: which groups wait to be learned from, and how many of them may be foreign."""

    max_groups: int = constant(256, ge=1)
    """Groups held at most; beyond it the oldest group of the peer that holds most tokens goes first."""
    max_tokens: int = constant(1_000_000, ge=1)
    """Completion tokens held at most, by the same rule."""
    max_age_steps: int = Field(4, ge=0)
    """A group leaves unused when it has waited more than this many of the node's own steps."""
    foreign_share: float = Field(0.5, ge=0, le=1)
    """Largest fraction of a step's groups that may be foreign: a stronger partner can make a policy worse (arXiv 2605.22537). 1 lifts
    the limit."""
    foreign_per_step: int = Field(16, ge=0)
    """Foreign groups in one step at most."""
    foreign_tokens_per_step: int = Field(65_536, ge=0)
    """Completion tokens of foreign groups in one step at most: groups of very long answers must not keep a node busy for minutes."""
    peer_share: float = Field(0.5, gt=0, le=1)
    """Largest fraction of a step's foreign groups that one peer may fill, but always one group."""


Direction = Literal["forward", "reverse"]


class DistillOptions(Options):
    """`[distill]`: a low-rank adapter that makes sparse rollouts resemble the dense policy (DistillSparse, arXiv 2606.08446)."""

    enabled: bool = False
    """Train the adapter after each step and wear it while rolling out. It is never part of the policy that is trained or published."""
    rank: int = Field(16, ge=1, le=1024)
    """Rank of the adapter on every linear layer of the decoder blocks."""
    alpha: int = constant(16, ge=1)
    """Scale of the adapter: its product is multiplied by alpha / rank."""
    direction: Direction = "forward"
    """`forward`: KL(dense || sparse), which asks the rollout to cover whatever the policy would say; `reverse`: KL(sparse || dense)."""
    coefficient: float = constant(1.0, gt=0)
    """Factor of the divergence. AdamW does not feel the scale of a loss; the limit on the gradient's norm does."""
    learning_rate: float = Field(2e-4, gt=0)
    """Of AdamW, constant. The adapter starts at zero and bears far larger steps than the policy; too large ones cost acceptance where
    little was missing."""
    grad_clip: float = constant(1.0, gt=0)
    """Largest norm of the adapter's gradient; longer ones are scaled down to it."""
    completions_per_step: int = constant(4, ge=1, le=1024)
    """Completions that one update of the adapter learns from, drawn among the step's own ones that were long enough to be sparse."""
