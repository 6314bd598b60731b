"""One readable line a step."""

from __future__ import annotations

import math

from swarm_node.observe.metrics import StepRow


def step_line(row: StepRow) -> str:
    """The line that a node prints after a step; what was not measured shows as `-`.

    `step 12 · reward 0.41 ± 0.32 · length 85/192, 6% cut · G 8, λ 0.45, stragglers 31% of 35% allowed · groups 4 own + 3 foreign · ...`
    """
    parts = [
        f"step {row.step}",
        f"reward {_number(row.reward_mean)} ± {_number(row.reward_std)}",
        _lengths(row),
        _control(row),
        f"groups {row.own_groups_used} own + {row.foreign_groups_used} foreign",
        f"kept {_percent(row.kept_share)}, zero-variance {_percent(row.zero_variance_share)}",
        f"ratio {_number(row.ratio_mean)} (max {_number(row.ratio_max)}), KL {_small(row.approx_kl)} (sum {_small(row.approx_kl_sum)})",
        f"tokens/s {_count(row.rollout_tokens_per_second)} rollout, {_count(row.learning_tokens_per_second)} learning",
        f"peers {row.peers}",
    ]
    if row.sparse_share > 0:
        parts.insert(-1, _sparsity(row))
    if not row.stepped:
        parts.append(f"no optimiser step: {row.skipped}")
    if row.waiting_for:
        parts.append(f"waiting for {row.waiting_for}")
    return " · ".join(parts)


def _lengths(row: StepRow) -> str:
    text = f"length {_count(row.length_mean)}/{row.length_max}"
    # Completions at the token limit hide stragglers from the controller, so they are named when there are any.
    return f"{text}, {_percent(row.truncated_share)} cut" if row.truncated_share > 0 else text


def _control(row: StepRow) -> str:
    rate = f"stragglers {_percent(row.straggler_rate)} of {_percent(row.straggler_target)} allowed"
    return f"G {row.group_size}, λ {_number(row.sagc_lambda)}, {rate}" + ("" if row.feasible else ", infeasible")


def _sparsity(row: StepRow) -> str:
    text = f"sparse {_percent(row.sparse_share)} of tokens, up to {row.sparse_budget} pages, acceptance p5 {_number(row.acceptance_p5)}"
    if math.isfinite(row.distill_loss):
        text += f", divergence {_small(row.distill_loss)}"
    return f"{text} ({row.schedule_change})" if row.schedule_change else text


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _small(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"


def _percent(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "-"
