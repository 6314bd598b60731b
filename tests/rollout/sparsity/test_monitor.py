"""The closed loop in the engine: which completions are rescored, what that measures, and what it moves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from swarm_node.policy.policy import Policy
from swarm_node.rollout.create import create_engine
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions, SparsityOptions
from swarm_node.rollout.paged import engine as paged_engine
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.closed_loop import ClosedLoop
from swarm_node.rollout.sparsity.monitor import Monitor
from swarm_node.rollout.sparsity.schedule import Schedule
from tests.support.policies import family_model, random_policy


def request(length: int, size: int, key: int) -> GroupRequest:
    return GroupRequest(np.random.default_rng(length).integers(4, 64, length).astype(np.int32), size, key)


def endless_policy() -> Policy:
    return replace(random_policy(model=family_model("llama")), stop_ids=frozenset({-1}))


def monitored(policy: Policy, pages: int, threshold: float = 0.86, completions: int = 1) -> SparseEngine:
    loop = ClosedLoop(Schedule((pages,), threshold, "test"), threshold=threshold, context=policy.context)
    return SparseEngine(policy, RolloutOptions(), monitor=Monitor(policy, loop, completions))


def generate(engine: SparseEngine, *requests: GroupRequest, seed: int = 1, **changes: Any) -> Rollout:
    return engine.generate(requests, seed=seed, **({"temperature": 1.0, "max_new_tokens": 40} | changes))


def test_short_completions_are_never_rescored() -> None:
    rollout = generate(monitored(endless_policy(), pages=3), request(48, 4, 1))
    assert rollout.observed == ()
    assert math.isnan(rollout.report.acceptance_p5)
    assert rollout.report.sparse_share == 0


def test_only_groups_that_can_become_sparse_are_drawn_and_the_seed_says_which() -> None:
    engine = monitored(endless_policy(), pages=3)
    groups = [request(5, 2, 1), request(200, 2, 2), request(201, 2, 3)]
    drawn = {generate(engine, *groups, seed=seed, max_new_tokens=2).observed[0].group for seed in range(8)}
    assert drawn == {1, 2}
    both = monitored(endless_policy(), pages=3, completions=4)
    assert [(seen.group, seen.member) for seen in generate(both, *groups).observed] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_schedule_that_loses_too_much_is_raised_and_the_report_says_so() -> None:
    policy = endless_policy()
    engine = monitored(policy, pages=1, threshold=0.99)
    changes = []
    for step in range(12):
        report = generate(engine, request(400, 2, step), max_new_tokens=100).report
        assert math.isnan(report.acceptance_p5) if report.sparse_share == 0 else 0 <= report.acceptance_p5 < 0.99
        changes += [report.schedule_change] if report.schedule_change else []
    assert changes
    assert changes[0].startswith("bin 0: 1 → ")
    assert engine.schedule is not None
    assert engine.schedule.pages[0] > 1

    resumed = monitored(policy, pages=1, threshold=0.99)
    resumed.load_state(engine.state())
    assert resumed.schedule == engine.schedule
    last = [generate(each, request(400, 2, 99)) for each in (engine, resumed)]
    assert last[0].groups[0][0].tokens.tolist() == last[1].groups[0][0].tokens.tolist()
    np.testing.assert_equal(last[0].report.acceptance_p5, last[1].report.acceptance_p5)


def test_a_schedule_that_was_chosen_since_is_not_overruled_by_the_checkpoint() -> None:
    policy = endless_policy()
    engine = monitored(policy, pages=1, threshold=0.99)
    while engine.schedule is not None and engine.schedule.pages == (1,):
        generate(engine, request(400, 2, 0), max_new_tokens=100)
    calibrated = monitored(policy, pages=7, threshold=0.99)
    calibrated.load_state(engine.state())
    assert calibrated.schedule is not None
    assert calibrated.schedule.pages == (7,)


def test_where_logits_take_too_much_memory_the_top_tokens_bound_the_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = endless_policy()
    exact = generate(monitored(policy, pages=1), request(300, 2, 7))
    monkeypatch.setattr(paged_engine, "KEPT_BYTES", 1000)
    bounded = generate(monitored(policy, pages=1), request(300, 2, 7))
    assert isinstance(exact.observed[0].kept, torch.Tensor)
    assert not isinstance(bounded.observed[0].kept, torch.Tensor)
    assert bounded.observed[0].kept.ids.shape == (40, 20)
    assert bounded.report.acceptance_p5 <= exact.report.acceptance_p5


def test_an_evaluation_is_not_rescored() -> None:
    rollout = generate(monitored(endless_policy(), pages=1), request(300, 2, 7), dense=True)
    assert rollout.observed == ()
    assert rollout.report.sparse_share == 0


def test_the_engine_starts_from_the_schedule_that_the_options_name() -> None:
    policy = random_policy(model=family_model("llama"))
    engine = create_engine(policy, RolloutOptions(), SparsityOptions(schedule="qwen3-4b@0.86"))
    assert isinstance(engine, SparseEngine)
    assert engine.schedule is not None
    # The model's context of 1,024 tokens has one bin.
    assert engine.schedule.pages == (29,)
    assert engine.choices[1] == "schedule qwen3-4b@0.86, as asked"
    dense = create_engine(policy, RolloutOptions(), SparsityOptions(schedule="dense"))
    assert isinstance(dense, SparseEngine)
    assert dense.schedule is None
    still = create_engine(policy, RolloutOptions(), SparsityOptions(schedule="qwen3-4b@0.86", closed_loop=False))
    assert still.state() == {}
