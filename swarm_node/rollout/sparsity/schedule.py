"""How many pages a sparse decode step reads, by position: Sparrow's dynamic schedule (arXiv 2606.08446), the published
tables, and which schedule a node's options, its home folder and its model's name lead to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from swarm_node.rollout.options import SparsityOptions

BIN_TOKENS = 2000
"""Positions, prompt and completion together, that share one budget."""
PAGE_SIZE = 16
"""Tokens of a page: what the budgets of all schedules count."""
DENSE = 1 << 20
"""A budget that no context reaches: dense attention, exactly."""
FILE = "schedule.json"
"""A calibrated schedule's name in a home folder."""
MAX_BINS = 1024
_MAKE = "`swarm-node calibrate --model MODEL`"


class ScheduleError(ValueError):
    """A schedule is unusable: unknown, unreadable, or with impossible values. The message says what to do."""


@dataclass(frozen=True)
class Schedule:
    """Pages per bin of 2,000 positions (prompt + generated), besides the three reserved ones; the last entry holds beyond the table."""

    pages: tuple[int, ...]
    """One budget a bin, each in [1, DENSE]; DENSE means dense attention there."""
    threshold: float
    """The 5th percentile of acceptance that it was made for, in (0, 1)."""
    source: str
    """Where it comes from, for people: `qwen3-1.7b@0.86`, `calibrated`, `closed loop`."""
    model: str = ""
    """The model that it was measured on; empty where nobody said."""

    def __post_init__(self) -> None:
        """
        Raises:
            ScheduleError: no bin or too many, a budget below 1 or above DENSE, or a threshold outside (0, 1).
        """
        if not 1 <= len(self.pages) <= MAX_BINS:
            raise ScheduleError(f"a schedule of {len(self.pages)} bins: give one budget a bin of {BIN_TOKENS} positions, 1 to {MAX_BINS}")
        for bin, pages in enumerate(self.pages):
            if not 1 <= pages <= DENSE:
                raise ScheduleError(
                    f"bin {bin} of the schedule has a budget of {pages} pages, which is not in [1, {DENSE}]: "
                    f"give at least 1, or {DENSE} for dense attention"
                )
        if not 0 < self.threshold < 1:
            raise ScheduleError(f"a schedule for a threshold of {self.threshold}, which is not between 0 and 1: 0.86 is the usual one")

    def budgets_at(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """The budget of each position, of any shape; the first token of the prompt is at position 0."""
        bins = np.minimum(positions // BIN_TOKENS, len(self.pages) - 1)
        return np.asarray(self.pages, dtype=np.int32)[bins]

    @property
    def name(self) -> str:
        """What a step line calls it."""
        return f"{self.source} ({self.model})" if self.model and self.model not in self.source else self.source


def _published(model: str, threshold: float, pages: list[int]) -> tuple[str, Schedule]:
    name = f"{model}@{threshold:.2f}"
    return name, Schedule(tuple(pages), threshold, name, model)


PUBLISHED: Mapping[str, Schedule] = MappingProxyType(
    dict(
        [
            _published("qwen3-1.7b", 0.80, [29, 45, 61, 77, 93, 93, 125, 125, 125] + [157] * 11),
            _published("qwen3-1.7b", 0.86, [29, 61, 93, 93, 125, 157, 189, 221, 221] + [253] * 11),
            _published("qwen3-1.7b", 0.92, [61, 125, 189, 221, 253, 317, 381, 381, 445] + [509] * 11),
            _published("qwen3-4b", 0.86, [29, 45, 61, 77, 93, 125, 157, 221, 253, 253] + [317] * 4 + [381] * 4 + [509] * 2),
            _published("qwen3-8b", 0.86, [29, 45, 61, 77, 125, 157, 189] + [253] * 4 + [317] * 6 + [385, 445, 445]),
            _published("qwen3-14b", 0.86, [29, 45, 77, 125, 253] + [381] * 10 + [509, 637, 637, 893, 893]),
        ]
    )
)
"""The tables of the Sparrow repository, by `model@threshold`."""


class _File(BaseModel):
    """A schedule on disk."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1]
    bin_tokens: Literal[2000]
    pages: list[int]
    threshold: float
    source: str
    model: str = ""


def load_schedule(path: Path) -> Schedule:
    """The schedule in a JSON file that `save_schedule` wrote.

    Raises:
        ScheduleError: no such file, no JSON, another version, or impossible values; the message names the field.
    """
    try:
        file = _File.model_validate_json(path.read_bytes())
        return Schedule(tuple(file.pages), file.threshold, file.source, file.model)
    except OSError as error:
        raise ScheduleError(
            f"the schedule {path} cannot be read ({error.strerror}): give an existing file, or write one with {_MAKE}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ScheduleError(f"the schedule {path}: {where}: {first['msg']}. Correct it, or write it anew with {_MAKE}") from error
    except ScheduleError as error:
        raise ScheduleError(f"the schedule {path}: {error}") from error


def save_schedule(path: Path, schedule: Schedule) -> None:
    """Write a schedule as JSON; a reader sees the old file or the new one, never half of one. Raises OSError."""
    content = {
        "version": 1,
        "bin_tokens": BIN_TOKENS,
        "pages": list(schedule.pages),
        "threshold": schedule.threshold,
        "source": schedule.source,
        "model": schedule.model,
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


_DATA = Path(__file__).parent / "data"
_CAREFUL = "qwen3-1.7b@0.92"
"""Where the closed loop starts for a model that nobody has measured: the largest budgets published for a small model."""


def known_schedules() -> dict[str, Schedule]:
    """The published schedules and those measured by this project, by `model@threshold`."""
    measured = (load_schedule(path) for path in sorted(_DATA.glob("*.json")))
    return dict(PUBLISHED) | {schedule.source: schedule for schedule in measured}


def choose_schedule(options: SparsityOptions, model: str, home: Path | None = None) -> tuple[Schedule | None, str]:
    """The schedule to start with, None for dense attention, and a sentence that says why.

    `auto` takes the home folder's calibrated schedule if it is of this model; else the known one of this model whose threshold is nearest
    to the wanted one, not below it where there is a choice; else a careful one if the closed loop will correct it; else dense attention.

    Args:
        options: `[sparsity]`.
        model: The policy's name; of a path or hub id the last part counts, in lower case.
        home: The folder where `swarm-node calibrate` may have left a schedule; None: there is none.

    Raises:
        ScheduleError: an unknown name, or a file that cannot be read.
    """
    if options.schedule == "dense":
        return None, "attention dense, as asked"
    known = known_schedules()
    if options.schedule != "auto":
        if options.schedule in known:
            return known[options.schedule], f"schedule {options.schedule}, as asked"
        path = Path(options.schedule).expanduser()
        if not path.is_file():
            raise ScheduleError(
                f"there is no schedule {options.schedule!r}: give auto, dense, one of {', '.join(sorted(known))}, or the path of a file "
                "that `swarm-node calibrate` wrote"
            )
        return load_schedule(path), f"schedule {path}, as asked"

    short = Path(model).name.lower()
    ours = home / FILE if home is not None else None
    if ours is not None and ours.is_file():
        schedule = load_schedule(ours)
        if schedule.model in ("", short):
            return schedule, f"schedule {ours}: calibrated here at {schedule.threshold:g}"
    fitting = [schedule for schedule in known.values() if schedule.model == short]
    if fitting:
        above = [schedule for schedule in fitting if schedule.threshold >= options.threshold]
        best = min(above or fitting, key=lambda schedule: abs(schedule.threshold - options.threshold))
        return best, f"schedule {best.source}: known for this model"
    make = f"`swarm-node calibrate --model {model}` measures one"
    if options.closed_loop:
        return known[_CAREFUL], f"schedule {_CAREFUL}: none is known for {short}, the closed loop corrects it; {make}"
    return None, f"attention dense: no schedule is known for {short} and the closed loop is off; {make}"
