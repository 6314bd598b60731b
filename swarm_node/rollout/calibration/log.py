"""What a calibration has measured so far: an interrupted run goes on from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_node.rollout.calibration.prompts import Part
from swarm_node.rollout.sparsity.schedule import Schedule

_UNIT = 10_000
"""Acceptances are written as integers of this fraction."""


@dataclass(frozen=True)
class Place:
    """One prompt: which bin, which part, how long."""

    bin: int
    part: Part
    index: int
    length: int


@dataclass(frozen=True)
class Sample:
    """One completion: the acceptance of its sparse tokens, (n,)."""

    budget: int
    """0: what the schedule said."""
    acceptances: NDArray[np.floating]


class CalibrationLog:
    """Finished prompts, in memory and line by line in a file that an interrupted run can go on from."""

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        """A file that was written for another `identity` is begun anew."""
        self._path = path
        self._samples: dict[str, list[Sample]] = {}
        if path is None:
            return
        head = json.dumps(identity, sort_keys=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if not lines or lines[0] != head:
            path.write_text(head + "\n", encoding="utf-8")
            return
        for line in lines[1:]:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that the interruption cut
            self._samples[row["key"]] = [Sample(budget, np.array(values) / _UNIT) for budget, values in row["samples"]]

    def get(self, place: Place, schedule: Schedule | None) -> list[Sample] | None:
        """What was measured for a prompt, with the search's budgets (None) or a schedule; None: not yet."""
        return self._samples.get(self._key(place, schedule))

    def put(self, place: Place, schedule: Schedule | None, samples: list[Sample]) -> None:
        """Keep it."""
        self._samples[self._key(place, schedule)] = samples
        if self._path is not None:
            values = [[sample.budget, np.floor(sample.acceptances * _UNIT).astype(int).tolist()] for sample in samples]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": self._key(place, schedule), "samples": values}) + "\n")

    def _key(self, place: Place, schedule: Schedule | None) -> str:
        pages = "" if schedule is None else f" {schedule.pages[place.bin]}"
        return f"{place.part} {place.index} {place.length}{pages}"
