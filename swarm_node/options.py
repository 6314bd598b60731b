"""The base of every options table: immutable, typed, documented, and closed to unknown keys."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """One table of the configuration file. Each room defines its own; `swarm_node.config` composes them.

    A field's docstring is its documentation: `swarm-node config show` prints it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def absolute(path: str) -> str:
    """A path of an option as it reads from every folder, so that a saved one means the same wherever the node is started next."""
    return str(Path(os.path.expanduser(path)).absolute())
