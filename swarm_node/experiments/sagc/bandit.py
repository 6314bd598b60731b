"""Group-size controllers on a bandit whose best answer is known: straggler events with given probabilities.

`python -m swarm_node.experiments.sagc.bandit` prints the study as JSON; `sagc_traces` does the same with lengths.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from swarm_node.control.decision import Cost
from swarm_node.control.options import SagcOptions
from swarm_node.control.sagc import Controller

INSTANCE = {4: 0.15, 8: 0.40, 16: 0.75}
"""Straggler probability of each candidate size."""
CONTROLLERS = {
    "paper": SagcOptions(),
    "paper, eta 0.1": SagcOptions(eta=0.1),
    "monotone": SagcOptions(monotone=True),
    "monotone, eta 0.1": SagcOptions(monotone=True, eta=0.1),
    "hold 5": SagcOptions(hold=5),
    "gamma 0.995": SagcOptions(gamma=0.995),
    "lambda_0 3": SagcOptions(lambda_0=3.0),
}
"""What plays the bandit; options not named have their defaults, which are the paper's controller."""
EXTENSIONS: dict[str, object] = {"counterfactual": 1.0, "monotone": True, "prompt_aware": True, "utility": "rate"}
"""Each extension, switched on."""


@dataclass(frozen=True)
class Played:
    """One run, per step, each of shape (steps,)."""

    rates: tuple[float, ...]
    """Share of the step's groups that straggled."""
    log2_sizes: tuple[float, ...]
    """Mean log2 G of the step's groups."""
    multipliers: tuple[float, ...]
    infeasible: tuple[bool, ...]
    seconds: tuple[float, ...] = ()
    """Simulated; without lengths there are none."""
    kept_lengths: tuple[float, ...] = ()
    """Mean length of the completions that are trained on, relative to the policy's expected length."""
    information: tuple[float, ...] = ()
    """Sum of G - 1 over the step's groups: inverse variance of the step's gradient, up to a factor."""


@dataclass(frozen=True)
class Row:
    """One controller on one problem, averaged over seeds."""

    problem: str
    controller: str
    straggler_rate: float
    straggler_rate_second_half: float
    mean_log2_g: float
    """Over the second half, as the optimum is of the long run."""
    mean_log2_g_all: float
    optimum_log2_g: float | None
    """The best mean log2 G at a rate of delta; None where even the smallest size breaks it."""
    gap: float | None
    """Optimum at the rate that the second half really had, minus `mean_log2_g`: what is lost to exploring, whatever the rate."""
    infeasible_share: float
    """Share of the second half's steps reported as infeasible."""
    seconds: float | None = None
    """Simulated, a step."""
    information_per_second: float | None = None
    kept_length: float | None = None
    """Mean length of the completions that are trained on, relative to the expected length: below 1 is a bias to short ones."""


def optimum_log2(probabilities: Sequence[Mapping[int, float]], rate: float) -> float | None:
    """Best mean log2 G that keeps the straggler rate, when sizes may be mixed: the linear program's value, by its dual.

    Args:
        probabilities: for each kind of prompt, all equally frequent, size -> straggler probability. One kind: one size for all prompts.
        rate: the straggler rate that must be kept on average over kinds.

    Returns:
        min over lambda >= 0 of mean_kind max_G (log2 G - lambda p_G) + lambda rate, which a corner of that piecewise linear function
        attains; None when no mixture keeps the rate.
    """
    if statistics.fmean(min(kind.values()) for kind in probabilities) > rate:
        return None
    corners = {0.0}
    for kind in probabilities:
        for low, p_low in kind.items():
            corners.update(
                (math.log2(high) - math.log2(low)) / (p_high - p_low) for high, p_high in kind.items() if high > low and p_high > p_low
            )
    return min(
        rate * price + statistics.fmean(max(math.log2(size) - price * p for size, p in kind.items()) for kind in probabilities)
        for price in corners
    )


def play_events(controller: Controller, probabilities: Mapping[int, float], steps: int, groups: int, seed: int) -> Played:
    """Run against Bernoulli straggler events, `groups` a step."""
    noise = random.Random(seed)
    rates, sizes, multipliers, infeasible = [], [], [], []
    for _ in range(steps):
        size = controller.choose().size
        observed = controller.observe_events([noise.random() < probabilities[size] for _ in range(groups)])
        rates.append(observed.rate)
        sizes.append(math.log2(size))
        multipliers.append(observed.multiplier)
        infeasible.append(observed.infeasible)
    return Played(tuple(rates), tuple(sizes), tuple(multipliers), tuple(infeasible))


