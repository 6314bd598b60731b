"""Status, metrics file, step line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarm_node.observe.metrics import EvalRow, EventRow, Increments, Metrics, MetricsWriter, StepRow, decode_row, encode_row, read_metrics
from swarm_node.observe.status import Snapshot, State, Status
from swarm_node.observe.status_file import StatusError, StatusFile, read_status
from swarm_node.observe.stepline import step_line
from swarm_node.observe.summary import summarise
from tests.support.waiting import HANG_S


def row(step: int, **values: object) -> StepRow:
    return StepRow(**{"step": step, "time": 1000.0 + step, **values})  # type: ignore[arg-type]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# -- status ---------------------------------------------------------------------------------------------------------------------------


def test_the_status_says_since_when_and_waiting_for_what() -> None:
    clock = Clock()
    status = Status(clock)
    assert status.snapshot() == Snapshot(State.STARTING, 100.0, "", 0)
    clock.now = 107.0
    status.enter(State.EXCHANGING, waiting_for="peers", step=12)
    assert status.snapshot().describe(now=110.0) == "exchanging for 3 s at step 12, waiting for peers"


def test_entering_the_same_state_keeps_its_since_and_a_new_state_keeps_the_step() -> None:
    clock = Clock()
    status = Status(clock)
    status.enter(State.LEARNING, step=3)
    clock.now = 105.0
    status.enter(State.LEARNING, waiting_for="memory")
    assert status.snapshot() == Snapshot(State.LEARNING, 100.0, "memory", 3)
    status.enter(State.STOPPING)
    assert status.snapshot() == Snapshot(State.STOPPING, 105.0, "", 3)


def test_no_reader_sees_half_a_change() -> None:
    status = Status()
    torn: list[Snapshot] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            snapshot = status.snapshot()
            if snapshot.waiting_for and snapshot.waiting_for != snapshot.state:
                torn.append(snapshot)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(5000):
        state = (State.LEARNING, State.EXCHANGING)[number % 2]
        status.enter(state, waiting_for=state.value)
    done.set()
    reader.join()
    assert torn == []


def test_a_change_made_while_another_is_made_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads enter states at once. The second comes while the first stands between what it read and what it writes."""
    second_has_moved, lock = threading.Event(), threading.Lock

    class Announcing:
        """A lock that says when somebody waits for it."""

        def __init__(self) -> None:
            self._lock = lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                second_has_moved.set()
                self._lock.acquire()

        def __exit__(self, *error: object) -> None:
            self._lock.release()

    def enter() -> None:
        assert status is not None
        status.enter(State.CHECKPOINTING, step=7)
        second_has_moved.set()

    second = threading.Thread(target=enter)

    def clock() -> float:
        if second.ident is None and status is not None:
            second.start()
            assert second_has_moved.wait(HANG_S)
        return 1.0

    status: Status | None = None
    monkeypatch.setattr(threading, "Lock", Announcing)
    status = Status(clock)
    monkeypatch.undo()
    status.enter(State.LEARNING)
    second.join()
    assert status.snapshot() == Snapshot(State.CHECKPOINTING, 1.0, "", 7)


# -- metrics --------------------------------------------------------------------------------------------------------------------------


def test_rows_survive_the_file_and_what_was_not_measured_stays_so() -> None:
    step = row(3, reward_mean=0.25, approx_kl=math.inf, rejections={"stale": 2}, stepped=False, waiting_for="peers → soon")
    event = EventRow(step=3, time=4.0, name="start", data={"model": "tiny-s", "lora": False})
    evaluation = EvalRow(step=3, time=4.0, task="chain-sum", split="eval", problems=10, samples=2, accuracy=0.5)
    back = decode_row(encode_row(step))
    assert isinstance(back, StepRow)
    assert math.isnan(back.approx_kl)
    assert math.isnan(back.loss)
    finite = {name: value for name, value in dataclasses.asdict(step).items() if not isinstance(value, float) or math.isfinite(value)}
    assert {name: getattr(back, name) for name in finite} == finite
    assert decode_row(encode_row(event)) == event
    again = decode_row(encode_row(evaluation))
    assert isinstance(again, EvalRow)
    assert again.accuracy == 0.5


