"""`swarm-node reproduce`: the experiments that the papers' claims rest on, run again here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from swarm_node.cli.output import number, print_json, print_table
from swarm_node.cli.places import JsonOption

SAGC_EXAMPLE = "Example: swarm-node reproduce sagc --quick --out /tmp/sagc"

app = typer.Typer(no_args_is_help=True, help="Run an experiment again and write its report.")


@app.command(epilog=SAGC_EXAMPLE)
def sagc(
    quick: Annotated[bool, typer.Option("--quick", help="A small version in under 3 minutes: enough to see that everything runs.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.html, results.json, summary.md and the finished runs.")] = Path(
        "reproduce-sagc"
    ),
    workers: Annotated[int, typer.Option(min=1, help="Training runs at once, each on one thread.")] = 2,
    json: JsonOption = False,
) -> None:
    """Choose the group size under a straggler budget: SAGC against fixed sizes and over-sampling.

    Simulation with a known optimum, then real training of tiny-m. Interrupted, it goes on where it was: finished runs are kept.
    """
    from swarm_node.experiments.sagc.study import reproduce

    folder = out.expanduser()
    results = reproduce(folder, quick=quick, workers=workers, say=lambda line: print(line, file=sys.stderr, flush=True))
    if json:
        print_json({key: value for key, value in results.items() if key != "runs"})
        return
    heads = ("task", "algorithm", "controller", "straggler rate", "s/step", "s to target", "eval", "ood")
    keys = ("straggler_rate", "seconds_per_step", "seconds_to_target", "eval_accuracy", "ood_accuracy")
    print_table(
        heads,
        [
            (row["task"], row["algorithm"], row["controller"], *("-" if row[key] is None else number(row[key]) for key in keys))
            for row in results["training"]
        ],
    )
    print(f"report: {(folder / 'report.html').absolute()}")
