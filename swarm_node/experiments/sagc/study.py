"""The group-size study, composed: a bandit and drawn lengths whose truth is known, then real training (`swarm-node reproduce sagc`)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from swarm_node import __version__
from swarm_node.experiments.sagc.bandit import Row, bandit_study, budget_breaches, decision_times
from swarm_node.experiments.sagc.report import render
from swarm_node.experiments.sagc.tables import summary, training_rows
from swarm_node.experiments.sagc.traces import trace_study
from swarm_node.experiments.sagc.training import TrainingSpec
from swarm_node.experiments.workers import Job, run_jobs
from swarm_node.observe.page import write_page

SHIPPED = Path(str(files("swarm_node.policy"))) / "tiny"
ALL_EXTENSIONS: Mapping[str, Any] = {"counterfactual": 1.0, "monotone": True, "prompt_aware": True, "utility": "rate"}
CONTROLLERS: Mapping[str, Mapping[str, Any]] = {
    "fixed 4": {"control": {"group_size": 4}},
    "fixed 8": {"control": {"group_size": 8}},
    "fixed 16": {"control": {"group_size": 16}},
    "over-sampling 8 of 12": {"control": {"group_size": 8}, "extra": 4},
    "SAGC": {"control": {}},
    "SAGC prompt_aware": {"control": {"prompt_aware": True}},
    "SAGC all extensions": {"control": ALL_EXTENSIONS},
}
ON_MIXED_LEVELS = ("fixed 8", "fixed 16", "SAGC", "SAGC prompt_aware", "SAGC all extensions")
MIXED_LEVELS = (1, 3)
"""Short and long answers, half of the prompts each."""
QUICK = ("fixed 8", "fixed 16", "over-sampling 8 of 12", "SAGC", "SAGC all extensions")


def training_specs(*, quick: bool) -> list[TrainingSpec]:
    """The runs, those that a comparison needs first nearest to each other."""
    if quick:
        short: dict[str, Any] = {"steps": 12, "probe_every": 6, "probe_problems": 8, "final_problems": 16}
        return [TrainingSpec(label, "grpo", 0, **CONTROLLERS[label], **short) for label in QUICK]
    runs = []
    for seed in range(3):
        for algorithm in ("grpo", "dapo"):
            runs += [TrainingSpec(label, algorithm, seed, **table) for label, table in CONTROLLERS.items()]
        runs += [TrainingSpec(label, "grpo", seed, levels=MIXED_LEVELS, **CONTROLLERS[label]) for label in ON_MIXED_LEVELS]
    return runs


def job_of(spec: TrainingSpec) -> Job:
    """The run as a process: a file name that tells runs apart, and a spec with the digest of the weights it starts from."""
    levels = "-".join(map(str, spec.levels))
    name = f"{spec.algorithm}-levels-{levels}-{spec.label}-seed-{spec.seed}-steps-{spec.steps}".replace(" ", "-")
    return Job(name, "swarm_node.experiments.sagc.training", asdict(replace(spec, weights=_digest(spec.model))))


def _digest(model: str) -> str:
    """16 hex digits over the weights of a model that ships with the package."""
    return hashlib.blake2b((SHIPPED / model / "model.safetensors").read_bytes(), digest_size=8).hexdigest()


def reproduce(out: Path, *, quick: bool, workers: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Do the whole study and write `report.html`, `results.json` and `summary.md` to `out`; finished training runs stay in `out/runs`.

    Raises:
        ExperimentError: a training run failed.
        ReportError: `out` cannot be written.
    """
    say("bandit and cost of a decision")
    results: dict[str, Any] = {"experiment": "sagc", "quick": quick, "version": __version__, "machine": _machine()} | _studies(quick, say)
    runs = run_jobs([job_of(spec) for spec in training_specs(quick=quick)], out / "runs", workers, say)
    results["training"] = training_rows(runs)
    results["runs"] = [_rounded(run) for run in runs]
    write_page(json.dumps(results, indent=None, separators=(",", ":")) + "\n", out / "results.json")
    write_page(summary(results), out / "summary.md")
    write_page(render(results), out / "report.html")
    return results


def _studies(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    times = decision_times()
    rows = bandit_study(seeds=20)
    paper = next(row for row in rows if row.controller == "paper")
    bandit: dict[str, Any] = {
        "straggler_rate_second_half": paper.straggler_rate_second_half,
        "mean_log2_g": paper.mean_log2_g,
        "optimum_log2_g": paper.optimum_log2_g,
        "rows": [_as_json(row) for row in rows],
    }
    if not quick:
        say("the budget on random instances")
        bandit["breaches"] = {name: budget_breaches(table) for name, table in (("default", {}), ("without retreat", {"retreat": False}))}
    say("drawn and recorded lengths")
    traces = trace_study(200, 2) if quick else trace_study()
    return {
        "bandit": bandit,
        "decision_us": times["paper"],
        "decision_us_by_controller": times,
        "traces": [_as_json(row) for row in traces],
    }


def _as_json(row: Row) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(row).items()}


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _rounded(value: Any) -> Any:
    """Four digits are more than the runs can tell apart."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