def test_a_step_s_row_that_lacks_a_value_or_has_it_twice_is_an_error() -> None:
    own: dict[str, Any] = {item.name: 0 for item in dataclasses.fields(StepRow) if not item.metadata}
    reports: dict[str, object] = {item.metadata["source"].partition(".")[0]: None for item in dataclasses.fields(StepRow) if item.metadata}
    assert StepRow.gather(reports, **own) == StepRow(**own)
    with pytest.raises(TypeError, match="needs pool_groups, seconds"):
        StepRow.gather(reports, **{name: value for name, value in own.items() if name not in ("seconds", "pool_groups")})
    network = SimpleNamespace(peers=3, trouble="no peers yet", groups_sent=9)
    row = StepRow.gather({**reports, "network": network}, **own)
    assert (row.peers, row.waiting_for, row.groups_sent) == (3, "no peers yet", 0)
    with pytest.raises(TypeError, match="peers"):
        StepRow.gather({**reports, "network": network}, **own, peers=1)
    with pytest.raises(TypeError, match="colour"):
        StepRow.gather(reports, **own, colour=1)
    with pytest.raises(AttributeError, match="trouble"):
        StepRow.gather({**reports, "network": SimpleNamespace(peers=3)}, **own)
    del reports["network"]
    with pytest.raises(KeyError, match="network"):
        StepRow.gather(reports, **own)


def test_a_line_is_plain_json_with_its_kind_first() -> None:
    line = encode_row(row(1, reward_mean=np.float32(0.5), length_max=np.int64(7)))
    assert line.startswith('{"kind":"step","step":1,')
    assert "\n" not in line
    values = json.loads(line, parse_constant=pytest.fail)
    assert (values["reward_mean"], values["length_max"], values["loss"]) == (0.5, 7, None)


def test_fields_and_kinds_of_newer_versions_are_ignored() -> None:
    newer = decode_row('{"kind":"step","step":1,"time":2.0,"colour":"red"}')
    assert isinstance(newer, StepRow)
    assert (newer.step, newer.time) == (1, 2.0)
    assert decode_row('{"kind":"dream","step":1,"time":2.0}') is None
    assert decode_row('{"kind":"step"}') is None
    assert decode_row("[]") is None
    assert decode_row('{"kind":"step","step":"many","time":2.0}') is None
    assert decode_row('{"kind":"step","step":null,"time":2.0}') is None
    assert decode_row('{"kind":"step","step":1,"time":2.0,"rejections":[1]}') is None
    assert decode_row('{"kind":["step"],"step":1,"time":2.0}') is None
    assert decode_row("[" * 100_000) is None
    for number in ('"1"', "1" * 19, "1" * 5000, "NaN", "1e999", "1.5"):
        assert decode_row(f'{{"kind":"step","step":1,"time":2.0,"length_max":{number}}}') is None, number
    for number in ("NaN", "Infinity", "-1e999", "null"):
        found = decode_row(f'{{"kind":"step","step":1,"time":2.0,"loss":{number}}}')
        assert isinstance(found, StepRow)
        assert math.isnan(found.loss)


def test_lines_that_cannot_be_read_are_passed_over_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [encode_row(row(1)).encode(), b"\xff\x00\xfe", b'{"kind":"step","step":2', b"", encode_row(row(3)).encode(), b'["a", "list"]']
    path.write_bytes(b"\n".join(lines))
    found = read_metrics(path)
    assert [step.step for step in found.steps] == [1, 3]
    assert found.skipped == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: lines that cannot be read are passed over: 3, the first is line 2"
    ]


