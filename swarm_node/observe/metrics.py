"""`metrics.jsonl`: everything a run measured, one JSON object a line, append-only.

Three kinds of rows: `step`, `eval` and `event`. A line is written in one call and flushed, so that a killed node loses at most the
line it was writing. Nothing is ever rewritten: a node that resumes from the checkpoint of step N appends the event `resume` with
`step: N`, and readers drop the `step` and `eval` rows above N that stand before it, because those steps are taken again. A line
torn by a kill is closed by the next start and skipped by readers.

A float that was not measured is NaN here and `null` in the file (JSON has no NaN). Counts are of the row's own step and not
running totals: they can be summed over restarts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

log = logging.getLogger(__name__)

NAN = math.nan
RESUME = "resume"
"""Name of the event that supersedes rows above its step."""


def taken(source: str, default: Any = NAN) -> Any:
    """A field that is filled from one of a step's reports: the report's name and, where the field's own name is not it, the attribute's."""
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One step of one node. Shares are in [0, 1], lengths in tokens, log quantities in nats."""

    kind: ClassVar[str] = "step"

    step: int
    """Optimiser steps taken, this one included."""
    time: float
    """Unix seconds at the end of the step."""
    seconds: float = NAN
    """Wall time of the whole step."""

    # The node's own completions of this step.
    reward_mean: float = NAN
    reward_std: float = NAN
    accuracy: float = NAN
    """Share of completions whose answer is right."""
    length_mean: float = NAN
    length_max: int = 0
    truncated_share: float = NAN
    """Share that ended at the token limit."""

    # Control (SAGC).
    group_size: int = taken("decision.size", 0)
    """G of this step."""
    sagc_lambda: float = taken("observed.multiplier")
    """The controller's multiplier."""
    straggler_rate: float = NAN
    """The long-run rate that is held against the target."""
    straggler_target: float = NAN
    """δ."""
    feasible: bool = True
    """False while even the smallest G breaks the target."""

    # What was learned from.
    own_groups_used: int = taken("learned.own_groups", 0)
    foreign_groups_used: int = taken("learned.foreign_groups", 0)
    foreign_share: float = taken("learned")
    """Foreign share of the groups used."""
    pool_groups: int = 0
    """Groups in the pool after the step."""
    kept_share: float = taken("metrics")
    """Share of completions that the filter kept."""
    zero_variance_share: float = taken("learned")
    """Share of groups whose rewards are all the same: no advantage, no gradient."""

    # Learning.
    stepped: bool = taken("learned", True)
    """Whether an optimiser step was taken."""
    skipped: str = taken("learned", "")
    """Why none was, in words."""
    loss: float = taken("learned")
    grad_norm: float = taken("learned")
    learning_rate: float = taken("learned")
    ratio_mean: float = taken("metrics")
    """Importance ratio exp(theta - gen) before truncation."""
    ratio_max: float = taken("metrics")
    ratio_truncated_share: float = taken("metrics")
    """Share of tokens whose ratio was cut at C."""
    clip_fraction: float = taken("metrics")
    """Share of tokens where the policy ratio was clipped."""
    approx_kl: float = taken("metrics")
    """KL estimate, mean over a completion's tokens, averaged over completions."""
    approx_kl_sum: float = taken("metrics")
    """KL estimate, sum over a completion's tokens, averaged over completions."""
    entropy: float = taken("metrics")

    # Cost.
    rollout_tokens: int = taken("rollout.tokens", 0)
    rollout_seconds: float = taken("rollout.seconds")
    rollout_tokens_per_second: float = taken("rollout.tokens_per_second")
    slot_idle_share: float = taken("rollout")
    straggler_seconds: float = taken("rollout")
    preemptions: int = taken("rollout", 0)
    """Completions that were computed again because the KV cache was full."""
    sparse_share: float = taken("rollout")
    """Share of the sampled tokens whose attention was sparse."""
    sparse_budget: int = taken("rollout.largest_budget", 0)
    """Most pages that a sparse token could read besides the reserved three; 0: all attention was dense."""
    acceptance_p5: float = taken("rollout")
    """5th percentile of the acceptance of sparse tokens that were rescored densely."""
    schedule_change: str = taken("rollout", "")
    """What the closed loop changed in the schedule, and why."""
    distill_loss: float = taken("distilled.loss")
    """Divergence of the sparse actor from the dense policy before its adapter's update, nats a token."""
    distill_seconds: float = taken("distilled.seconds")
    learning_tokens: int = taken("learned.tokens", 0)
    learning_seconds: float = taken("learned.seconds")
    learning_tokens_per_second: float = taken("learned.tokens_per_second")

    # Network.
    peers: int = taken("network", 0)
    groups_sent: int = 0
    groups_received: int = 0
    """Arrived from peers, before any check."""
    groups_admitted: int = 0
    """Passed every check."""
    groups_dropped: int = 0
    """Arrived faster than they could be judged and learned from."""
    network_restarts: int = 0
    rejections: Mapping[str, int] = field(default_factory=dict)
    """Reject reason -> count."""
    waiting_for: str = taken("network.trouble", "")
    """What the node waits for, or what is wrong, in words."""

    @classmethod
    def gather(cls, reports: Mapping[str, object], **own: Any) -> StepRow:
        """The row of a step, from its reports (None: there was nothing to report) where a field names one, and else from `own`.

        Raises:
            KeyError, AttributeError: a report, or something in it, has not the name that a field gives.
            TypeError: a value is nowhere, or in a report and in `own`, or is of no field.
        """
        sources = {item.name: item.metadata["source"] for item in dataclasses.fields(cls) if item.metadata}
        if missing := {item.name for item in dataclasses.fields(cls)} - sources.keys() - own.keys():
            raise TypeError(f"a step's row needs {', '.join(sorted(missing))}")
        values = {}
        for name, source in sources.items():
            report, _, attribute = source.partition(".")
            if reports[report] is not None:
                values[name] = getattr(reports[report], attribute or name)
        return cls(**own, **values)


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    """One evaluation on a split that is never trained on."""

    kind: ClassVar[str] = "eval"

    step: int
    time: float
    task: str
    split: str
    problems: int
    samples: int
    """Completions a problem."""
    accuracy: float
    """Share of right answers over all completions."""
    standard_error: float = NAN
    """Of the accuracy; problems are the independent draws."""
    reward_mean: float = NAN
    length_mean: float = NAN
    length_max: int = 0
    truncated_share: float = NAN
    left_out: int = 0
    """Of the problems, those whose prompt leaves no room for a completion, or which could not be made: they count nowhere."""
    seconds: float = NAN


