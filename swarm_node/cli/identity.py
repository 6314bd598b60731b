"""`swarm-node identity`: the key that makes a node the same peer tomorrow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm_node.cli.output import print_facts, print_json
from swarm_node.cli.places import HomeOption, JsonOption, SwarmOption, resolve_home

app = typer.Typer(no_args_is_help=True, help="Show, back up and restore the node's identity.")


@app.command(epilog="Example: swarm-node identity show --home ~/.swarm-node/main")
def show(home: HomeOption = None, swarm: SwarmOption = "main", json: JsonOption = False) -> None:
    """Print the peer id and where its key is. The key itself is never printed."""
    from swarm_node.network.identity import KEY_FILE, load

    path = resolve_home(home, swarm) / KEY_FILE
    identity = load(path)
    if json:
        print_json({"peer_id": identity.peer_id, "file": path})
    else:
        print_facts([("peer id", identity.peer_id), ("key file", str(path))])


@app.command(epilog="Example: swarm-node identity backup /media/stick/")
def backup(
    destination: Annotated[Path, typer.Argument(help="File to write, or a folder to write it into. Never overwritten.")],
    home: HomeOption = None,
    swarm: SwarmOption = "main",
) -> None:
    """Copy the key to a safe place. Who has the copy can be this node: keep it as you keep a password."""
    from swarm_node.network.identity import backup

    print(f"identity saved to {backup(resolve_home(home, swarm), destination.expanduser())}")


@app.command(epilog="Example: swarm-node identity restore /media/stick/12D3KooW....key")
def restore(
    source: Annotated[Path, typer.Argument(help="The file that `identity backup` wrote.")],
    home: HomeOption = None,
    swarm: SwarmOption = "main",
) -> None:
    """Bring a saved key into a home folder that has none. An existing key is never overwritten."""
    from swarm_node.network.identity import restore

    folder = resolve_home(home, swarm)
    identity = restore(folder, source.expanduser())
    print(f"{identity.peer_id} restored into {folder}")
