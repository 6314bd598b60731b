"""`swarm-node model`: which models there are by name, and how they get here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from swarm_node.cli.output import print_facts, print_json, print_table
from swarm_node.cli.places import JsonOption

app = typer.Typer(no_args_is_help=True, help="List, fetch and describe models.")
Name = Annotated[str, typer.Argument(help="A name that `model list` shows.")]


@app.command(name="list", epilog="Example: swarm-node model list")
def list_(json: JsonOption = False) -> None:
    """List the models known by name. Any local folder or hub id that transformers loads can be used as well."""
    from swarm_node.policy.catalogue import list_models

    models = list_models()
    if json:
        print_json([asdict(model) for model in models])
        return
    rows = [(model.name, f"{model.parameters / 1e6:,.1f} M", "yes" if model.present else "no", model.about) for model in models]
    print_table(("name", "parameters", "here", "what it is"), rows)


@app.command(epilog="Example: swarm-node model pull smollm2-135m")
def pull(name: Name) -> None:
    """Bring a model onto this machine, checksums verified. Does nothing when it is here; goes on where an interrupted pull ended."""
    from swarm_node.policy.catalogue import pull

    with _progress() as progress:
        model = pull(name, progress=progress)
    print(f"{model.name} is in {model.folder}" + (f" (from {model.origin})" if model.origin else ""))


@app.command(epilog="Example: swarm-node model info tiny-s")
def info(name: Name, json: JsonOption = False) -> None:
    """Say what a model is, where it comes from, under which licence, and where it lies."""
    from swarm_node.policy.catalogue import find

    model = find(name)
    if json:
        print_json(asdict(model))
        return
    facts = [
        ("name", model.name),
        ("what it is", model.about),
        ("parameters", f"{model.parameters:,}"),
        ("licence", model.license),
        ("source", model.source),
        ("folder", str(model.folder)),
        ("here", "yes" if model.present else f"no: swarm-node model pull {model.name}"),
    ]
    facts += [("pulled from", model.origin)] if model.origin else []
    facts += [(f"sha256 {file}", checksum) for file, checksum in model.checksums]
    print_facts(facts)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Gives what `pull` calls with (what is being done, bytes done, bytes in all or 0): a bar, or lines where there is no terminal."""
    if not sys.stderr.isatty():
        yield _Phases().show
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        phases: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in phases:
                phases[what] = bars.add_task(what, total=None)
            bars.update(phases[what], completed=done, total=total or None)

        yield show


class _Phases:
    """Prints every phase once, and every tenth of it."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None

    def show(self, what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if (what, tenth) != self._shown:
            self._shown = (what, tenth)
            print(f"{what}: {10 * tenth} %" if total else what, file=sys.stderr)
