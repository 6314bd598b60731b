"""Group-size controllers and their baselines on drawn completion lengths, with a simulated engine that prices a step in seconds.

`python -m swarm_node.experiments.sagc.traces` prints the study as JSON.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from swarm_node.control.decision import Cost, GroupController
from swarm_node.control.events import straggles
from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller
from swarm_node.experiments.sagc.bandit import Played, Row, summarise
from swarm_node.experiments.sagc.lengths import LEVELS, TRACES, Trace, straggler_probabilities
from swarm_node.experiments.sagc.over_sampling import OverSampling, first_to_finish
from swarm_node.experiments.sagc.recorded import recorded_trace

SECONDS_A_STEP, SECONDS_A_SLOT = 4e-3, 1e-4
"""The simulated engine: seconds of a decode step, and of each slot in it; finished slots are freed."""

Maker = Callable[[int], GroupController]
"""Seed -> controller."""


def _sagc(**table: object) -> Maker:
    options = SagcOptions.model_validate(table)
    return lambda seed: Controller(options, seed)


CONTROLLERS: Mapping[str, Maker] = {
    "fixed 4": _sagc(group_size=4),
    "fixed 8": _sagc(group_size=8),
    "fixed 16": _sagc(group_size=16),
    "over-sampling 8 of 12": lambda seed: OverSampling(SagcOptions(group_size=8), seed, extra=4),
    "over-sampling 16 of 24": lambda seed: OverSampling(SagcOptions(group_size=16), seed, extra=8),
    "paper": _sagc(),
    "counterfactual 0.5": _sagc(counterfactual=0.5),
    "counterfactual 1": _sagc(counterfactual=1.0),
    "monotone": _sagc(monotone=True),
    "counterfactual 1, monotone": _sagc(counterfactual=1.0, monotone=True),
    "utility rate": _sagc(utility="rate"),
}
LEVEL_CONTROLLERS: Mapping[str, Maker] = {
    "fixed 8": CONTROLLERS["fixed 8"],
    "fixed 16": CONTROLLERS["fixed 16"],
    "paper": CONTROLLERS["paper"],
    "prompt_aware": _sagc(prompt_aware=True),
    "prompt_aware, counterfactual 1": _sagc(prompt_aware=True, counterfactual=1.0),
    "prompt_aware, counterfactual 1, monotone": _sagc(prompt_aware=True, counterfactual=1.0, monotone=True),
    "prompt_aware, utility rate": _sagc(prompt_aware=True, utility="rate"),
}


def play_lengths(controller: GroupController, levels: Sequence[Trace], ratio: float, steps: int, groups: int, seed: int) -> Played:
    """Run against drawn lengths: each group belongs to one of `levels`, in turn, and the controller is told which.

    A step's simulated seconds count decode steps until the last kept completion ends, and slots until they are freed. The rate is
    that of the groups as trained on: over-sampling has thrown its stragglers away.
    """
    noise = np.random.default_rng(seed)
    columns: list[tuple[float, float, float, bool, float, float, float]] = []
    for step in range(steps):
        chosen = [levels[(step * groups + group) % len(levels)] for group in range(groups)]
        decision = controller.choose([level.name for level in chosen])
        kept: list[list[int]] = []
        tokens = 0
        for level, size in zip(chosen, decision.sizes, strict=True):
            drawn = level.sample(noise, step, 1, size + decision.extra)[0].tolist()
            kept.append([drawn[index] for index in first_to_finish(drawn, size)])
            tokens += sum(min(length, max(kept[-1])) for length in drawn)
        seconds = SECONDS_A_STEP * max(map(max, kept)) + SECONDS_A_SLOT * tokens
        observed = controller.observe(kept, cost=Cost(seconds, 0.0))
        columns.append(
            (
                sum(straggles(group, ratio) for group in kept) / groups,
                statistics.fmean(math.log2(size) for size in decision.sizes),
                observed.multiplier,
                observed.infeasible,
                seconds,
                statistics.fmean(statistics.fmean(group) / level.mean_length(step) for group, level in zip(kept, chosen, strict=True)),
                float(sum(size - 1 for size in decision.sizes)),
            )
        )
    rates, sizes, multipliers, infeasible, times, lengths, information = zip(*columns, strict=True)
    return Played(rates, sizes, multipliers, infeasible, times, lengths, information)


def study(
    problem: str,
    levels: Sequence[Trace],
    makers: Mapping[str, Maker],
    *,
    steps: int = 600,
    seeds: int = 6,
    groups: int = 4,
) -> tuple[Row, ...]:
    """Every controller on one problem; budget, ratio and candidates are the defaults'."""
    options = SagcOptions()
    truth = [straggler_probabilities(level, options.candidates, options.straggler_ratio) for level in levels]
    return tuple(
        summarise(
            problem,
            name,
            [play_lengths(make(seed), levels, options.straggler_ratio, steps, groups, 10_000 + seed) for seed in range(seeds)],
            truth,
            options.delta,
        )
        for name, make in makers.items()
    )


def trace_study(steps: int = 600, seeds: int = 6) -> tuple[Row, ...]:
    """Every trace, the lengths that our own training recorded, and the mix of levels."""
    rows = [row for trace in (*TRACES, recorded_trace()) for row in study(trace.name, [trace], CONTROLLERS, steps=steps, seeds=seeds)]
    return (*rows, *study("levels", LEVELS, LEVEL_CONTROLLERS, steps=steps, seeds=seeds))


if __name__ == "__main__":
    print(json.dumps([asdict(row) for row in trace_study()], indent=1))
