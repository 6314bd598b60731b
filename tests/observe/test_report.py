"""The report: one file that opens offline and holds what was measured."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from swarm_node.observe.metrics import EvalRow, EventRow, MetricsWriter, StepRow
from swarm_node.observe.page import ReportError
from swarm_node.observe.report import PLOTS, build_report, find_runs, read_runs, trailing_mean


def write_run(folder: Path, name: str, rewards: list[float]) -> Path:
    """A node's home with one step a reward and an evaluation before and after."""
    folder.mkdir(parents=True)
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.write(EventRow(step=0, time=0.0, name="start", data={"node": name, "model": "tiny-s <full>"}))
    evaluation: dict[str, Any] = {"task": "chain-sum", "split": "eval", "problems": 50, "samples": 2, "standard_error": 0.03}
    writer.write(EvalRow(step=0, time=0.0, accuracy=0.25, **evaluation))
    for step, reward in enumerate(rewards, start=1):
        writer.write(StepRow(step=step, time=float(step), reward_mean=reward, group_size=8, sagc_lambda=0.5, rejections={"stale": 1}))
    writer.write(EvalRow(step=len(rewards), time=9.0, accuracy=0.75, **evaluation))
    writer.close()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder / "ada", "ada", [0.1, 0.2, 0.3125])
    write_run(folder / "ben", "ben & co", [0.5])
    return folder


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of the run."""
    out = tmp_path_factory.mktemp("out") / "below" / "report.html"
    assert build_report([run], out) == out
    assert list(out.parent.iterdir()) == [out], "no temporary file stays"
    return out.read_text(encoding="utf-8")


def test_the_report_is_one_file_that_loads_nothing(page: str) -> None:
    markup = re.sub(r"<script[^>]*>.*?</script>", "<script></script>", page, flags=re.DOTALL)
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page[: page.index("<script>")] + markup) == []


def test_the_report_holds_a_row_a_node_and_a_plot_a_quantity(page: str) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", page[page.index("<tbody>") : page.index("</tbody>")], flags=re.DOTALL)
    cells = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row, flags=re.DOTALL)] for row in rows]
    assert cells[0][:4] == ["ada", "tiny-s &lt;full&gt;", "3", "0.250 → 0.750"]
    assert cells[1][0] == "ben &amp; co"
    assert cells[0][8] == "3 (stale 3)"
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == ["Accuracy", *(plot.title for plot in PLOTS)]
    for needed in ("Reward", "Completion length", "Group size G", "λ", "Kept share", "Foreign share", "Tokens/s"):
        assert needed in titles


def test_the_plotted_numbers_are_those_of_the_metrics(page: str) -> None:
    section = next(part for part in page.split("<section>") if part.startswith("<h2>Reward</h2>"))
    plotted = re.search(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*\{"', section, flags=re.DOTALL)
    assert plotted
    traces = json.loads(plotted[1])
    assert [(trace["name"], trace["x"], trace["y"]) for trace in traces] == [
        ("ada", [1, 2, 3], [0.1, 0.2, 0.3125]),
        ("ben & co", [1], [0.5]),
    ]


def test_noisy_lines_are_averaged_over_what_was_measured() -> None:
    assert trailing_mean([1.0, 3.0]) == [1.0, 2.0]
    assert trailing_mean([float(step) for step in range(12)])[-1] == sum(range(2, 12)) / 10
    means = trailing_mean([math.nan, 2.0, math.nan, 4.0])
    assert math.isnan(means[0])
    assert means[1:] == [2.0, 2.0, 3.0]


def test_a_node_without_a_single_step_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "metrics.jsonl").write_text("")
    page = build_report([tmp_path / "home"], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "- → -" in page


def test_nodes_are_found_in_a_home_or_right_below_a_run_each_once(run: Path) -> None:
    assert find_runs([run / "ben", run]) == [run / "ben", run / "ada"]
    assert [node.summary.name for node in read_runs([run])] == ["ada", "ben & co"]


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=rf"{tmp_path}: no metrics\.jsonl here or in a folder right below"):
        build_report([tmp_path], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_named(run: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.html cannot be written: .*--out"):
        build_report([run], run / "ada" / "metrics.jsonl" / "report.html")
