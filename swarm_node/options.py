"""The base of every options table: immutable, typed, documented, and closed to unknown keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Options(BaseModel):
    """One table of the configuration file. Each room defines its own; `swarm_node.config` composes them.

    A field's docstring is its documentation: `swarm-node config show` prints it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def absolute(path: str) -> str:
    """A path of an option as it reads from every folder, so that a saved one means the same wherever the node is started next."""
    return str(Path(os.path.expanduser(path)).absolute())


def constant(default: Any, **limits: Any) -> Any:
    """The default of a field that no user would turn: code, benches and tests may set it, and a configuration cannot."""
    return Field(default, json_schema_extra={"constant": True}, **limits)


def is_constant(field: FieldInfo) -> bool:
    """Whether the field was made by `constant`."""
    return field.json_schema_extra == {"constant": True}
