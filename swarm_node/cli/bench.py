"""`swarm-node bench`: how fast this machine samples, held against other engines and against what its memory allows."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_node.cli.output import print_json, print_table
from swarm_node.cli.places import JsonOption

if TYPE_CHECKING:
    from swarm_node.policy.policy import Policy
    from swarm_node.rollout.sparsity.schedule import Schedule

ROLLOUT_EXAMPLE = "Example: swarm-node bench rollout --model smollm2-135m --quick"
KERNELS_EXAMPLE = "Example: swarm-node bench kernels --shape 135m --context 8192"

app = typer.Typer(no_args_is_help=True, help="Measure how fast this machine samples.")


class Dtype(StrEnum):
    """Types of weights and cache."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


DtypeOption = Annotated[Dtype, typer.Option(help="Type of weights and cache, of all engines.")]
DeviceOption = Annotated[str, typer.Option(help="`cpu`, `cuda`, `cuda:1`, or `auto`.")]


@app.command(epilog=ROLLOUT_EXAMPLE)
def rollout(
    model: Annotated[str, typer.Option(help="A named model, a local folder or a hub id.")] = "smollm2-135m",
    random_shape: Annotated[
        str | None, typer.Option(help="Random weights in a known shape instead of a model: 135m, 1.7b, 8b.", show_default=False)
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Python of an environment that holds vLLM, to run it in turn with the others.", show_default=False)
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Of the sparse steps: a known schedule's name, a file, or `auto`: one measured for the model.")
    ] = "auto",
    budget: Annotated[
        int | None, typer.Option(min=1, help="Instead of a schedule: pages besides the reserved three.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are taken over them.")] = 5,
    dtype: DtypeOption = Dtype.BFLOAT16,
    device: DeviceOption = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="An eighth of every context, two rounds: about a minute.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, summary.md and report.html with the plot.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Time our dense and sparse decoding against transformers and vLLM.

    Same weights, prompts, lengths and threads, in turn in one call; prefill and decode apart; beside what memory reads allow and what the
    cost model predicts.
    """
    from swarm_node.experiments.bench.plan import make_plan
    from swarm_node.experiments.bench.report import case_table, notes, prefill_table, ratio_table, write_results
    from swarm_node.experiments.bench.rollout import bench_rollout

    policy = _policy(model, random_shape, dtype, device)
    chosen, why = _schedule(schedule, budget, policy.name)
    plan = make_plan(policy.context, rounds=repeats, quick=quick, accelerator=policy.device.type != "cpu")
    results: dict[str, Any] = {"command": shlex.join(["swarm-node", *sys.argv[1:]])}
    results |= bench_rollout(policy, plan, chosen, why, vllm_python=vllm_python, quick=quick, random=random_shape is not None, say=_say)
    if out is not None:
        write_results(results, out.expanduser())
    if json:
        print_json(results)
        return
    for heads, rows in (case_table(results), prefill_table(results), ratio_table(results)):
        print_table(heads, rows)
        print()
    print("\n".join(notes(results)))
    if out is not None:
        print(f"report: {(out.expanduser() / 'report.html').absolute()}")


@app.command(epilog=KERNELS_EXAMPLE)
def kernels(
    shape: Annotated[str, typer.Option(help="Of a model: 135m, 1.7b, 8b.")] = "135m",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")] = 8,
    context: Annotated[int, typer.Option(min=64, help="Tokens of each sequence, a multiple of 16.")] = 4096,
    budget: Annotated[int, typer.Option(min=1, help="Pages of a sparse step besides the reserved three.")] = 61,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are taken over them.")] = 5,
    dtype: DtypeOption = Dtype.BFLOAT16,
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Time each kernel against the bytes that it has to move.

    All layers of one decode step, and the learner's log-probs over the vocabulary, beside the floor that memory reads set in the
    same rounds.
    """
    from swarm_node.experiments.bench.kernels import bench_kernels
    from swarm_node.policy.hardware import DTYPES, choose_device

    place, _ = choose_device(device)
    times = bench_kernels(shape, batch=batch, context=context, budget=budget, repeats=repeats, dtype=DTYPES[dtype], device=place)
    if json:
        print_json(times.as_json())
        return
    print_table(
        ("kernel", "ms", "MB", "GB/s", "of floor"),
        [(row.name, f"{row.median * 1e3:.2f}", f"{row.size / 1e6:.1f}", f"{row.rate / 1e9:.1f}", f"{row.share:.2f}") for row in times.rows],
    )
    print(times.machine.describe())
    print(times.machine.kernels)


def _policy(model: str, random_shape: str | None, dtype: Dtype, device: str) -> Policy:
    from swarm_node.experiments.bench.shapes import random_policy
    from swarm_node.policy.hardware import DTYPES, choose_device
    from swarm_node.policy.loading import load_policy
    from swarm_node.policy.options import ModelOptions

    if random_shape is None:
        return load_policy(ModelOptions(name=model, dtype=dtype.value, device=device))
    return random_policy(random_shape, DTYPES[dtype], choose_device(device)[0])


def _schedule(name: str, budget: int | None, model: str) -> tuple[Schedule | None, str]:
    from swarm_node.experiments.bench.shapes import BenchError
    from swarm_node.rollout.options import SparsityOptions
    from swarm_node.rollout.sparsity.schedule import Schedule, choose_schedule

    if budget is None:
        chosen, why = choose_schedule(SparsityOptions(schedule=name, closed_loop=False), model)
        return chosen, why if chosen else f"{why}, or give a budget with --budget"
    if name != "auto":
        raise BenchError(f"--schedule {name} and --budget {budget} exclude each other: give one of them")
    return Schedule((budget,), 0.5, f"budget {budget}"), f"a budget of {budget} pages, as asked"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