@dataclass(frozen=True, kw_only=True)
class EventRow:
    """Something that happened: start, resume, checkpoint, stop, trouble."""

    kind: ClassVar[str] = "event"

    step: int
    time: float
    name: str
    detail: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Facts for programs; `start` carries `node`, `model`, `peer_id`, `swarm` and `task`."""


Row = StepRow | EvalRow | EventRow
KINDS: Mapping[str, type[Row]] = {row.kind: row for row in (StepRow, EvalRow, EventRow)}
_READERS: Mapping[type[Row], TypeAdapter[Row]] = {row: TypeAdapter(row) for row in KINDS.values()}


def encode_row(row: Row) -> str:
    """The row's line, without the line end. Floats that are not finite become null."""
    values: dict[str, Any] = {"kind": row.kind}
    for item in dataclasses.fields(row):
        value = getattr(row, item.name)
        values[item.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)


def decode_row(line: str) -> Row | None:
    """The row that a line holds, or None for a torn or damaged line or a kind of a newer version. Fields it does not know are ignored."""
    try:
        values = json.loads(line, parse_int=_bounded)
    except (ValueError, RecursionError):
        return None
    kind = KINDS.get(str(values.pop("kind", ""))) if isinstance(values, dict) else None
    if kind is None:
        return None
    known = {item.name: item.type for item in dataclasses.fields(kind)}
    unmeasured = (None, math.inf, -math.inf)
    fields: dict[str, Any] = {name: NAN if value in unmeasured else value for name, value in values.items() if name in known}
    if any(isinstance(value, str) != (known[name] == "str") for name, value in fields.items()):  # pydantic would read a text as a number
        return None
    try:
        return _READERS[kind].validate_python(fields)
    except ValidationError:  # a field is missing, or of another type
        return None