def test_every_row_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(row(1))
    assert [step.step for step in read_metrics(tmp_path / "metrics.jsonl").steps] == [1]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_torn_by_a_kill_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2):
        writer.write(row(step))
    writer.close()
    path.write_bytes(path.read_bytes()[:-cut] if cut > 1 else path.read_bytes() + b'{"kind":"st\xc3')
    writer = MetricsWriter(path)
    writer.write(row(3))
    writer.close()
    metrics = read_metrics(path)
    assert [step.step for step in metrics.steps] == ([1, 2, 3] if cut == 1 else [1, 3])
    assert metrics.skipped == 1


def test_a_line_that_only_lacks_its_end_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode_row(row(1)))
    writer = MetricsWriter(path)
    writer.write(row(2))
    assert [step.step for step in read_metrics(path).steps] == [1, 2]


def test_steps_taken_again_after_a_resume_replace_the_ones_that_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2, 3, 4):
        writer.write(row(step, reward_mean=0.0, groups_sent=1))
    writer.write(EvalRow(step=4, time=0.0, task="t", split="eval", problems=1, samples=1, accuracy=0.1))
    writer.close()
    lines = path.read_text().splitlines()
    writer = MetricsWriter(path)
    writer.resume(2, time=5.0)
    for step in (3, 4, 5):
        writer.write(row(step, reward_mean=1.0, groups_sent=1))
    metrics = read_metrics(path)
    assert [(step.step, step.reward_mean) for step in metrics.steps] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert metrics.evals == ()
    assert path.read_text().splitlines()[: len(lines)] == lines, "nothing is ever rewritten"


def test_increments_turn_totals_into_counts_since_the_last_row() -> None:
    increments = Increments()
    assert increments.of({"stale": 2, "replay": 0}) == {"stale": 2, "replay": 0}
    assert increments.of({"stale": 5, "replay": 1}) == {"stale": 3, "replay": 1}
    assert increments.of({"stale": 5, "replay": 1}) == {"stale": 0, "replay": 0}
    assert increments.of({"stale": 1}) == {"stale": 1}, "a total that fell started again from 0"


# -- the step line --------------------------------------------------------------------------------------------------------------------


def test_the_step_line_reads_as_documented() -> None:
    line = step_line(
        row(
            12,
            reward_mean=0.4112,
            reward_std=0.32,
            length_mean=85.2,
            length_max=192,
            truncated_share=0.0625,
            group_size=8,
            sagc_lambda=0.45,
            straggler_rate=0.31,
            straggler_target=0.35,
            own_groups_used=4,
            foreign_groups_used=3,
            kept_share=0.8125,
            zero_variance_share=0.25,
            ratio_mean=1.02,
            ratio_max=1.9,
            approx_kl=0.00312,
            approx_kl_sum=0.21,
            rollout_tokens_per_second=1234.5,
            learning_tokens_per_second=2100.0,
            peers=2,
        )
    )
    assert line == (
        "step 12 · reward 0.41 ± 0.32 · length 85/192, 6% cut · G 8, λ 0.45, stragglers 31% of 35% allowed · groups 4 own + 3 foreign"
        " · kept 81%, zero-variance 25% · ratio 1.02 (max 1.90), KL 0.0031 (sum 0.21) · tokens/s 1,234 rollout, 2,100 learning · peers 2"
    )


def test_the_step_line_says_what_is_unusual_and_only_then() -> None:
    usual = step_line(row(1, truncated_share=0.0))
    assert "cut" not in usual
    assert "infeasible" not in usual
    assert "waiting" not in usual
    unusual = step_line(row(1, feasible=False, stepped=False, skipped="no groups", waiting_for="peers: dialling 2 addresses"))
    assert "infeasible" in unusual
    assert "no optimiser step: no groups" in unusual
    assert unusual.endswith("waiting for peers: dialling 2 addresses")


