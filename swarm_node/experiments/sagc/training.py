"""One training run of the group-size study: a node that trains alone under one controller, measured step by step.

`python -m swarm_node.experiments.sagc.training OUT SPEC` does one run in a process of its own, on one thread (`workers`).

Seconds are the process's own CPU seconds (`time.process_time`): on one thread they equal wall-clock time on an idle core, and other work
on the machine does not lengthen them. Wall-clock seconds are recorded beside them. Only the node's steps are timed; what is measured
between them (probes) is not.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarm_node.config import Config
from swarm_node.control.counterfactual import subset_straggler_probabilities
from swarm_node.control.decision import Cost, Decision, Observation
from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller
from swarm_node.experiments.sagc.mixed_levels import MixedLevels
from swarm_node.experiments.sagc.over_sampling import OverSamplingEngine
from swarm_node.network.gossip import Nobody
from swarm_node.node import Node
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.reference import ReferenceEngine
from swarm_node.tasks.base import Split, Task
from swarm_node.tasks.chain_sum import ChainSum

SIZES = (4, 8, 16)
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class TrainingSpec:
    """Everything that a run depends on."""

    label: str
    """The controller's name in tables."""
    algorithm: str
    seed: int
    control: Mapping[str, Any] = field(default_factory=dict)
    """The node's `[control]` table."""
    extra: int = 0
    """Completions started above G, of which the last to finish are thrown away."""
    levels: tuple[int, ...] = (1,)
    """Levels of `chain-sum`; several are mixed."""
    steps: int = 80
    prompts: int = 4
    """Groups a step."""
    learning_rate: float = 1e-4
    probe_every: int = 10
    probe_problems: int = 24
    probe_samples: int = 16
    final_problems: int = 64
    model: str = "tiny-m"
    weights: str = ""
    """Digest of the model's weights, so that a result of other weights is not taken for this one."""

    def task(self) -> Task:
        """`chain-sum` of the one level, or of several mixed."""
        return ChainSum(self.levels[0]) if len(self.levels) == 1 else MixedLevels(self.levels)


class WatchedController(Controller):
    """A controller that remembers its last decision, observation and lengths."""

    decision: Decision
    observation: Observation
    lengths: Sequence[Sequence[int]]

    def choose(self, features: Sequence[str] = ()) -> Decision:
        """See `Controller.choose`; kept in `decision`."""
        self.decision = super().choose(features)
        return self.decision

    def observe(self, lengths: Sequence[Sequence[int]], truncated: Sequence[Sequence[bool]] = (), cost: Cost | None = None) -> Observation:
        """See `Controller.observe`; kept in `lengths` and `observation`."""
        self.lengths = lengths
        self.observation = super().observe(lengths, truncated, cost)
        return self.observation


@dataclass(frozen=True)
class Probe:
    """What the policy does when nobody waits for it: plain samples on held-out problems, outside the timed steps."""

    step: int
    seconds: float
    """CPU seconds trained before it."""
    wall: float
    accuracy: float
    length: float
    """Mean tokens of a completion."""
    truth: dict[int, float]
    """Size -> probability that a group of it straggles, exact over the subsets of every problem's samples."""


@dataclass(frozen=True)
class StepRecord:
    """One timed step."""

    log2_g: float
    """Mean over the step's groups."""
    rate: float
    """Share of the step's groups that straggled, as trained on."""
    multiplier: float
    infeasible: bool
    seconds: float
    wall: float
    reward: float
    length: float
    """Mean tokens of the completions trained on."""
    information: float
    """Sum of G - 1 over the step's groups."""
    posterior: dict[int, float]
    """Size -> believed straggler probability."""


