"""`swarm-node status`: what a node does now, and why it waits."""

from __future__ import annotations

import time

import typer

from swarm_node.cli.output import print_facts, print_json
from swarm_node.cli.places import HomeOption, JsonOption, SwarmOption, resolve_home

EXAMPLE = "Example: swarm-node status --json"

MEANINGS = {
    "groups_sent": "published to peers",
    "groups_received": "arrived from peers, before any check",
    "groups_admitted": "passed every check",
    "own_groups_used": "own groups learned from",
    "foreign_groups_used": "peers' groups learned from",
    "groups_unread": "arrived faster than they could be judged",
    "reward_errors": "completions whose reward could not be computed",
    "restarts": "restarts of the network's processes",
}


def status(home: HomeOption = None, swarm: SwarmOption = "main", json: JsonOption = False) -> None:
    """Say what the node does now, and why it waits.

    Every counter is explained. Exit code 1 when the node does not run.
    """
    from swarm_node.home import HomeError, holder
    from swarm_node.observe.status_file import StatusError, read_status

    folder = resolve_home(home, swarm)
    try:
        facts = read_status(folder)
    except StatusError as error:
        facts = {"state": "unknown", "trouble": str(error)}
    if facts is None:
        raise HomeError(f"no node has run in {folder}: name another folder with --home, or start one with `swarm-node join`")
    running = holder(folder) is not None
    if json:
        print_json({"running": running, **facts})
    else:
        print_facts(_describe(facts, running, time.time()))
    if not running:
        raise typer.Exit(1)


def _describe(facts: dict[str, object], running: bool, now: float) -> list[tuple[str, str]]:
    since = seconds_since(facts.pop("since", None), now)
    state = f"{facts.pop('state', '?')}" if running else f"not running; it was {facts.pop('state', '?')}"
    if running and since:
        state += f" for {since}"
    if waiting := facts.pop("waiting_for", ""):
        state += f", waiting for {waiting}"
    lines = [("state", state)]
    for name, value in facts.items():
        if isinstance(value, list):
            value = "; ".join(map(str, value)) or "none"
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
        elif name == "updated":
            value = f"{seconds_since(value, now) or '?'} ago"
        meaning = f"  ({MEANINGS[name]})" if name in MEANINGS else ""
        lines.append((name.replace("_", " "), f"{value}{meaning}"))
    return lines


def seconds_since(value: object, now: float) -> str:
    """How long ago a time in Unix seconds was, empty where it is none."""
    past = isinstance(value, int | float) and -1e12 < value < 1e12
    return f"{max(0.0, now - value):.0f} s" if past else ""  # type: ignore[operator]
