"""`swarm-node config`: show every option with its meaning and origin, or check a file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_node.cli.join import settings_of
from swarm_node.cli.output import print_json
from swarm_node.cli.places import HomeOption, JsonOption

if TYPE_CHECKING:
    from swarm_node.config import Entry, Loaded

app = typer.Typer(no_args_is_help=True, help="Show and check the configuration.")


@app.command(epilog="Example: swarm-node config show --set rollout.temperature=0.9 > config.toml")
def show(
    config: Annotated[Path | None, typer.Option(help="Configuration file; default: config.toml in the home folder.")] = None,
    home: HomeOption = None,
    swarm: Annotated[str | None, typer.Option(help="Name of the swarm.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option as `join` takes it. Repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Print every option: value, meaning, and where the value came from. The output is a configuration file."""
    from swarm_node.config import entries, load_config

    given: dict[tuple[str, str], Any] = {("--home", "run.home"): home, ("--swarm", "swarm"): swarm}
    loaded = load_config(config, settings_of(given, set_ or ()))
    if json:
        print_json([{**asdict(entry), "value": _plain(entry.value)} for entry in entries(loaded)])
        return
    text = render_config(loaded)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "toml", background_color="default", word_wrap=True))
    else:
        print(text, end="")


@app.command(epilog="Example: swarm-node config check config.toml")
def check(file: Annotated[Path, typer.Argument(help="The configuration file.")]) -> None:
    """Check a configuration file: every option, then whether its task, model and schedule are here.

    Every problem is named with its line. Exit code 2 if there is one.
    """
    from swarm_node.config import ConfigError, load_config

    loaded = load_config(file)

    from swarm_node.lifecycle import find_problems

    problems = [f"{loaded.sources.get(key, file)}: {key}: {error}" for key, error in find_problems(loaded.config)]
    if problems:
        raise ConfigError("\n".join(problems))
    print(f"{file}: good, {len(loaded.sources)} options set")


def render_config(loaded: Loaded) -> str:
    """The configuration as TOML with comments: a file that gives the same configuration again."""
    import textwrap

    from swarm_node.config import entries

    lines: list[str] = []
    table = ""
    for entry in entries(loaded):
        head, _, name = entry.key.rpartition(".")
        if head != table:
            table = head
            lines += ["", f"[{table}]"]
        meaning = f"{entry.meaning} ({entry.source})"
        lines += ["", *(f"# {line}" for line in textwrap.wrap(meaning, 98, break_long_words=False, break_on_hyphens=False))]
        lines.append(_assignment(name, entry))
    return "\n".join(lines).lstrip("\n") + "\n"


def _assignment(name: str, entry: Entry) -> str:
    import tomli_w

    if entry.value is None:
        return f"# {name} is not set"
    return tomli_w.dumps({name: _plain(entry.value)}, multiline_strings=False).strip().replace("\n    ", " ").replace(",\n]", " ]")


def _plain(value: Any) -> Any:
    """As TOML and JSON know it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
