"""From scored groups to the samples of one step: who stays, with which advantage, and in which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from swarm_protocols.group import Completion, Finish
from torch import Tensor

from swarm_node.learning.advantages import assemble, group_advantages, one_reward, overlong_penalty
from swarm_node.learning.options import LearningOptions
from swarm_node.learning.scored import ScoredGroup


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion that is learned from."""

    prompt: Tensor
    """int64 (P,)."""
    completion: Tensor
    """int64 (T,)."""
    gen: Tensor
    """Recorded log-probs, float32 (T,)."""
    temperature: float
    """The generator's; the policy's log-probs are taken at the same one."""
    advantage: float
    truncated: bool
    """Ended at the token limit."""
    own: bool

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, eq=False)
class Batch:
    """The samples of one step, group by group, and what was left out."""

    samples: tuple[Sample, ...]
    group_sizes: tuple[int, ...]
    """Samples of each group, in their order."""
    counted_groups: int
    """Groups that an average over groups divides by: those with an advantage and, except under `dapo`, those with one reward, whose
    part is zero."""
    own_groups: int
    """Groups with an advantage that this node made; parts of a horizontal group count one by one."""
    foreign_groups: int
    zero_variance_groups: int
    """Left out because all rewards are the same."""
    small_groups: int
    """Left out because fewer than two completions have a reward."""
    unscored: int
    """Completions that left their group because their reward could not be computed."""


def gather(groups: Sequence[ScoredGroup], options: LearningOptions) -> list[tuple[ScoredGroup, ...]]:
    """The sets of parts whose completions are compared with one another: single groups, or assembled ones when `horizontal`."""
    return assemble(groups) if options.collaboration == "horizontal" else [(group,) for group in groups]


def split_one_reward(groups: Sequence[ScoredGroup], options: LearningOptions) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): the groups that teach something, and those that should be replaced by others.

    Replacing is optional. The learner leaves the second kind out anyway, under every algorithm.
    """
    usable: list[ScoredGroup] = []
    useless: list[ScoredGroup] = []
    for parts in gather(groups, options):
        rewards = _rewards(_scored(parts))
        (useless if len(rewards) < 2 or one_reward(rewards) else usable).extend(parts)
    return usable, useless


def prepare(groups: Sequence[ScoredGroup], options: LearningOptions) -> Batch:
    """Choose what one step learns from.

    Completions without a reward leave their group; groups with fewer than two left, and groups with one reward throughout, are counted
    and left out. Whether rewards differ is judged before the over-long penalty, as DAPO does.
    """
    samples: list[Sample] = []
    sizes: list[int] = []
    own = foreign = zero_variance = small = unscored = 0
    for parts in gather(groups, options):
        members = _scored(parts)
        unscored += sum(len(part.rewards) for part in parts) - len(members)
        rewards = _rewards(members)
        if len(members) < 2:
            small += 1
            continue
        if one_reward(rewards):
            zero_variance += 1
            continue
        if options.overlong_start is not None and options.overlong_limit is not None:
            lengths = np.array([len(completion) for _, completion, _ in members])
            rewards = rewards + overlong_penalty(lengths, options.overlong_start, options.overlong_limit)
        advantages = group_advantages(rewards, options.advantage)
        samples.extend(_sample(part, completion, advantage) for (part, completion, _), advantage in zip(members, advantages, strict=True))
        sizes.append(len(members))
        own += sum(part.own for part in parts)
        foreign += sum(not part.own for part in parts)
    counted = len(sizes) if options.algorithm == "dapo" else len(sizes) + zero_variance
    return Batch(tuple(samples), tuple(sizes), counted, own, foreign, zero_variance, small, unscored)


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in micro-batches of at most `budget` tokens, padding included; a longer sequence is alone in its own.

    Sorted by length, longest first: little padding, and memory runs out at once where it will run out at all.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and width * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index]
    return batches


def _scored(parts: Sequence[ScoredGroup]) -> list[tuple[ScoredGroup, Completion, float]]:
    return [
        (part, completion, reward)
        for part in parts
        for completion, reward in zip(part.group.completions, part.rewards, strict=True)
        if reward is not None
    ]


def _rewards(members: Sequence[tuple[ScoredGroup, Completion, float]]) -> np.ndarray:
    return np.array([reward for _, _, reward in members], dtype=np.float64)


def _sample(part: ScoredGroup, completion: Completion, advantage: float) -> Sample:
    return Sample(
        prompt=torch.from_numpy(part.prompt.astype(np.int64)),
        completion=torch.from_numpy(completion.tokens.astype(np.int64)),
        gen=torch.from_numpy(completion.logprobs.astype(np.float32)),
        temperature=part.group.policy.temperature,
        advantage=float(advantage),
        truncated=completion.finish is Finish.LENGTH,
        own=part.own,
    )
