"""`swarm-node report`: a run's metrics as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_node.cli.output import number, print_json, print_table
from swarm_node.cli.places import JsonOption, SwarmOption, resolve_home

EXAMPLE = "Example: swarm-node report runs/latest --out report.html"


def report(
    run: Annotated[
        list[Path] | None, typer.Argument(help="Home folders of nodes, or a folder that holds them; default: ~/.swarm-node/SWARM.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    swarm: SwarmOption = "main",
    json: JsonOption = False,
) -> None:
    """Turn a run's metrics into one HTML file with plots.

    Per node: reward, accuracy, lengths, G and λ, kept and foreign share, tokens/s. The file opens offline.
    """
    from swarm_node.observe.report import read_runs, write_report

    runs = read_runs([folder.expanduser() for folder in run] if run else [resolve_home(None, swarm)])
    path = write_report(runs, out.expanduser())
    if json:
        print_json({"report": path.absolute(), "nodes": [node.summary.as_json() for node in runs]})
        return
    rows = [
        (
            node.summary.name,
            node.summary.model,
            str(node.summary.steps),
            f"{number(node.summary.accuracy_before)} → {number(node.summary.accuracy_after)}",
            str(node.summary.groups_sent),
            str(node.summary.groups_received),
            str(node.summary.groups_admitted),
            str(node.summary.foreign_groups_used),
        )
        for node in runs
    ]
    print_table(("node", "model", "steps", "accuracy", "sent", "received", "admitted", "foreign used"), rows)
    print(f"report: {path.absolute()}")
