"""DistillSparse on SmolLM2-135M: acceptance of the sparse actor before and after some hundred updates of its adapter.

    python -m swarm_node.experiments.distill [--out docs/evidence/distill] [--steps 120] [--budget 12]

Long prompts of word problems; completions for training are sampled by the sparse actor, those to measure on by the dense policy, on
problems that training does not see. All acceptances are exact, over the whole vocabulary, at the sampling temperature; those before and
after are of the same tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_node.learning.distill import Distiller
from swarm_node.learning.options import DistillOptions
from swarm_node.observe.page import write_page
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.parts import head
from swarm_node.policy.policy import Policy
from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.policy.sparse_attention import completion_hidden, sparse_positions
from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.acceptance import Acceptance, exact_acceptance, summarise
from swarm_node.rollout.sparsity.schedule import DENSE
from swarm_node.tasks.base import Split, Task
from swarm_node.tasks.registry import load_task

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DistillSpec:
    """Everything that the numbers depend on."""

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    task: str = "reasoning-gym:gsm_symbolic"
    problems: int = 8
    """Word problems in one prompt."""
    new_tokens: int = 256
    """Longest completion; those below half of it are left out."""
    temperature: float = 1.0
    train_prompts: int = 32
    """One completion each."""
    held_out: int = 12
    budget: int = 12
    """Pages besides the reserved three that the adapter is trained at."""
    measured: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32)
    """Budgets at which acceptance is measured."""
    steps: int = 120
    """Updates, of one completion each."""
    rank: int = 16
    learning_rate: float = 2e-4
    seed: int = 0


def run(spec: DistillSpec, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole experiment as JSON. Deterministic from the spec on one machine and thread count, but for seconds."""
    torch.set_num_threads(1)
    policy = load_policy(ModelOptions.model_validate({"name": spec.model, "device": "cpu", "dtype": spec.dtype}))
    engine = SparseEngine(policy, RolloutOptions(max_batch=48))
    training = sample(policy, engine, spec, "train", spec.train_prompts, spec.budget)
    held_out = sample(policy, engine, spec, "eval", spec.held_out, DENSE)
    lengths = [len(prompt) + len(completion) for prompt, completion in held_out]
    say(f"{len(training)} completions to train on, {len(held_out)} held out, of {min(lengths)} to {max(lengths)} tokens with their prompts")

    options = DistillOptions(enabled=True, rank=spec.rank, alpha=spec.rank, learning_rate=spec.learning_rate, completions_per_step=1)
    adapter = RolloutAdapter(policy.model, options.rank, options.alpha, spec.seed)
    before = measure(policy, None, held_out, spec)
    say(f"before: {_line(before)}")
    began = time.perf_counter()
    distiller = Distiller(policy.model, adapter, options, spec.seed)
    curve = []
    for step in range(spec.steps):
        report = distiller.step(training, lambda positions: np.full(len(positions), spec.budget, dtype=np.int32), spec.temperature)
        curve.append([report.loss, report.grad_norm, report.acceptance_mean])
        if step % 10 == 9:
            recent = np.mean(curve[-10:], axis=0)
            say(f"update {step + 1}: divergence {recent[0]:.4f}, norm {recent[1]:.3f}, mean acceptance {recent[2]:.4f}")
    seconds = time.perf_counter() - began
    after = measure(policy, adapter, held_out, spec)
    say(f"after: {_line(after)}")
    return {
        "experiment": "distill",
        "spec": asdict(spec),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread",
        "context": [min(lengths), max(lengths)],
        "before": {budget: asdict(found) for budget, found in before.items()},
        "after": {budget: asdict(found) for budget, found in after.items()},
        "saved": {budget: asdict(budget_saved(before, after, budget)) for budget in spec.measured},
        "curve": [[float(f"{value:.4g}") for value in point] for point in curve],
        "seconds_an_update": seconds / spec.steps,
    }


def sample(policy: Policy, engine: SparseEngine, spec: DistillSpec, split: Split, count: int, budget: int) -> list[Pair]:
    """`count` completions of as many prompts, sampled at a budget; short ones are passed over."""
    task = load_task(spec.task)
    pairs: list[Pair] = []
    start = 0
    while len(pairs) < count:
        prompts = [policy.encode_prompt(long_prompt(task, start + index, spec.problems, split)) for index in range(count - len(pairs))]
        requests = [GroupRequest(ids, 1, start + index, (budget,)) for index, ids in enumerate(prompts)]
        rollout = engine.generate(requests, seed=spec.seed, temperature=spec.temperature, max_new_tokens=spec.new_tokens)
        for ids, (completion,) in zip(prompts, rollout.groups, strict=True):
            if 2 * len(completion) >= spec.new_tokens:
                pairs.append((torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(completion.tokens.astype(np.int64))))
        start += len(prompts)
    return pairs


def long_prompt(task: Task, index: int, problems: int, split: Split) -> str:
    """Several problems to be solved in order, so that answers have to look back a long way."""
    drawn = [task.problem(0, index * problems + number, split).prompt.split("\n\nPut only")[0].strip() for number in range(problems)]
    listed = "\n\n".join(f"Problem {number}. {question}" for number, question in enumerate(drawn, start=1))
    return f"Here are {problems} problems.\n\n{listed}\n\nSolve all of them in order. Repeat each question, then explain its answer."


