"""A run as one HTML file: a table and plots per node. It opens offline; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import plotly.graph_objects as go

from swarm_node.observe.metrics import Metrics, StepRow, read_metrics
from swarm_node.observe.page import ReportError, colour, empty_figure, render_page, section, write_page
from swarm_node.observe.summary import NodeSummary, summarise

METRICS_FILE = "metrics.jsonl"
WINDOW = 10
"""Steps over which noisy lines are averaged; the raw values stay behind them, faint."""


@dataclass(frozen=True)
class NodeRun:
    """One node's metrics and where they were read."""

    folder: Path
    metrics: Metrics
    summary: NodeSummary


@dataclass(frozen=True)
class Plot:
    """A plot over steps: one line a node, and what is worth knowing about it."""

    title: str
    value: Callable[[StepRow], float]
    note: str
    share: bool = False
    """Whether the value is a share, drawn from 0 to 1."""
    second: Callable[[StepRow], float] | None = None
    """A second value, drawn dotted in the node's colour."""
    style: Literal["noisy", "exact", "stairs"] = "noisy"
    """Noisy values are drawn faint, with their mean over some steps before them."""


PLOTS = (
    Plot("Reward", lambda row: row.reward_mean, "mean over the node's own completions of a step"),
    Plot("Completion length", lambda row: row.length_mean, "mean, and the longest (dotted), in tokens", second=lambda row: row.length_max),
    Plot("Group size G", lambda row: row.group_size, "chosen by the controller", style="stairs"),
    Plot("λ", lambda row: row.sagc_lambda, "the controller's price of a straggling group", style="exact"),
    Plot(
        "Straggler rate",
        lambda row: row.straggler_rate,
        "and its target δ (dotted)",
        share=True,
        second=lambda row: row.straggler_target,
    ),
    Plot("Acceptance", lambda row: row.acceptance_p5, "5th percentile of sparse tokens, rescored densely", share=True),
    Plot("Sparse share", lambda row: row.sparse_share, "sampled tokens that read a part of the cache", share=True),
    Plot("Kept share", lambda row: row.kept_share, "completions that the F-TIS filter kept", share=True),
    Plot("Zero-variance share", lambda row: row.zero_variance_share, "groups whose rewards are all the same: nothing to learn", share=True),
    Plot("Foreign share", lambda row: row.foreign_share, "of the groups learned from, those that peers generated", share=True),
    Plot("KL estimate", lambda row: row.approx_kl, "policy against generator, mean over a completion's tokens"),
    Plot(
        "Importance ratio",
        lambda row: row.ratio_mean,
        "mean, and the largest (dotted), before truncation",
        second=lambda row: row.ratio_max,
    ),
    Plot(
        "Tokens/s",
        lambda row: row.rollout_tokens_per_second,
        "of rollout, and of learning (dotted)",
        second=lambda row: row.learning_tokens_per_second,
    ),
    Plot("Peers", lambda row: row.peers, "connected at the end of a step", style="stairs"),
)


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders with metrics among `folders` and right below them, each once, in order.

    Raises:
        ReportError: a folder has none.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        inside = [folder] if (folder / METRICS_FILE).is_file() else sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))
        if not inside:
            raise ReportError(f"{folder}: no {METRICS_FILE} here or in a folder right below; name a node's home folder or a run's folder")
        found.update(dict.fromkeys(inside))
    return list(found)


def read_runs(folders: Iterable[Path]) -> list[NodeRun]:
    """Metrics and summary of every node under `folders`.

    Raises:
        ReportError: a folder has no metrics, or they cannot be read.
    """
    runs = []
    for folder in find_runs(folders):
        try:
            metrics = read_metrics(folder / METRICS_FILE)
        except OSError as error:
            raise ReportError(f"{folder / METRICS_FILE} cannot be read: {error.strerror}") from error
        runs.append(NodeRun(folder, metrics, summarise(folder.absolute().name, metrics)))
    return runs


def build_report(folders: Iterable[Path], out: Path) -> Path:
    """Write the report of the nodes under `folders` to `out` and return it.

    Raises:
        ReportError: a folder has no metrics, or `out` cannot be written.
    """
    return write_report(read_runs(folders), out)


def write_report(runs: Sequence[NodeRun], out: Path) -> Path:
    """Write the report of `runs` to `out`, replacing an older one in one go, and return it.

    Raises:
        ReportError: `out` cannot be written.
    """
    return write_page(render_report(runs), out)


