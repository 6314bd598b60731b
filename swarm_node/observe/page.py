"""What every report is made of: one HTML file with tables and plots. It opens offline; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#666666", "#b8a900")
"""Okabe and Ito's palette, told apart with any colour vision."""

STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 1400px; padding: 0 1rem; }
main { margin-top: 1.5rem; display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr)); gap: 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.05rem; margin: 0; } p { margin: 0; color: #666; }
section { min-width: 0; }
.table { overflow-x: auto; margin-bottom: 2rem; }
table { border-collapse: collapse; } th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th { color: #666; font-weight: 600; white-space: nowrap; } th:nth-child(-n+2), td:first-child, .text { text-align: left; }
.dot { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }
"""


class ReportError(ValueError):
    """There is nothing to report on, or the report cannot be written."""


def colour(index: int) -> str:
    """The colour of the line number `index`."""
    return COLOURS[index % len(COLOURS)]


def empty_figure(*, share: bool, x: str = "step", y: str = "", legend: bool = False) -> go.Figure:
    """A figure to add lines to. Shares are drawn from 0 to 1; without a legend, a table says which colour is which line."""
    figure = go.Figure()
    figure.update_layout(
        height=340 if legend else 300,
        margin={"l": 55, "r": 15, "t": 10, "b": 40},
        template="plotly_white",
        showlegend=legend,
        hovermode="x unified",
    )
    if legend:
        figure.update_layout(legend={"orientation": "h", "y": -0.25})
    figure.update_xaxes(title=x, rangemode="tozero")
    figure.update_yaxes(title=y or None, range=(-0.02, 1.02) if share else None, rangemode="tozero")
    return figure


def section(title: str, note: str, figure: go.Figure) -> str:
    """One plot with its heading, which no other plot of the page may have: the same values give the same page, to the byte."""
    text = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        config={"displayModeBar": False, "responsive": True},
        div_id=f"plot-{zlib.crc32(title.encode()):08x}",
    )
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>{text}</section>"


def render_page(title: str, body: str, sections: Iterable[str]) -> str:
    """The whole page: `body` is HTML, then the plots."""
    plots = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
{body}
<main>{plots}</main>
</body>
</html>
"""


def write_page(page: str, out: Path) -> Path:
    """Write `page` to `out`, replacing an older one in one go, and return it.

    Raises:
        ReportError: `out` cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.{os.getpid()}")
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}; choose another file with --out") from error
    return out
