"""`swarm-node join`: start or resume a node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swarm_node.config import Setting

EXAMPLE = "Example: swarm-node join --model tiny-s --peer /ip4/192.0.2.7/tcp/31310/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


SPINS = "3000"
"""How often a thread of OpenMP looks whether the others have arrived before it sleeps. Its own default is a hundred times as many: beside
another program's work a decode step then takes several times as long. Training on an idle machine becomes a few percent slower."""


def join(
    model: Annotated[str | None, typer.Option(help="A named model (see `model list`), a local folder, a hub id, or auto.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Train a low-rank adapter, or every weight.")] = None,
    task: Annotated[str | None, typer.Option(help="What to train on: chain-sum, chain-sum:LEVEL, gsm8k:PATH, reasoning-gym:NAME.")] = None,
    swarm: Annotated[str | None, typer.Option(help="Name of the swarm: who has the same name, task and tokenizer meets.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Multiaddr of a node to join. Repeatable.")] = None,
    directory: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of another node's directory, with /p2p/PEER-ID. Repeatable.")
    ] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on. Repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps in all, resumed ones included.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after this many minutes.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Completions a prompt, at least 2; fixes G and switches the controller off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything this node draws.")] = None,
    home: Annotated[Path | None, typer.Option(help="Home folder; default: ~/.swarm-node/SWARM.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file; default: config.toml in the home folder.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every message, and keep them in node.log.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Write into the home folder where the time of a step goes.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other option, for example rollout.temperature=0.9. Repeatable."),
    ] = None,
) -> None:
    """Join a swarm, or start one, and train until told to stop.

    Without options: a swarm of one, with a model that fits this machine. The address that others dial is printed. Ctrl-C writes a
    checkpoint; the same command goes on from there. Options win over the configuration file.
    """
    given = {
        ("--swarm", "swarm"): swarm,
        ("--home", "run.home"): home,
        ("--model", "model.name"): model,
        ("--lora" if lora else "--full", "model.lora"): lora,
        ("--task", "task.name"): task,
        ("--peer", "network.peers"): peer,
        ("--directory", "network.directory_peers"): directory,
        ("--listen", "network.listen"): listen,
        ("--steps", "run.steps"): steps,
        ("--minutes", "run.minutes"): minutes,
        ("--group-size", "control.group_size"): group_size,
        ("--seed", "run.seed"): seed,
    }
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # OpenMP reads it when torch is imported
    from swarm_node.config import load_config

    loaded = load_config(config, settings_of(given, set_ or ()))

    from swarm_node.lifecycle import run
    from swarm_node.logs import log_to_console

    if verbose:
        log_to_console("debug")
    raise typer.Exit(run(loaded.config, profile=profile))


def settings_of(given: dict[tuple[str, str], Any], set_: list[str] | tuple[str, ...]) -> list[Setting]:
    """Command-line options as settings: (option, key) -> value, left out where not given; then every `--set`, which wins.

    Raises:
        ConfigError: a `--set` without `=`.
    """
    from swarm_node.config import Setting, parse_setting

    options = [Setting(key, value, option) for (option, key), value in given.items() if value not in (None, [])]
    return options + [parse_setting(text) for text in set_]