@torch.no_grad()
def measure(policy: Policy, adapter: RolloutAdapter | None, pairs: Sequence[Pair], spec: DistillSpec) -> dict[int, Acceptance]:
    """Acceptance by budget over the tokens of the completions whose attention was sparse."""
    project = head(policy.model)
    found: dict[int, list[NDArray[np.float32]]] = {budget: [] for budget in spec.measured}
    for prompt, completion in pairs:
        dense = project(completion_hidden(policy.model, prompt, completion))
        for budget, parts in found.items():
            budgets = np.full(len(completion) - 1, budget)
            sparse = project(_actor(policy, adapter, prompt, completion, budgets))
            accepted = exact_acceptance(dense, sparse, spec.temperature).numpy()[1:]
            parts.append(accepted[sparse_positions(len(prompt), budgets)])
    return {budget: summarise(np.concatenate(parts)) for budget, parts in found.items()}


def _actor(policy: Policy, adapter: RolloutAdapter | None, prompt: Tensor, completion: Tensor, budgets: NDArray[np.int64]) -> Tensor:
    if adapter is None:
        return completion_hidden(policy.model, prompt, completion, budgets)
    with adapter.active():
        return completion_hidden(policy.model, prompt, completion, budgets)


@dataclass(frozen=True)
class Saving:
    """What the adapter is worth at one budget."""

    p5: float
    """With the adapter, at this budget."""
    pages: float | None
    """Pages without it that give the same p5, linear between the measured budgets; None: more than the largest of them."""


def budget_saved(before: dict[int, Acceptance], after: dict[int, Acceptance], budget: int) -> Saving:
    """The budget that the plain sparse actor needs for what the adapted one has at `budget`."""
    target, budgets = after[budget].p5, sorted(before)
    reached = [before[pages].p5 for pages in budgets]
    if target > max(reached):
        return Saving(target, None)
    for low, high in zip(range(len(budgets) - 1), range(1, len(budgets)), strict=True):
        if reached[low] <= target <= reached[high]:
            share = (target - reached[low]) / max(reached[high] - reached[low], 1e-9)
            return Saving(target, budgets[low] + share * (budgets[high] - budgets[low]))
    return Saving(target, float(budgets[0]))


def summary(results: dict[str, Any]) -> str:
    """The results as a page of Markdown."""
    spec = results["spec"]
    low, high = results["context"]
    rows = []
    for budget in spec["measured"]:
        before, after, saved = (results[part][budget] for part in ("before", "after", "saved"))
        worth = f"more than {max(spec['measured'])}" if saved["pages"] is None else f"{saved['pages']:.1f}"
        rows.append(
            f"| {budget}{' (trained)' if budget == spec['budget'] else ''} | {before['p5']:.3f} | {after['p5']:.3f} "
            f"| {before['mean']:.4f} | {after['mean']:.4f} | {worth} |"
        )
    first, last = (np.mean(results["curve"][part], axis=0) for part in (slice(0, 20), slice(-20, None)))
    table = "\n".join(rows)
    return f"""# DistillSparse, measured

    python -m swarm_node.experiments.distill --steps {spec["steps"]} --budget {spec["budget"]}

{spec["model"]}, {spec["dtype"]}, one core of a virtual x86-64 server with AVX-512 and AMX; {results["seconds_an_update"]:.1f} s an update
of one completion (other programs ran beside it). {spec["steps"]} updates at a budget of {spec["budget"]} pages, rank {spec["rank"]},
learning rate {spec["learning_rate"]:g}, forward KL, on {spec["train_prompts"]} completions that the sparse actor sampled; temperature
{spec["temperature"]:g}. Measured on {spec["held_out"]} completions of the dense policy for prompts that training did not see, contexts of
{low} to {high} tokens. Acceptance is exact, on the same tokens before and after, where attention is sparse; the budget is what a
position may read besides the reserved three pages.

| budget | p5 before | p5 after | mean before | mean after | plain budget with the p5 of after |
|---|---|---|---|---|---|
{table}

Mean divergence of a training token: {first[0]:.4f} nats over the first 20 updates, {last[0]:.4f} over the last 20.
"""


def _line(found: dict[int, Acceptance]) -> str:
    return ", ".join(f"{budget} pages p5 {acceptance.p5:.3f} mean {acceptance.mean:.3f}" for budget, acceptance in found.items())


def main() -> None:
    """Run the study, and write summary.md and results.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/distill"))
    parser.add_argument("--steps", type=int, default=DistillSpec.steps)
    parser.add_argument("--budget", type=int, default=DistillSpec.budget)
    given = parser.parse_args()
    results = run(DistillSpec(steps=given.steps, budget=given.budget), lambda text: print(text, flush=True))
    given.out.mkdir(parents=True, exist_ok=True)
    write_page(summary(results), given.out / "summary.md")
    write_page(json.dumps(results, indent=1) + "\n", given.out / "results.json")


if __name__ == "__main__":
    main()