def test_what_was_not_measured_shows_as_a_dash() -> None:
    line = step_line(row(1))
    assert "nan" not in line.lower()
    assert "reward - ± -" in line


# -- the summary ----------------------------------------------------------------------------------------------------------------------


def test_the_summary_adds_up_and_takes_the_first_and_last_held_out_evaluation(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(EventRow(step=0, time=0.0, name="start", data={"node": "ada", "model": "tiny-s", "lora": True}))
    for step, accuracy, split in ((0, 0.25, "eval"), (0, 0.05, "ood"), (2, 0.4, "eval"), (2, 0.9, "ood")):
        writer.write(EvalRow(step=step, time=0.0, task="t", split=split, problems=10, samples=1, accuracy=accuracy, standard_error=0.02))
    for step in (1, 2):
        writer.write(
            row(
                step,
                seconds=30.0,
                groups_sent=4,
                groups_received=5,
                groups_admitted=3,
                foreign_groups_used=2,
                rejections={"stale": 1, "replay": step},
                rollout_tokens=100,
                rollout_seconds=4.0,
            )
        )
    summary = summarise("folder", read_metrics(tmp_path / "metrics.jsonl"))
    assert (summary.name, summary.model, summary.steps) == ("ada", "tiny-s (LoRA)", 2)
    assert (summary.accuracy_before, summary.accuracy_after, summary.accuracy_standard_error) == (0.25, 0.4, 0.02)
    assert (summary.groups_sent, summary.groups_received, summary.groups_admitted, summary.foreign_groups_used) == (8, 10, 6, 4)
    assert summary.rejections == {"replay": 3, "stale": 2}
    assert (summary.rollout_tokens_per_second, summary.minutes, summary.resumes) == (25.0, 1.0, 0)


def test_a_run_without_evaluations_has_no_accuracy() -> None:
    summary = summarise("folder", Metrics((), (), (), 0))
    assert (summary.name, summary.as_json()["accuracy_after"]) == ("folder", None)


def test_observing_needs_no_torch() -> None:
    code = "import sys; from swarm_node.observe import report, status_file, stepline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_disk_costs_rows_and_never_the_run() -> None:
    writer = MetricsWriter(Path("/dev/full"))
    writer.write(EventRow(step=1, time=0.0, name="start"))
    writer.write(EventRow(step=2, time=0.0, name="stop"))
    assert writer.lost == 2


def test_a_row_of_which_the_disk_took_a_part_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(row(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))  # of the next row, ten bytes fit
    try:
        writer.write(row(2))
        writer.write(row(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(row(4))
    writer.close()
    assert writer.lost == 2
    found = read_metrics(path)
    assert ([step.step for step in found.steps], found.skipped) == ([1, 4], 1)


def test_a_name_that_is_not_utf_8_comes_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(EventRow(step=0, time=0.0, name="start", data={"node": name}))
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl").facts() == {"node": name}


def test_a_status_that_cannot_be_described_or_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    described = threading.Semaphore(0)

    def describe() -> dict[str, object]:
        described.release()
        if len(caplog.records) < 1:
            raise KeyError("a bug")
        return {"state": "learning"}

    status = StatusFile(tmp_path, describe, interval=0.001)
    for _ in range(3):
        assert described.acquire(timeout=HANG_S)
    status.close()
    assert read_status(tmp_path) == {"state": "learning"}
    assert "status.json cannot be written: KeyError('a bug')" in caplog.text
    (tmp_path / "status.json").unlink()
    (tmp_path / "status.json").mkdir()
    StatusFile(tmp_path, describe).close()
    with pytest.raises(StatusError, match=r"status\.json cannot be read: Is a directory"):
        read_status(tmp_path)


def test_a_writer_says_whether_there_were_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path)
    assert not first.found_rows
    first.write(EventRow(step=1, time=0.0, name="start"))
    assert MetricsWriter(path).found_rows
