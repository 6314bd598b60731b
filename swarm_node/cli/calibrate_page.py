"""Acceptance against position and against budget, as one HTML page that opens offline."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from swarm_node.observe.page import colour, empty_figure, render_page, section


@dataclass(frozen=True)
class Point:
    """Acceptance of one budget in one range of positions."""

    position: int
    """The middle of the range."""
    budget: int
    """Pages besides the reserved three."""
    mean: float
    p5: float
    error: float
    """Standard error of the 5th percentile; NaN where it is not known."""
    count: int
    """Tokens."""


def render_acceptance(model: str, threshold: float, points: Sequence[Point], schedule: Sequence[Point]) -> str:
    """The page: `points` of the search, and those of the chosen `schedule` on held-out prompts."""
    note = "5th percentile (lines, with one standard error) and mean (dotted)"
    by_budget = _figure(threshold, "position")
    for index, budget in enumerate(sorted({point.budget for point in points})):
        line = sorted((point for point in points if point.budget == budget), key=lambda point: point.position)
        _add(by_budget, f"{budget} pages", colour(index), [point.position for point in line], line)
    held = sorted(schedule, key=lambda point: point.position)
    _add(by_budget, "schedule, held out", "#000000", [point.position for point in held], held)

    by_position = _figure(threshold, "pages besides the reserved three")
    for index, position in enumerate(sorted({point.position for point in points})):
        line = sorted((point for point in points if point.position == position), key=lambda point: point.budget)
        _add(by_position, f"position {position:,}", colour(index), [point.budget for point in line], line)

    rows = "".join(
        f"<tr><td>{name}</td><td>{point.position:,}</td><td>{point.budget}</td><td>{point.mean:.3f}</td>"
        f"<td>{point.p5:.3f}{f' ± {point.error:.3f}' if math.isfinite(point.error) else ''}</td><td>{point.count:,}</td></tr>"
        for name, part in (("search", points), ("held out", held))
        for point in part
    )
    body = f"""<h1>Acceptance of sparse tokens: {html.escape(model)}</h1>
<div class="table"><table><thead><tr><th>prompts</th><th>position</th><th>pages</th><th>mean</th><th>p5</th><th>tokens</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<p>The black line is the schedule on prompts that the search did not see; dashed: the threshold of {threshold:g}.</p>"""
    sections = (section("By position", note, by_budget), section("By budget", note, by_position))
    return render_page(f"swarm-node: acceptance of {model}", body, sections)


def _figure(threshold: float, x: str) -> go.Figure:
    figure = empty_figure(share=False, x=x, y="acceptance", legend=True)
    figure.update_yaxes(range=(0.4, 1.0))
    figure.add_hline(y=threshold, line={"dash": "dash", "width": 1, "color": "#444"})
    return figure


def _add(figure: go.Figure, name: str, colour: str, x: list[int], line: list[Point]) -> None:
    errors = {"type": "data", "array": [point.error for point in line], "thickness": 1}
    figure.add_scatter(x=x, y=[point.p5 for point in line], error_y=errors, name=name, mode="lines+markers", line={"color": colour})
    means = {"color": colour, "dash": "dot", "width": 1}
    figure.add_scatter(x=x, y=[point.mean for point in line], name=f"{name}, mean", mode="lines", line=means, showlegend=False)
