"""`swarm-node calibrate`: measure how many pages a model must read, and write its schedule."""

from __future__ import annotations

import math
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_node.cli.output import number, print_json, print_table
from swarm_node.cli.places import HomeOption, JsonOption, SwarmOption, resolve_home

if TYPE_CHECKING:
    from swarm_node.rollout.calibration.log import Place
    from swarm_node.rollout.calibration.search import Calibration, CalibrationOptions, Cell

EXAMPLE = "Example: swarm-node calibrate --model smollm2-135m --budgets 61,93,125,189 --context 4000"
LOG, PAGE, RESULTS = "calibration.log", "calibration.html", "calibration.json"


class Dtype(StrEnum):
    """Types of weights and cache."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def calibrate(
    model: Annotated[str, typer.Option(help="A named model, a local folder or a hub id.")],
    budgets: Annotated[str, typer.Option(help="Pages to try besides the reserved three, separated by commas.")] = "29,45,61,93,125,189,253",
    context: Annotated[
        int | None, typer.Option(min=64, help="Positions to calibrate; default: the model's, at most 8,000.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Prompts per 2,000 positions to choose budgets on.")] = 8,
    held_out: Annotated[int, typer.Option(min=1, help="Further ones to verify the schedule on.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a completion at most.")] = 128,
    prompts: Annotated[
        Path | None, typer.Option(help="A text to cut prompts from; default: solved problems of the tasks.", show_default=False)
    ] = None,
    threshold: Annotated[float, typer.Option(min=0.01, max=0.99, help="What the 5th percentile of acceptance must hold.")] = 0.86,
    temperature: Annotated[float, typer.Option(min=0.05, max=4.0, help="Sampling temperature.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and noise.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Type of weights and cache.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="`cpu`, `cuda`, `cuda:1`, or `auto`.")] = "auto",
    home: HomeOption = None,
    swarm: SwarmOption = "main",
    json: JsonOption = False,
) -> None:
    """Find the smallest budgets that keep a model's sparse tokens close to its dense ones.

    The sparse policy generates, the dense one rescores. Per 2,000 positions the smallest budget is taken whose 5th percentile of acceptance
    holds the threshold by one standard error; the schedule is then verified on other prompts, and raised where they miss.
    The home folder gets schedule.json, which a node of this model uses from its next start on, calibration.json with all numbers, and
    calibration.html with plots. Run again after an interruption, it goes on.
    """
    from json import dumps

    from swarm_node.cli.calibrate_page import render_acceptance
    from swarm_node.observe.page import write_page
    from swarm_node.policy.loading import load_policy
    from swarm_node.policy.options import ModelOptions
    from swarm_node.rollout.calibration.prompts import SolvedProblems, TextWindows
    from swarm_node.rollout.calibration.search import CalibrationOptions, calibrate, parse_budgets, plan
    from swarm_node.rollout.options import RolloutOptions
    from swarm_node.rollout.paged.engine import SparseEngine
    from swarm_node.rollout.sparsity.schedule import FILE, save_schedule

    pages = parse_budgets(budgets)
    policy = load_policy(ModelOptions(name=model, dtype=dtype.value, device=device))
    options = CalibrationOptions(
        budgets=pages,
        context=context or min(policy.context or 8000, 8000),
        prompts=samples,
        held_out=held_out,
        new_tokens=new_tokens,
        threshold=threshold,
        temperature=temperature,
        seed=seed,
    )
    plan(options, policy.context)  # complains before anything is written
    source = SolvedProblems(policy.tokenizer, seed) if prompts is None else TextWindows(policy.tokenizer, prompts.expanduser())
    engine = SparseEngine(policy, RolloutOptions())
    folder = resolve_home(home, swarm)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    result = calibrate(policy, engine, source, options, log=folder / LOG, progress=_show)
    save_schedule(folder / FILE, result.schedule)
    record = _record(result, options, policy.name)
    (folder / RESULTS).write_text(dumps(record, indent=2) + "\n", encoding="utf-8")
    points = [_points(cells, options) for cells in (result.cells, result.held_out)]
    write_page(render_acceptance(policy.name, threshold, *points), folder / PAGE)
    if json:
        print_json(record)
        return
    _print(result)
    print(f"schedule: {folder / FILE}; plots: {folder / PAGE}")


def _print(result: Calibration) -> None:
    from swarm_node.rollout.sparsity.schedule import BIN_TOKENS, DENSE

    def rows(cells: tuple[Cell, ...]) -> list[tuple[str, ...]]:
        return [
            (
                f"{cell.bin * BIN_TOKENS:,}–{(cell.bin + 1) * BIN_TOKENS - 1:,}",
                "dense" if cell.budget == DENSE else str(cell.budget),
                number(cell.acceptance.mean),
                f"{number(cell.acceptance.p5)} ± {number(cell.error)}",
                str(cell.acceptance.count),
                "yes" if result.schedule.pages[cell.bin] == cell.budget else "",
            )
            for cell in cells
        ]

    heads = ("positions", "pages", "mean", "p5", "tokens", "chosen")
    print_table(heads, rows(result.cells), title="prompts of the search")
    print()
    print_table(heads[:-1], [row[:-1] for row in rows(result.held_out)], title="the schedule on held-out prompts")
    pages = " ".join("dense" if pages == DENSE else str(pages) for pages in result.schedule.pages)
    print(f"\npages per {BIN_TOKENS:,} positions: {pages}; p5 ≥ {result.schedule.threshold:g} holds on held-out prompts")


def _record(result: Calibration, options: CalibrationOptions, model: str) -> dict[str, Any]:
    def cells(part: tuple[Cell, ...]) -> list[dict[str, Any]]:
        return [
            {
                "bin": cell.bin,
                "budget": cell.budget,
                "mean": cell.acceptance.mean if cell.acceptance.count else None,
                "p5": cell.acceptance.p5 if cell.acceptance.count else None,
                "p5_error": cell.error if math.isfinite(cell.error) else None,
                "tokens": cell.acceptance.count,
            }
            for cell in part
        ]

    return {
        "command": shlex.join(["swarm-node", *sys.argv[1:]]),
        "model": model,
        "options": options.model_dump(mode="json"),
        "schedule": list(result.schedule.pages),
        "search": cells(result.cells),
        "held_out": cells(result.held_out),
    }


def _points(cells: tuple[Cell, ...], options: CalibrationOptions) -> list[Any]:
    from swarm_node.cli.calibrate_page import Point
    from swarm_node.rollout.sparsity.schedule import BIN_TOKENS

    return [
        Point(
            position=(cell.bin * BIN_TOKENS + min((cell.bin + 1) * BIN_TOKENS, options.context)) // 2,
            budget=cell.budget,
            mean=cell.acceptance.mean,
            p5=cell.acceptance.p5,
            error=cell.error,
            count=cell.acceptance.count,
        )
        for cell in cells
        if cell.acceptance.count
    ]


def _show(place: Place, done: int, total: int) -> None:
    print(f"{done} of {total}: {place.part} prompt of {place.length} tokens", file=sys.stderr)
