"""The list of faults: one TOML file a room beside this one, one table `[[fault]]` a fault."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """One line of the product, changed for the worse."""

    name: str
    """What is wrong with it, in words."""
    file: str
    """Path from the project's root."""
    old: str
    """Part of one line, found once in the file."""
    new: str
    tests: tuple[str, ...]
    """What pytest is asked to run: files or folders of the tests of that room, or single tests."""
    survives: str = ""
    """Why no test can notice it; empty: one must."""

    def applied(self, source: str) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: the line is not there, is there more than once, or the fault changes nothing or spans lines.
        """
        if "\n" in self.old or "\n" in self.new or self.old == self.new:
            raise ValueError(f"{self.name}: a fault changes one line into another")
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {source.count(self.old)} times {self.old!r}; it must be there once")
        return source.replace(self.old, self.new)


def load_faults() -> list[Fault]:
    """Every fault of every room, in the order of the files' names."""
    tables = [table for path in sorted(Path(__file__).parent.glob("*.toml")) for table in tomllib.loads(path.read_text("utf-8"))["fault"]]
    return [Fault(**table | {"tests": tuple(table["tests"])}) for table in tables]
