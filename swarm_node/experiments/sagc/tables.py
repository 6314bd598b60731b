"""What the training runs of the group-size study say, over seeds: the rows of its table, and the summary in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Run = Mapping[str, Any]
"""What `sagc_training.train` returns, through JSON."""
GAIN = 0.9
"""The target accuracy stands at this share of the way from the untrained policy to the best fixed size's last accuracy."""
PAPER = (
    "The paper (arXiv 2606.02218: Llama-3.2-3B, DAPO) reports a straggler rate of 99.6 % at a fixed G of 16 and 43.4 % with SAGC, "
    "29.5 h of training down to 16.0 h, with the reward kept."
)


def problem_of(run: Run) -> tuple[str, str]:
    """The run's task and algorithm: runs are compared within these."""
    levels = "+".join(map(str, run["spec"]["levels"]))
    return f"chain-sum:{levels}", run["spec"]["algorithm"]


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """Problem -> controller -> its runs, in the order of the runs."""
    found: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        found.setdefault(problem_of(run), {}).setdefault(run["spec"]["label"], []).append(run)
    return found


def target_accuracy(controllers: Mapping[str, Sequence[Run]]) -> float:
    """See `GAIN`; of the fixed sizes the one with the best mean accuracy in the last probe counts."""
    fixed = [runs for label, runs in controllers.items() if label.startswith("fixed")]
    best = max(statistics.fmean(run["probes"][-1]["accuracy"] for run in runs) for runs in fixed)
    base = fixed[0][0]["probes"][0]["accuracy"]
    return float(base + GAIN * (best - base))


def seconds_to(probes: Sequence[Mapping[str, Any]], target: float, clock: str = "seconds") -> float | None:
    """Training seconds at which the accuracy first reaches `target`, between probes by a straight line; None when it never does."""
    for before, after in pairwise(probes):
        if after["accuracy"] >= target:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"]) if before["accuracy"] < target else 0.0
            return float(before[clock] + share * (after[clock] - before[clock]))
    return None


def kept_length(run: Run) -> float:
    """Mean length trained on over the policy's own mean length as probes measured it, over all steps: below 1 is a bias to short ones."""
    probes = run["probes"]
    ratios = []
    for step, record in enumerate(run["steps"], start=1):
        after = next(index for index, probe in enumerate(probes) if probe["step"] >= step)
        low, high = probes[after - 1], probes[after]
        share = (step - low["step"]) / (high["step"] - low["step"])
        ratios.append(record["length"] / (low["length"] + share * (high["length"] - low["length"])))
    return statistics.fmean(ratios)


def posterior_error(run: Run) -> float | None:
    """Mean distance of the believed straggler probability from the measured one, over probes after the first and over sizes; None for
    fixed sizes."""
    errors = [
        abs(run["steps"][probe["step"] - 1]["posterior"][size] - truth)
        for probe in run["probes"][1:]
        for size, truth in probe["truth"].items()
        if size in run["steps"][probe["step"] - 1]["posterior"]
    ]
    return statistics.fmean(errors) if errors and not run["spec"]["control"].get("group_size") else None


def training_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a problem and controller; means over seeds, with the standard deviation over seeds of the accuracies."""
    rows = []
    for (task, algorithm), controllers in grouped(runs).items():
        target = target_accuracy(controllers)
        for label, seeds in controllers.items():
            rows.append({"task": task, "algorithm": algorithm, "controller": label, "seeds": len(seeds), **_row(seeds, target)})
        fixed: Mapping[str, Any] = next(
            (row for row in rows if (row["task"], row["algorithm"], row["controller"]) == (task, algorithm, "fixed 16")), {}
        )
        for row in rows:
            if (row["task"], row["algorithm"]) == (task, algorithm):
                row["seconds_to_target_over_fixed_16"] = _ratio(row["seconds_to_target"], fixed.get("seconds_to_target"))
                row["seconds_over_fixed_16"] = _ratio(row["seconds"], fixed.get("seconds"))
    return rows


def _row(runs: Sequence[Run], target: float) -> dict[str, Any]:
    def step_mean(key: str) -> float:
        return round(statistics.fmean(record[key] for run in runs for record in run["steps"]), 4)

    reached = [seconds_to(run["probes"], target) for run in runs]
    reached_wall = [seconds_to(run["probes"], target, "wall") for run in runs]
    seconds = statistics.fmean(run["probes"][-1]["seconds"] for run in runs)
    gain = statistics.fmean(run["probes"][-1]["accuracy"] - run["probes"][0]["accuracy"] for run in runs)
    errors = [error for run in runs if (error := posterior_error(run)) is not None]
    return {
        "steps": len(runs[0]["steps"]),
        "straggler_rate": step_mean("rate"),
        "seconds_per_step": step_mean("seconds"),
        "wall_seconds_per_step": step_mean("wall"),
        "seconds": round(seconds, 2),
        "target_accuracy": round(target, 4),
        "reached_target": sum(found is not None for found in reached),
        "seconds_to_target": _mean(reached),
        "wall_seconds_to_target": _mean(reached_wall),
        "eval_accuracy": round(statistics.fmean(run["eval"] for run in runs), 4),
        "eval_accuracy_sd": _spread([run["eval"] for run in runs]),
        "ood_accuracy": round(statistics.fmean(run["ood"] for run in runs), 4),
        "ood_accuracy_sd": _spread([run["ood"] for run in runs]),
        "mean_length": step_mean("length"),
        "last_length": round(statistics.fmean(run["probes"][-1]["length"] for run in runs), 2),
        "kept_length": round(statistics.fmean(map(kept_length, runs)), 4),
        "mean_log2_g": step_mean("log2_g"),
        "reward_per_second": round(step_mean("reward") * len(runs[0]["steps"]) / seconds, 4),
        "accuracy_gain_per_100_seconds": round(100 * gain / seconds, 4),
        "information_per_second": round(step_mean("information") / step_mean("seconds"), 2),
        "posterior_error": round(statistics.fmean(errors), 4) if errors else None,
        "infeasible_share": step_mean("infeasible"),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """None where any seed never got there: a mean over the others would flatter."""
    found = [value for value in values if value is not None]
    return round(statistics.fmean(found), 2) if len(found) == len(values) else None


def _spread(values: Sequence[float]) -> float | None:
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None


def text(value: object, digits: int = 3) -> str:
    """A cell of a table; `-` where nothing was measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("controller", "controller", 0),
    ("straggler rate", "straggler_rate", 3),
    ("mean log2 G", "mean_log2_g", 2),
    ("s/step", "seconds_per_step", 3),
    ("wall s/step", "wall_seconds_per_step", 3),
    ("s to target", "seconds_to_target", 1),
    ("of fixed 16's", "seconds_to_target_over_fixed_16", 2),
    ("seeds there", "reached_target", 0),
    ("eval", "eval_accuracy", 3),
    ("± sd", "eval_accuracy_sd", 3),
    ("ood", "ood_accuracy", 3),
    ("length", "mean_length", 1),
    ("last length", "last_length", 1),
    ("kept length", "kept_length", 2),
    ("reward/s", "reward_per_second", 3),
    ("information/s", "information_per_second", 1),
    ("posterior error", "posterior_error", 3),
)
"""Of the training table: heading, key, digits."""
STUDY_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("problem", "problem", 0),
    ("controller", "controller", 0),
    ("rate, second half", "straggler_rate_second_half", 3),
    ("mean log2 G", "mean_log2_g", 2),
    ("optimum", "optimum_log2_g", 2),
    ("information/s", "information_per_second", 1),
    ("kept length", "kept_length", 2),
)


