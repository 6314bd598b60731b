"""Options that several commands share: which node is meant, by its home folder or its swarm's name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Home folder of the node; default: ~/.swarm-node/SWARM.", show_default=False)
]
SwarmOption = Annotated[str, typer.Option("--swarm", help="Name of the swarm, which names the default home folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def resolve_home(home: Path | None, swarm: str) -> Path:
    """The home folder that is meant, absolute."""
    from swarm_node.home import default_home

    return (home or default_home(swarm)).expanduser().absolute()
