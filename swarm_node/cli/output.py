"""How commands print: tables for people, plain columns for pipes, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """`value` as JSON in ASCII on standard output; a float that is NaN becomes null, an infinite one the text `inf`."""
    print(json.dumps(_finite(value), indent=2, default=str))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """A table on a terminal; aligned columns, never cut off, anywhere else."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*heads, title=title or None)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]
    for line in (heads, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Named values, one a line, names aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {value}")


def number(value: float, digits: int = 3) -> str:
    """A float for people; `-` where it was not measured."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
