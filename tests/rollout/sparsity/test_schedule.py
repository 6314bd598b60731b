"""Sparrow's schedules: which budget holds where, the published tables, and what a file may say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from swarm_node.rollout.sparsity.schedule import DENSE, PUBLISHED, Schedule, ScheduleError, load_schedule, save_schedule

STEPS = Schedule((29, 61, 93), 0.86, "by hand")


def test_a_bin_is_two_thousand_positions_and_the_last_entry_holds_beyond_the_table() -> None:
    positions = np.array([0, 1999, 2000, 3999, 4000, 5999, 6000, 1_000_000])
    budgets = STEPS.budgets_at(positions)
    assert budgets.tolist() == [29, 29, 61, 61, 93, 93, 93, 93]
    assert budgets.dtype == np.int32
    assert STEPS.budgets_at(np.zeros((2, 3), dtype=np.int64)).shape == (2, 3)


def test_published_tables_are_those_of_the_paper() -> None:
    assert sorted(PUBLISHED) == [
        "qwen3-1.7b@0.80",
        "qwen3-1.7b@0.86",
        "qwen3-1.7b@0.92",
        "qwen3-14b@0.86",
        "qwen3-4b@0.86",
        "qwen3-8b@0.86",
    ]
    assert all(len(schedule.pages) == 20 for schedule in PUBLISHED.values())
    assert PUBLISHED["qwen3-1.7b@0.86"].pages == (29, 61, 93, 93, 125, 157, 189, 221, 221, *[253] * 11)
    assert sum(PUBLISHED["qwen3-4b@0.86"].pages) == 29 + 45 + 61 + 77 + 93 + 125 + 157 + 221 + 2 * 253 + 4 * 317 + 4 * 381 + 2 * 509
    assert sum(PUBLISHED["qwen3-8b@0.86"].pages) == 29 + 45 + 61 + 77 + 125 + 157 + 189 + 4 * 253 + 6 * 317 + 385 + 2 * 445
    assert sum(PUBLISHED["qwen3-14b@0.86"].pages) == 29 + 45 + 77 + 125 + 253 + 10 * 381 + 509 + 2 * 637 + 2 * 893
    assert all(name == schedule.source == f"{schedule.model}@{schedule.threshold:.2f}" for name, schedule in PUBLISHED.items())


def test_published_budgets_never_fall_with_position_and_grow_with_the_threshold() -> None:
    for schedule in PUBLISHED.values():
        assert list(schedule.pages) == sorted(schedule.pages)
    loose, usual, strict = (PUBLISHED[f"qwen3-1.7b@{threshold}"].pages for threshold in ("0.80", "0.86", "0.92"))
    assert all(a <= b <= c for a, b, c in zip(loose, usual, strict, strict=True))


def test_a_saved_schedule_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    schedule = Schedule((100, 12, DENSE), 0.8, "calibrated", "smollm2-135m")
    save_schedule(path, schedule)
    assert load_schedule(path) == schedule
    assert [file.name for file in tmp_path.iterdir()] == ["schedule.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pages": []}, "0 bins"),
        ({"pages": [29, 0]}, "bin 1 .* 0 pages"),
        ({"pages": [DENSE + 1]}, str(DENSE + 1)),
        ({"pages": [29.5]}, "pages.0"),
        ({"pages": ["29"]}, "pages.0"),
        ({"threshold": 1.0}, "threshold of 1.0"),
        ({"version": 2}, "version"),
        ({"bin_tokens": 1000}, "bin_tokens"),
        ({"budget": 3}, "budget"),
    ],
)
def test_a_file_with_a_bad_value_is_refused_and_the_value_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "schedule.json"
    save_schedule(path, STEPS)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ScheduleError, match=named) as caught:
        load_schedule(path)
    assert str(path) in str(caught.value)


def test_what_is_no_schedule_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="swarm-node calibrate"):
        load_schedule(tmp_path / "missing.json")
    (tmp_path / "text").write_text("pages: 3")
    with pytest.raises(ScheduleError, match="JSON"):
        load_schedule(tmp_path / "text")
