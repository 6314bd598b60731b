"""What a run came to, node by node: the table that a run ends with, and that the report opens with."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm_node.observe.metrics import RESUME, Metrics


@dataclass(frozen=True)
class NodeSummary:
    """One node's run in numbers."""

    name: str
    model: str
    steps: int
    accuracy_before: float
    """Of the first evaluation on the held-out split; NaN where there was none."""
    accuracy_after: float
    """Of the last one."""
    accuracy_standard_error: float
    """Of the last one."""
    groups_sent: int
    groups_received: int
    groups_admitted: int
    foreign_groups_used: int
    rejections: dict[str, int]
    """Reject reason -> count."""
    rollout_tokens: int
    rollout_tokens_per_second: float
    """Tokens over seconds of rolling out."""
    minutes: float
    """Time spent in steps."""
    resumes: int

    def as_json(self) -> dict[str, Any]:
        """For a JSON file: what was not measured is None."""
        values = dataclasses.asdict(self)
        return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}


def describe_model(facts: Mapping[str, Any]) -> str:
    """The model of a `start` event, with how it is trained: `tiny-s (full)`."""
    model = str(facts.get("model", ""))
    return f"{model} ({'LoRA' if facts['lora'] else 'full'})" if "lora" in facts else model


def summarise(name: str, metrics: Metrics) -> NodeSummary:
    """Sum up one node's metrics. `name` is used when the node did not say its own."""
    facts = metrics.facts()
    held_out = [row for row in metrics.evals if row.split == "eval"]
    rejections: Counter[str] = Counter()
    for row in metrics.steps:
        rejections.update(row.rejections)
    tokens = sum(row.rollout_tokens for row in metrics.steps)
    rolling = sum(row.rollout_seconds for row in metrics.steps if math.isfinite(row.rollout_seconds))
    return NodeSummary(
        name=str(facts.get("node", name)),
        model=describe_model(facts),
        steps=metrics.steps[-1].step if metrics.steps else 0,
        accuracy_before=held_out[0].accuracy if held_out else math.nan,
        accuracy_after=held_out[-1].accuracy if held_out else math.nan,
        accuracy_standard_error=held_out[-1].standard_error if held_out else math.nan,
        groups_sent=sum(row.groups_sent for row in metrics.steps),
        groups_received=sum(row.groups_received for row in metrics.steps),
        groups_admitted=sum(row.groups_admitted for row in metrics.steps),
        foreign_groups_used=sum(row.foreign_groups_used for row in metrics.steps),
        rejections=dict(sorted(rejections.items())),
        rollout_tokens=tokens,
        rollout_tokens_per_second=tokens / rolling if rolling > 0 else math.nan,
        minutes=sum(row.seconds for row in metrics.steps if math.isfinite(row.seconds)) / 60,
        resumes=sum(event.name == RESUME for event in metrics.events),
    )
