"""`swarm-node eval`: sampled accuracy of models and nodes, on the same problems with the same random numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm_node.cli.output import number, print_json, print_table
from swarm_node.cli.places import JsonOption

if TYPE_CHECKING:
    from swarm_node.evaluation import Evaluation

EXAMPLE = "Example: swarm-node eval --model tiny-s --home ~/.swarm-node/main --problems 200"


class EvalError(ValueError):
    """Nothing to evaluate, or it cannot be evaluated together."""


class SplitName(StrEnum):
    """The splits that nothing is trained on."""

    EVAL = "eval"
    OOD = "ood"


def evaluate(
    model: Annotated[list[str] | None, typer.Option(help="A model as it is before training. Repeatable.")] = None,
    home: Annotated[
        list[Path] | None, typer.Option(help="Home folder of a node: its latest checkpoint. Repeatable; more than one compares.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task; default: that of the first home, else chain-sum.")] = None,
    split: Annotated[SplitName, typer.Option(help="Held-out problems, or harder ones than any trained on.")] = SplitName.EVAL,
    problems: Annotated[int, typer.Option(min=1, help="Problems to sample for.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Completions a problem.")] = 4,
    temperature: Annotated[float, typer.Option(min=0.05, max=4.0, help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit; default: that of the first home, else the rollout's default.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems and noise.")] = 0,
    json: JsonOption = False,
) -> None:
    """Measure accuracy on problems that nothing is trained on.

    Prints sampled accuracy with its standard error, rewards and lengths. Several models or homes meet the same problems with the same
    random numbers; their differences from the first come with a paired standard error.
    """
    if not model and not home:
        raise EvalError("nothing to evaluate: name a model with --model, or a node's home folder with --home")
    from swarm_node.config import Config, Setting, load_config
    from swarm_node.policy.options import ModelOptions
    from swarm_node.tasks.registry import load_task

    models = [(name, Config(model=ModelOptions(name=name))) for name in model or ()]
    nodes = [(str(path), load_config(settings=[Setting("run.home", path, "--home")]).config) for path in home or ()]
    first = nodes[0][1] if nodes else Config()
    loaded_task = load_task(task or first.task.name)

    from swarm_node.evaluation import evaluate, load_trained
    from swarm_node.policy.loading import load_policy
    from swarm_node.rollout.create import create_engine

    results: list[tuple[str, int, Evaluation]] = []
    for name, config in models + nodes:
        policy, step = (load_policy(config.model), 0) if (name, config) in models else load_trained(config)
        with _progress(name, problems) as progress:
            evaluation = evaluate(
                policy,
                create_engine(policy, config.rollout),
                loaded_task,
                split.value,
                problems,
                samples,
                seed,
                temperature=temperature,
                max_new_tokens=max_new_tokens or first.rollout.max_new_tokens,
                progress=progress,
            )
        results.append((name, step, evaluation))
    _print(results, json)


def _print(results: list[tuple[str, int, Evaluation]], json: bool) -> None:
    base = results[0][2]
    if json:
        rows = []
        for name, step, evaluation in results:
            difference, error = evaluation.compare(base)
            rows.append({"name": name, "step": step, **asdict(evaluation), "difference": difference, "difference_standard_error": error})
        print_json(rows)
        return
    heads = ["what", "step", "accuracy", "reward", "length mean", "max", "cut"] + (["against the first"] if len(results) > 1 else [])
    rows_shown = []
    for index, (name, step, evaluation) in enumerate(results):
        row = [
            name,
            str(step),
            f"{evaluation.accuracy:.3f} ± {number(evaluation.standard_error)}",
            number(evaluation.reward_mean),
            f"{evaluation.length_mean:.1f}",
            str(evaluation.length_max),
            f"{evaluation.truncated_share:.1%}",
        ]
        if len(results) > 1:
            difference, error = evaluation.compare(base)
            row.append(f"{difference:+.3f} ± {number(error)}" if index else "")
        rows_shown.append(row)
    print_table(heads, rows_shown)
    unscored = sum(evaluation.unscored for _, _, evaluation in results)
    note = f"; {unscored} completions could not be graded and count nowhere" if unscored else ""
    print(f"{base.task}, split {base.split}: {base.problems} problems, {base.samples} completions each, ± one standard error{note}")
    for name, _, evaluation in results:
        if evaluation.left_out:
            print(f"{name}: {evaluation.left_out} of {evaluation.problems} problems were left out, first: {evaluation.left_out_why}")


@contextmanager
def _progress(name: str, problems: int) -> Iterator[Callable[[int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(name, total=problems)
        yield lambda done: bars.update(bar, completed=done)