def train(spec: TrainingSpec) -> dict[str, Any]:
    """Do the run; deterministic from the spec but for seconds (with `utility = "rate"` these decide too).

    Returns:
        JSON: the spec, the steps, the probes, and the final accuracy on both splits.
    """
    policy = load_policy(ModelOptions(name=spec.model, device="cpu"))
    node = _node(spec, policy)
    controller = WatchedController(node.config.control, spec.seed)
    node.controller = controller
    if spec.extra:
        node.engine = OverSamplingEngine(policy, node.config.rollout, spec.extra)
    steps: list[StepRecord] = []
    seconds = wall = 0.0
    probes = [_probe(spec, policy, 0, seconds, wall)]
    for step in range(1, spec.steps + 1):
        cpu_began, wall_began = time.process_time(), time.perf_counter()
        row = node.step()
        took, waited = time.process_time() - cpu_began, time.perf_counter() - wall_began
        seconds, wall = seconds + took, wall + waited
        observed, sizes = controller.observation, controller.decision.sizes
        steps.append(
            StepRecord(
                log2_g=statistics.fmean(math.log2(size) for size in sizes),
                rate=observed.rate,
                multiplier=observed.multiplier,
                infeasible=observed.infeasible,
                seconds=took,
                wall=waited,
                reward=row.reward_mean,
                length=row.length_mean,
                information=float(sum(size - 1 for size in sizes)),
                posterior=controller.posterior,
            )
        )
        if step % spec.probe_every == 0 or step == spec.steps:
            probes.append(_probe(spec, policy, step, seconds, wall))
    return {
        "spec": asdict(spec),
        "steps": [asdict(record) for record in steps],
        "probes": [asdict(probe) for probe in probes],
        "eval": _accuracy(spec, policy, "eval"),
        "ood": _accuracy(spec, policy, "ood"),
    }


def record(spec: TrainingSpec, problems: int, samples: int) -> dict[int, list[list[int]]]:
    """Lengths by step, every `probe_every` steps of the run: what `recorded_lengths` writes down."""
    policy = load_policy(ModelOptions(name=spec.model, device="cpu"))
    node = _node(spec, policy)
    found = {0: sample_lengths(spec, policy, problems, samples)[0]}
    for step in range(1, spec.steps + 1):
        node.step()
        if step % spec.probe_every == 0:
            found[step] = sample_lengths(spec, policy, problems, samples)[0]
    return found


def _node(spec: TrainingSpec, policy: Policy) -> Node:
    config = Config.model_validate(
        {
            "task": {"seed": spec.seed},
            "rollout": {"prompts_per_step": spec.prompts, "max_new_tokens": MAX_NEW_TOKENS, "max_batch": 256},
            "control": {"candidates": SIZES, **spec.control},
            "learning": {"algorithm": spec.algorithm, "learning_rate": spec.learning_rate},
            "run": {"seed": spec.seed},
        }
    )
    return Node(config, policy=policy, task=spec.task(), peer_id="alone", gossip=Nobody(), sequence=0)


def sample_lengths(spec: TrainingSpec, policy: Policy, problems: int, samples: int, split: Split = "eval") -> tuple[list[list[int]], float]:
    """Lengths in tokens, (problems, samples), of plain samples on problems 0.. of the split, and their accuracy."""
    task = spec.task()
    drawn = [task.problem(0, index, split) for index in range(problems)]
    requests = [GroupRequest(policy.encode_prompt(problem.prompt), samples, problem.index) for problem in drawn]
    engine = ReferenceEngine(policy, Config.model_validate({"rollout": {"max_batch": 256}}).rollout)
    groups = engine.generate(requests, seed=0, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS).groups
    right = [
        task.reward(problem, policy.decode(completion.tokens)).correct
        for problem, group in zip(drawn, groups, strict=True)
        for completion in group
    ]
    return [[len(completion) for completion in group] for group in groups], statistics.fmean(right)


def _probe(spec: TrainingSpec, policy: Policy, step: int, seconds: float, wall: float) -> Probe:
    lengths, accuracy = sample_lengths(spec, policy, spec.probe_problems, spec.probe_samples)
    sizes = tuple(size for size in SIZES if size <= spec.probe_samples)
    truth = subset_straggler_probabilities(lengths, sizes, SagcOptions().straggler_ratio).mean(axis=0)
    return Probe(
        step,
        seconds,
        wall,
        accuracy,
        statistics.fmean(length for group in lengths for length in group),
        dict(zip(sizes, truth.tolist(), strict=True)),
    )


def _accuracy(spec: TrainingSpec, policy: Policy, split: Split) -> float:
    """Sampled accuracy at temperature 1, four samples a problem."""
    return sample_lengths(spec, policy, spec.final_problems, 4, split)[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    result = train(TrainingSpec(**{**given, "levels": tuple(given["levels"])}))
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(result))
    temporary.replace(out)