def render_report(runs: Sequence[NodeRun]) -> str:
    """The report's HTML."""
    figures = [(("Accuracy", "held-out problems, and harder ones than any trained on (dotted); bars: one standard error"), _accuracy(runs))]
    figures += [((plot.title, plot.note), _figure(plot, runs)) for plot in PLOTS]
    names = ", ".join(run.summary.name for run in runs)
    body = f"""<h1>Swarm run</h1>
<div class="table">{_table(runs)}</div>
<p>Noisy lines are means over {WINDOW} steps. Drag to zoom, double-click to see everything again.</p>"""
    return render_page(f"swarm-node: {names}", body, (section(title, note, figure) for (title, note), figure in figures))


def _table(runs: Sequence[NodeRun]) -> str:
    heads = (
        "node",
        "model",
        "steps",
        "accuracy",
        "groups sent",
        "received",
        "admitted",
        "foreign used",
        "rejected",
        "tokens/s",
        "minutes",
        "resumes",
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(_table_row(run, colour(i)) for i, run in enumerate(runs))}</tbody></table>"
    )


def _table_row(run: NodeRun, colour: str) -> str:
    summary = run.summary
    reasons = ", ".join(f"{reason} {count}" for reason, count in summary.rejections.items())
    cells = (
        f"{summary.steps}",
        f"{_share(summary.accuracy_before)} → {_share(summary.accuracy_after)}",
        f"{summary.groups_sent}",
        f"{summary.groups_received}",
        f"{summary.groups_admitted}",
        f"{summary.foreign_groups_used}",
        f"{sum(summary.rejections.values())}" + (f" ({reasons})" if reasons else ""),
        f"{summary.rollout_tokens_per_second:,.0f}" if math.isfinite(summary.rollout_tokens_per_second) else "-",
        f"{summary.minutes:.1f}",
        f"{summary.resumes}",
    )
    name = f'<td><span class="dot" style="background:{colour}"></span>{html.escape(summary.name)}</td>'
    name += f'<td class="text">{html.escape(summary.model or "-")}</td>'
    return f"<tr>{name}{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _accuracy(runs: Sequence[NodeRun]) -> go.Figure:
    figure = empty_figure(share=True)
    for index, run in enumerate(runs):
        for split, dash in (("eval", "solid"), ("ood", "dot")):
            rows = [row for row in run.metrics.evals if row.split == split]
            if rows:
                errors = [row.standard_error if math.isfinite(row.standard_error) else 0.0 for row in rows]
                figure.add_scatter(
                    x=[row.step for row in rows],
                    y=[row.accuracy for row in rows],
                    error_y={"type": "data", "array": errors, "thickness": 1},
                    name=run.summary.name,
                    mode="lines+markers",
                    line={"color": colour(index), "dash": dash},
                )
    return figure


def _figure(plot: Plot, runs: Sequence[NodeRun]) -> go.Figure:
    figure = empty_figure(share=plot.share)
    for index, run in enumerate(runs):
        steps = [row.step for row in run.metrics.steps]
        values = [plot.value(row) for row in run.metrics.steps]
        smooth = plot.style == "noisy" and len(values) >= 3 * WINDOW
        line = {"color": colour(index), "width": 1.5, "shape": "hv" if plot.style == "stairs" else "linear"}
        hover = {"mode": "lines", "name": run.summary.name}
        if plot.second is not None:
            second = [plot.second(row) for row in run.metrics.steps]
            figure.add_scatter(x=steps, y=second, line=line | {"dash": "dot"}, opacity=0.5, **hover)
        if smooth:
            figure.add_scatter(x=steps, y=values, line=line | {"width": 1}, opacity=0.25, mode="lines", hoverinfo="skip")
        figure.add_scatter(x=steps, y=trailing_mean(values) if smooth else values, line=line, **hover)
    return figure


def trailing_mean(values: Sequence[float]) -> list[float]:
    """The mean of every value and up to WINDOW - 1 before it, of those that were measured."""
    means = []
    for end in range(1, len(values) + 1):
        measured = [value for value in values[max(0, end - WINDOW) : end] if math.isfinite(value)]
        means.append(sum(measured) / len(measured) if measured else math.nan)
    return means


def _share(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
