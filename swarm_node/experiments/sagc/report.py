"""The group-size study as one HTML file: the tables, what was hoped for beside what was measured, and the plots."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go

from swarm_node.experiments.sagc.tables import COLUMNS, PAPER, SECONDS, STUDY_COLUMNS, Run, grouped, text, verdicts
from swarm_node.observe.page import colour, empty_figure, render_page, section
from swarm_node.observe.report import trailing_mean

Line = tuple[Sequence[float], Sequence[float]]
"""x and y."""

OVER_STEPS: tuple[tuple[str, str, str], ...] = (
    ("Group size", "log2_g", "mean log2 G of a step, over seeds"),
    ("λ", "multiplier", "the price of a straggling group, mean over seeds"),
    ("Straggler rate", "rate", "share of a step's groups, as trained on; means over seeds and 10 steps"),
    ("Seconds a step", "seconds", "CPU seconds; means over seeds and 10 steps"),
)
OVER_PROBES: tuple[tuple[str, str, str], ...] = (
    ("Accuracy over steps", "accuracy", "on held-out problems, mean over seeds"),
    ("Answer length", "length", "mean tokens of the policy's own answers, nothing thrown away"),
)


def render(results: Mapping[str, Any]) -> str:
    """The whole page, from `results.json`."""
    problems = grouped(results["runs"])
    body = [
        f"<h1>Group size under a straggler budget{' (quick run)' if results['quick'] else ''}</h1>",
        f"<p>{html.escape(PAPER)}</p>",
        "<ul>" + "".join(f"<li>{html.escape(line.removeprefix('- '))}</li>" for line in verdicts(results).splitlines()) + "</ul>",
        f"<p>{html.escape(SECONDS)}</p>",
    ]
    for task, algorithm in problems:
        rows = [row for row in results["training"] if (row["task"], row["algorithm"]) == (task, algorithm)]
        body.append(f"<h2>{html.escape(task)}, {algorithm.upper()}, {rows[0]['seeds']} seeds</h2>{_table(COLUMNS, rows, dots=True)}")
    body.append(f"<h2>Bandit .15/.40/.75</h2>{_table(STUDY_COLUMNS[:5], results['bandit']['rows'])}")
    body.append(f"<details><summary>Drawn and recorded lengths</summary>{_table(STUDY_COLUMNS, results['traces'])}</details>")
    sections = [_studies(results)]
    for (task, algorithm), controllers in problems.items():
        sections += _training(f"{task}, {algorithm.upper()}", controllers)
    return render_page("swarm-node reproduce sagc", "\n".join(body), sections)


def _table(columns: Sequence[tuple[str, str, int]], rows: Sequence[Mapping[str, Any]], *, dots: bool = False) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _, _ in columns)
    lines = []
    for index, row in enumerate(rows):
        cells = [html.escape(text(row[key], digits)) for _, key, digits in columns]
        if dots:
            cells[0] = f'<span class="dot" style="background:{colour(index)}"></span>{cells[0]}'
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _studies(results: Mapping[str, Any]) -> str:
    """Where the controllers stand on problems with a known optimum."""
    figure = empty_figure(share=False, x="straggler rate, second half", y="mean log2 G", legend=True)
    figure.update_layout(hovermode="closest")
    problems = dict.fromkeys(row["problem"] for row in (*results["bandit"]["rows"], *results["traces"]))
    for index, problem in enumerate(problems):
        rows = [row for row in (*results["bandit"]["rows"], *results["traces"]) if row["problem"] == problem]
        figure.add_scatter(
            x=[row["straggler_rate_second_half"] for row in rows],
            y=[row["mean_log2_g"] for row in rows],
            text=[row["controller"] for row in rows],
            name=problem,
            mode="markers",
            marker={"color": colour(index), "symbol": "circle" if index < 8 else "square"},
        )
    figure.add_vline(x=0.35, line={"dash": "dot", "color": "#666"})
    return section("Simulation: rate and size", "one dot a controller, one colour a problem; dotted: the budget δ", figure)


def _training(name: str, controllers: Mapping[str, Sequence[Run]]) -> list[str]:
    """The plots of one problem."""
    sections = [section(f"{name}: accuracy over seconds", "CPU seconds of training; mean over seeds at each probe", _race(controllers))]
    for title, key, note in OVER_PROBES:
        figure = _lines(controllers, partial(_probes, key=key), share=key == "accuracy")
        sections.append(section(f"{name}: {title[0].lower()}{title[1:]}", note, figure))
    for title, key, note in OVER_STEPS:
        figure = _lines(controllers, partial(_steps, key=key), share=key == "rate")
        if key == "rate":
            figure.add_hline(y=0.35, line={"dash": "dot", "color": "#666"})
        sections.append(section(f"{name}: {title[0].lower()}{title[1:]}", note, figure))
    sections.append(
        section(f"{name}: belief and truth", "p(G) as SAGC believes it, and as measured on its policy (dotted)", _beliefs(controllers))
    )
    return sections


def _lines(controllers: Mapping[str, Sequence[Run]], line: Callable[[Sequence[Run]], Line], *, share: bool) -> go.Figure:
    figure = empty_figure(share=share)
    for index, (label, runs) in enumerate(controllers.items()):
        x, y = line(runs)
        figure.add_scatter(x=list(x), y=list(y), name=label, mode="lines", line={"color": colour(index), "width": 1.5})
    return figure


def _probes(runs: Sequence[Run], key: str) -> Line:
    return [probe["step"] for probe in runs[0]["probes"]], _over_seeds([[probe[key] for probe in run["probes"]] for run in runs])


def _steps(runs: Sequence[Run], key: str) -> Line:
    values = _over_seeds([[record[key] for record in run["steps"]] for run in runs])
    return range(1, len(values) + 1), trailing_mean(values) if key in ("rate", "seconds") else values


def _race(controllers: Mapping[str, Sequence[Run]]) -> go.Figure:
    figure = _lines(controllers, lambda runs: (_probes(runs, "seconds")[1], _probes(runs, "accuracy")[1]), share=True)
    figure.update_xaxes(title="seconds")
    return figure


def _beliefs(controllers: Mapping[str, Sequence[Run]]) -> go.Figure:
    figure = empty_figure(share=True, legend=True)
    runs = controllers["SAGC"]
    steps = [probe["step"] for probe in runs[0]["probes"]]
    for index, size in enumerate(runs[0]["probes"][0]["truth"]):
        believed = _over_seeds([[record["posterior"][size] for record in run["steps"]] for run in runs])
        truth = _over_seeds([[probe["truth"][size] for probe in run["probes"]] for run in runs])
        figure.add_scatter(x=list(range(1, len(believed) + 1)), y=believed, name=f"G {size}", mode="lines", line={"color": colour(index)})
        figure.add_scatter(x=steps, y=truth, name=f"G {size}, measured", mode="lines", line={"color": colour(index), "dash": "dot"})
    return figure


def _over_seeds(values: Sequence[Sequence[float]]) -> list[float]:
    """Mean at every position; to four digits, as more would only make the file larger."""
    return [float(f"{statistics.fmean(column):.4g}") for column in zip(*values, strict=True)]
