"""What the rollout benchmark found, for people: tables, a summary in Markdown, and a page with tokens/s against context length."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from swarm_node.observe.page import colour, empty_figure, render_page, section, write_page

Rows = list[tuple[str, ...]]
Table = tuple[tuple[str, ...], Rows]
"""Heads and rows."""
SPEEDS = "Tokens/s against context length"
METHOD = (
    "Decode seconds: of all engines, the time of many tokens less that of one, so prefill is not in it. After short prompts every run "
    "starts from nothing. Over long contexts the prompts are computed once and kept: blocks of our dense and sparse steps alternate over "
    "one batch, and the others run between the blocks. Medians over rounds; ratios of medians. Ours draws from the whole vocabulary and "
    "records log-probs; transformers and vLLM take the likeliest token, which is less work."
)


def ratio_table(results: Mapping[str, Any]) -> Table:
    """Measured and predicted, and why there is none."""
    rows: Rows = [
        (name, _times(entry["measured"]), _times(entry["predicted"]), entry.get("reason", "")) for name, entry in results["ratios"].items()
    ]
    return ("ratio", "measured", "predicted", ""), rows


def case_table(results: Mapping[str, Any]) -> Table:
    """Every engine's decode in every case."""
    rows: Rows = [
        (
            case["case"],
            case["engine"],
            str(case["batch"]),
            f"{case['context']:.0f}",
            "-" if case["budget"] is None else f"{case['budget']:.0f}",
            f"{case['tokens_per_second']:.1f}",
            f"{case['ms_per_step']:.2f}",
            "-" if case["share_of_floor"] is None else f"{case['share_of_floor']:.2f}",
        )
        for case in results["cases"]
    ]
    return ("case", "engine", "batch", "context", "budget", "tokens/s", "ms/step", "of floor"), rows


def prefill_table(results: Mapping[str, Any]) -> Table:
    """What prompts cost: seconds to the first token after short ones, and our own seconds of the long ones."""
    rows: Rows = []
    for entry in results["prefill"]:
        seconds = statistics.median(entry["seconds"])
        rows.append((entry["case"], entry["engine"], str(entry["tokens"]), f"{seconds:.3f}", f"{entry['tokens'] / seconds:.0f}"))
    return ("prefill", "engine", "tokens", "seconds", "tokens/s"), rows


def notes(results: Mapping[str, Any]) -> list[str]:
    """What belongs below the tables."""
    shared, schedule = results["shared_prompt"], results["schedule"]
    found = [
        results["machine"]["description"] + (f", vllm {results['vllm']}" if results["vllm"] else ""),
        f"model {results['model']}; sparse: " + (schedule["why"] if schedule else "left out"),
        f"A group of {shared['group']} over a prompt of {shared['prompt']} tokens has its first tokens in {shared['group_vs_one']:.2f} "
        "times the seconds of one completion.",
        METHOD,
    ]
    return found + [f"Case {entry['case']} is left out: {entry['reason']}." for entry in results["left_out"]]


def summary(results: Mapping[str, Any]) -> str:
    """Markdown: the command, the hardware, the tables."""
    lines = ["# Rollout benchmark" + (" (quick run)" if results["quick"] else ""), "", f"`{results['command']}`", ""]
    for table in (ratio_table(results), case_table(results), prefill_table(results)):
        lines += [*_markdown(table), ""]
    lines += [f"- {note}" for note in notes(results)]
    return "\n".join(lines) + "\n"


def render(results: Mapping[str, Any]) -> str:
    """The page, from the results of `bench_rollout`."""
    body = [f"<h1>Rollout benchmark{' (quick run)' if results['quick'] else ''}</h1>", f"<p>{html.escape(results['command'])}</p>"]
    body += [_html(ratio_table(results)), _html(case_table(results)), _html(prefill_table(results))]
    body.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes(results)) + "</ul>")
    sections = [
        section(SPEEDS, "decode at batch 8; dotted: what memory reads allow", _speeds(results, 8)),
        section(f"{SPEEDS}, batch 32", "decode at batch 32; dotted: what memory reads allow", _speeds(results, 32)),
    ]
    return render_page("Rollout benchmark", "\n".join(body), sections)


def _speeds(results: Mapping[str, Any], batch: int) -> go.Figure:
    figure = empty_figure(share=False, x="context, tokens", y="tokens/s", legend=True)
    cases = [case for case in results["cases"] if case["batch"] == batch and not case["shared"]]
    engines = list(dict.fromkeys(case["engine"] for case in cases))
    for index, engine in enumerate(engines):
        own = sorted((case for case in cases if case["engine"] == engine), key=lambda case: case["context"])
        contexts = [round(case["context"]) for case in own]
        line = {"color": colour(index), "width": 1.5}
        figure.add_scatter(x=contexts, y=_rates(own, "tokens_per_second"), name=engine, mode="lines+markers", line=line)
        if engine in ("dense", "sparse"):
            dotted = {**line, "dash": "dot"}
            figure.add_scatter(x=contexts, y=_rates(own, "floor_tokens_per_second"), name=f"{engine}, floor", mode="lines", line=dotted)
    return figure


def _rates(cases: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(f"{case[key]:.4g}") for case in cases]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def _markdown(table: Table) -> list[str]:
    heads, rows = table
    return ["| " + " | ".join(line) + " |" for line in (heads, ("---",) * len(heads), *rows)]


def _html(table: Table) -> str:
    heads, rows = table
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    cells = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="table"><table><tr>{head}</tr>{cells}</table></div>'


def _cell(text: str) -> str:
    number = text == "-" or text[:1].isdigit()
    opening = "<td>" if number else '<td class="text">'
    return f"{opening}{html.escape(text)}</td>"


def write_results(results: Mapping[str, Any], out: Path) -> None:
    """Write `results.json`, `summary.md` and `report.html`. Raises ReportError: `out` cannot be written."""
    write_page(json.dumps(results, indent=2) + "\n", out / "results.json")
    write_page(summary(results), out / "summary.md")
    write_page(render(results), out / "report.html")