def summarise(problem: str, name: str, runs: Sequence[Played], truth: Sequence[Mapping[int, float]], delta: float) -> Row:
    """Average runs of one controller on one problem; `truth` as in `optimum_log2`."""
    half = len(runs[0].rates) // 2

    def late(field: str) -> float:
        return statistics.fmean(statistics.fmean(getattr(run, field)[half:]) for run in runs)

    rate, log2 = late("rates"), late("log2_sizes")
    reached = optimum_log2(truth, rate)
    timed = bool(runs[0].seconds)
    return Row(
        problem,
        name,
        statistics.fmean(statistics.fmean(run.rates) for run in runs),
        rate,
        log2,
        statistics.fmean(statistics.fmean(run.log2_sizes) for run in runs),
        optimum_log2(truth, delta),
        None if reached is None else reached - log2,
        late("infeasible"),
        late("seconds") if timed else None,
        late("information") / late("seconds") if timed else None,
        late("kept_lengths") if timed else None,
    )


def bandit_study(
    controllers: Mapping[str, SagcOptions] = CONTROLLERS, *, steps: int = 500, seeds: int = 20, groups: int = 4
) -> tuple[Row, ...]:
    """Every controller on `INSTANCE`, with `groups` groups a step."""
    rows = []
    for name, options in controllers.items():
        runs = [play_events(Controller(options, seed), INSTANCE, steps, groups, 10_000 + seed) for seed in range(seeds)]
        rows.append(summarise("events .15/.40/.75", name, runs, [INSTANCE], options.delta))
    return tuple(rows)


def feasible_instance(noise: random.Random, delta: float) -> dict[int, float]:
    """A random bandit whose smallest size keeps the budget: 2 to 5 sizes, each twice the one before, probabilities rising."""
    while True:
        probabilities = sorted(noise.random() for _ in range(noise.randint(2, 5)))
        if probabilities[0] <= delta:
            return {2 ** (index + 1): probability for index, probability in enumerate(probabilities)}


def budget_breaches(
    table: Mapping[str, object], *, windows: Sequence[int] = (500, 1000, 1500, 2500), instances: int = 200, groups: int = 4
) -> dict[int, float]:
    """Window -> share of random feasible instances whose straggler rate over that many steps after the first 500 exceeds delta + 0.03."""
    noise = random.Random(1)
    breaches = dict.fromkeys(windows, 0)
    for seed in range(instances):
        truth = feasible_instance(noise, SagcOptions().delta)
        options = SagcOptions.model_validate({"candidates": tuple(truth), **table})
        rates = play_events(Controller(options, seed), truth, 500 + max(windows), groups, 10_000 + seed).rates
        for window in windows:
            breaches[window] += statistics.fmean(rates[500 : 500 + window]) > options.delta + 0.03
    return {window: count / instances for window, count in breaches.items()}


def decision_us(options: SagcOptions, groups: int = 4, rounds: int = 2000) -> float:
    """Microseconds of one `choose` and one `observe` together: the median of `rounds`, at the largest size (the costliest to observe)."""
    options = options.model_copy(update={"delta": 0.99})  # nothing breaks such a budget: G climbs to the largest and stays
    controller, noise = Controller(options, 0), random.Random(0)
    lengths = [[noise.randint(50, 150) for _ in range(options.sizes[-1])] for _ in range(groups)]
    features = [f"task|{group}|7" for group in range(groups)]
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        sizes = controller.choose(features).sizes
        chosen = time.perf_counter()
        sampled = [lengths[group][:size] for group, size in enumerate(sizes)]
        handed = time.perf_counter()
        controller.observe(sampled, cost=Cost(1.0, 0.2))
        taken.append(time.perf_counter() - handed + chosen - began)
    return statistics.median(taken) * 1e6


def decision_times() -> dict[str, float]:
    """Microseconds of a decision and an update together, by controller."""
    tables = {"paper": {}, **{name: {name: value} for name, value in EXTENSIONS.items()}, "all extensions": EXTENSIONS}
    return {name: decision_us(SagcOptions.model_validate(table)) for name, table in tables.items()}


if __name__ == "__main__":
    found = {
        "bandit": [asdict(row) for row in bandit_study()],
        "bandit, one group a step": [asdict(row) for row in bandit_study(groups=1)],
        "bandit, 200 seeds": [asdict(row) for row in bandit_study(seeds=200)],
        "breaches": {f"{table}": budget_breaches(table) for table in ({}, {"eta": 0.1}, {"eta": 0.5}, {"retreat": False})},
        "decision_us": decision_times(),
    }
    print(json.dumps(found, indent=1))