def _bounded(digits: str) -> int:
    """An integer that sums and plots can hold. Raises ValueError."""
    if len(digits) > 18:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _plain(value: Any) -> Any:
    """numpy scalars and read-only mappings as JSON knows them."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a metrics row cannot hold a {type(value).__name__}")


class MetricsWriter:
    """Appends rows to one file. Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, creating it where it is missing; a torn last line is closed first."""
        self._torn = _ends_torn(path)
        self.found_rows = path.exists() and path.stat().st_size > 0
        """Whether the file held rows before."""
        self.lost = 0
        """Rows that could not be written, because the disk is full for example."""
        self._file = path.open("ab", buffering=0)  # a buffer would keep what the disk refused, and write it into the middle of another row

    def write(self, row: Row) -> None:
        """Append a row. A disk that refuses it costs the row and not the run; it is counted in `lost`."""
        # A surrogate (of a path that is not UTF-8) is written as JSON's escape of it.
        line = ("\n" * self._torn + encode_row(row) + "\n").encode("utf-8", "backslashreplace")
        try:
            written = self._file.write(line)
        except OSError as error:
            self._lose(str(error))
            return
        self._torn = written < len(line)
        if self._torn:
            self._lose("the disk took a part of a row")

    def resume(self, step: int, time: float) -> None:
        """Say that the run goes on from the checkpoint of `step`: rows above it that stand before are superseded."""
        self.write(EventRow(step=step, time=time, name=RESUME))

    def close(self) -> None:
        """Close the file. What it refuses only now is counted in `lost`, like a row."""
        try:
            self._file.close()
        except OSError as error:  # a network disk says so only now
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if self.lost == 1:
            log.warning("metrics are being lost: %s", reason)


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


@dataclass(frozen=True)
class Metrics:
    """A file's rows as they count: superseded ones dropped, in the order of writing."""

    steps: tuple[StepRow, ...]
    evals: tuple[EvalRow, ...]
    events: tuple[EventRow, ...]
    skipped: int
    """Lines that could not be read: torn by a kill, damaged, or of a newer version."""

    def facts(self) -> dict[str, Any]:
        """What the latest `start` event said of the node."""
        starts = [event for event in self.events if event.name == "start"]
        return dict(starts[-1].data) if starts else {}


def read_metrics(path: Path) -> Metrics:
    """Read a `metrics.jsonl`, also while a node writes it. Lines that cannot be read are passed over, with one warning.

    Raises:
        OSError: the file cannot be read.
    """
    steps: list[StepRow] = []
    evals: list[EvalRow] = []
    events: list[EventRow] = []
    skipped = first = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            row = decode_row(line)
            if isinstance(row, StepRow):
                steps.append(row)
            elif isinstance(row, EvalRow):
                evals.append(row)
            elif isinstance(row, EventRow):
                events.append(row)
                if row.name == RESUME:
                    steps = [earlier for earlier in steps if earlier.step <= row.step]
                    evals = [earlier for earlier in evals if earlier.step <= row.step]
            elif line.strip():
                skipped += 1
                first = first or number
    if skipped:
        log.warning("%s: lines that cannot be read are passed over: %d, the first is line %d", path, skipped, first)
    return Metrics(tuple(steps), tuple(evals), tuple(events), skipped)


class Increments:
    """Turns running totals into counts since the last call, as rows want them. A total that fell (its process restarted) counts from 0."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def of(self, totals: Mapping[str, int]) -> dict[str, int]:
        """The increase of every total since the last call."""
        last = {name: self._last.get(name, 0) for name in totals}
        self._last |= totals
        return {name: total - last[name] if total >= last[name] else total for name, total in totals.items()}