def _markdown(columns: Sequence[tuple[str, str, int]], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [" | ".join(head for head, _, _ in columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(text(row[key], digits) for _, key, digits in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def summary(results: Mapping[str, Any]) -> str:
    """`summary.md`."""
    parts = [f"# Group size under a straggler budget{' (quick run)' if results['quick'] else ''}", PAPER, verdicts(results), SECONDS]
    problems = dict.fromkeys((row["task"], row["algorithm"]) for row in results["training"])
    for task, algorithm in problems:
        rows = [row for row in results["training"] if (row["task"], row["algorithm"]) == (task, algorithm)]
        parts.append(f"## {task}, {algorithm.upper()}, {rows[0]['seeds']} seeds, target accuracy {rows[0]['target_accuracy']:.3f}")
        parts.append(_markdown(COLUMNS, rows))
    parts += ["## Bandit .15/.40/.75", _markdown(STUDY_COLUMNS[:5], results["bandit"]["rows"])]
    parts += ["## Drawn and recorded lengths", _markdown(STUDY_COLUMNS, results["traces"])]
    times = ", ".join(f"{name} {value:.0f}" for name, value in results["decision_us_by_controller"].items())
    parts.append(f"A decision and an update together, in µs: {times}. Machine: {results['machine']}, version {results['version']}.")
    return "\n\n".join(parts) + "\n"


SECONDS = (
    "Seconds are CPU seconds of the training process on one thread, which equal wall-clock time on an idle core; wall seconds contain what "
    "other work on the machine took. `kept length` is the mean length trained on over the policy's own: below 1, training sees too many "
    f"short answers. The target accuracy is {GAIN:.0%} of the way from the untrained policy to the best fixed size's last accuracy; `seeds "
    "there` counts the runs that reached it, and a mean time is given only where all did."
)


def verdicts(results: Mapping[str, Any]) -> str:
    """What was hoped for, and what was measured."""
    bandit = results["bandit"]
    lines = [
        f"- Bandit: straggler rate {bandit['straggler_rate_second_half']:.3f} in the second half (at most .37 hoped for), mean log2 G "
        f"{bandit['mean_log2_g']:.3f} against an optimum of {bandit['optimum_log2_g']:.2f} (within .08 hoped for).",
        f"- A decision and an update take {results['decision_us']:.0f} µs (under 100 hoped for).",
    ]
    for row in results["training"]:
        if not row["controller"].startswith("SAGC"):
            continue
        fixed = [
            other for other in results["training"]
            if (other["task"], other["algorithm"]) == (row["task"], row["algorithm"]) and other["controller"].startswith("fixed")
        ]  # fmt: skip
        best = max(fixed, key=lambda other: float(other["eval_accuracy"]))
        largest = fixed[-1]
        ratio = row["seconds_to_target_over_fixed_16"]
        time = f"{ratio:.2f} of fixed 16's time to the target" if ratio is not None else "the target not reached by every seed"
        lines.append(
            f"- {row['task']}, {row['algorithm'].upper()}, {row['controller']}: {time} (0.7 hoped for); straggler rate "
            f"{row['straggler_rate']:.3f} against {largest['straggler_rate']:.3f} at fixed 16 (half hoped for); accuracy "
            f"{row['eval_accuracy']:.3f} against {best['eval_accuracy']:.3f} of {best['controller']}, the best fixed size; "
            f"{row['seconds_over_fixed_16']:.2f} of fixed 16's seconds for the same steps."
        )
    return "\n".join(lines)
