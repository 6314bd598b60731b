"""The DistillSparse experiment's arithmetic: what an adapter saves at the same 5th percentile."""

from __future__ import annotations

import pytest

from swarm_node.experiments.distill import budget_saved, long_prompt
from swarm_node.rollout.sparsity.acceptance import Acceptance
from swarm_node.tasks.registry import load_task


def curve(*p5: float) -> dict[int, Acceptance]:
    return {budget: Acceptance(0.9, value, 100) for budget, value in zip((4, 8, 16), p5, strict=True)}


def test_the_plain_budget_for_the_same_percentile_is_read_off_between_the_measured_ones() -> None:
    before, after = curve(0.6, 0.7, 0.8), curve(0.65, 0.75, 0.85)
    assert budget_saved(before, after, 4).pages == pytest.approx(6)
    assert budget_saved(before, after, 8).pages == pytest.approx(12)
    assert budget_saved(before, after, 16).pages is None, "no measured budget reaches it"
    assert budget_saved(before, before, 8).pages == pytest.approx(8)
    assert budget_saved(before, curve(0.5, 0.6, 0.7), 16).pages == pytest.approx(8), "an adapter can cost pages"


def test_prompts_hold_different_problems() -> None:
    task = load_task("chain-sum")
    first, second = (long_prompt(task, index, 3, "train") for index in (0, 1))
    assert all(f"Problem {number}." in first for number in (1, 2, 3))
    assert "Problem 4." not in first
    assert first != second
