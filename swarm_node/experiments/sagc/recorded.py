"""Completion lengths recorded from our own runs, to drive controllers with what training really does to lengths.

`python -m swarm_node.experiments.sagc.recorded` trains `tiny-m` on `chain-sum:1` with a fixed G of 8 and writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RECORD = "data/chain_sum_lengths.json"
EVERY, STEPS, PROBLEMS, SAMPLES = 10, 80, 24, 32


@dataclass(frozen=True)
class RecordedTrace:
    """Lengths by step: a group is drawn from the recorded samples of one problem, without replacement."""

    name: str
    records: Mapping[int, NDArray[np.int64]]
    """Optimiser step -> lengths in tokens, shape (problems, samples)."""
    stretch: int = 1
    """Simulated steps for every recorded one."""

    @property
    def settled(self) -> int:
        """The step from which nothing changes."""
        return max(self.records) * self.stretch

    def _at(self, step: int) -> NDArray[np.int64]:
        return self.records[min(self.records, key=lambda recorded: abs(recorded * self.stretch - step))]

    def mean_length(self, step: int) -> float:
        """Mean tokens over all problems and samples of the recorded step nearest to `step`."""
        return float(self._at(step).mean())

    def sample(self, noise: np.random.Generator, step: int, groups: int, size: int) -> NDArray[np.int64]:
        """Tokens a completion, shape (groups, size). Raises ValueError when a problem has fewer than `size` samples."""
        lengths = self._at(step)
        if size > lengths.shape[1]:
            raise ValueError(f"{lengths.shape[1]} lengths were recorded a problem: a group of {size} cannot be drawn from them")
        chosen = lengths[noise.integers(len(lengths), size=groups)]
        return noise.permuted(chosen, axis=1)[:, :size]


def recorded_trace(stretch: int = 5) -> RecordedTrace:
    """The committed record. At a stretch of 5 its 80 steps become 400 of a study's 600."""
    record = json.loads(files("swarm_node.experiments.sagc").joinpath(RECORD).read_text(encoding="utf-8"))
    return RecordedTrace("recorded", {int(step): np.array(lengths) for step, lengths in record["lengths"].items()}, stretch)


def write_record(out: Path, lengths: Mapping[int, Sequence[Sequence[int]]], how: str) -> None:
    """Write step -> lengths (problems, samples) as JSON; `how` says what they were recorded from."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"how": how, "lengths": {str(step): rows for step, rows in lengths.items()}}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from swarm_node.experiments.sagc.training import TrainingSpec, record

    spec = TrainingSpec("recorded", "grpo", 0, {"group_size": 8}, steps=STEPS, probe_every=EVERY)
    how = (
        f"tiny-m on chain-sum:1, GRPO, G 8, learning rate {spec.learning_rate:g}, seed 0; {SAMPLES} samples of {PROBLEMS} held-out problems"
    )
    write_record(Path(str(files("swarm_node.experiments.sagc"))) / RECORD, record(spec, PROBLEMS, SAMPLES), how)
