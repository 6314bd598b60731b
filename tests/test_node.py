"""One node: what its loop promises, without files and processes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swarm_protocols.codec import decode_group
from swarm_protocols.group import Completion, Finish, hash_prompt

from swarm_node.checkpoint import Checkpoint, load_latest, save_checkpoint
from swarm_node.control.decision import Decision, Observation
from swarm_node.learning.distill import DistillReport
from swarm_node.learning.report import StepReport
from swarm_node.learning.scored import ScoredGroup
from swarm_node.learning.statistics import LossMetrics
from swarm_node.network.gossip import NetworkReport, Received
from swarm_node.node import Node, ResumeError, Sampled
from swarm_node.observe.status import State
from swarm_node.observe.stepline import step_line
from swarm_node.policy import catalogue
from swarm_node.policy.parts import unwrap
from swarm_node.policy.rollout_adapter import AdapterError
from swarm_node.rollout.engine import GroupRequest, Rollout, RolloutReport
from swarm_node.rollout.sparsity.schedule import Schedule, save_schedule
from swarm_node.simulation import SMALL, NodeSpec, Swarm
from swarm_node.tasks.assignment import is_assigned
from swarm_node.tasks.base import Problem, Reward, RewardError, Split, Task, TaskError

MakeSwarm = Callable[..., Swarm]


def alone(swarm: MakeSwarm, **spec: Any) -> Node:
    return swarm([NodeSpec("ada", **spec)], seed=1)["ada"].node


def weights(node: Node) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in node.policy.trainable().values()])


class Deaf:
    """A network that keeps what is published and delivers what a test puts in."""

    def __init__(self) -> None:
        self.published: list[bytes] = []
        self.inbox: list[Received] = []
        self.shown = ""

    def publish(self, body: bytes) -> None:
        self.published.append(body)

    def drain(self) -> list[Received]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def progress(self, step: int, policy: str) -> None:
        self.shown = policy

    def report(self) -> NetworkReport:
        return NetworkReport()

    def close(self) -> None: ...


def test_published_groups_carry_the_problems_assigned_to_this_peer_and_what_sampled_them(swarm: MakeSwarm) -> None:
    node = alone(swarm)
    node.gossip = deaf = Deaf()
    node.step()
    node.step()
    groups = [decode_group(body) for body in deaf.published]
    assert [group.policy.step for group in groups] == [0, 0, 1, 1]
    assert all(is_assigned(group.problem.index, "ada", group.policy.step, 0) for group in groups)
    assert len({group.problem.index for group in groups}) == 4
    assert [group.sequence for group in groups] == sorted({group.sequence for group in groups})
    for group in groups:
        assert group.prompt_hash == hash_prompt(node.prompt(node.problem(group.problem)))
        assert len(group.completions) == group.policy.group_size == 4


def test_no_two_groups_of_a_node_and_no_two_nodes_of_one_seed_draw_the_same_noise(
    swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = alone(swarm)
    ben = Node(ada.config, policy=ada.policy, task=ada.task, peer_id="ben", gossip=Deaf())
    noise: list[tuple[int, int]] = []
    for node in (ada, ben):
        generate = node.engine.generate

        def watch(requests: Sequence[GroupRequest], *, seed: int, generate: Any = generate, **more: Any) -> Rollout:
            noise.extend((seed, request.key) for request in requests)
            rollout: Rollout = generate(requests, seed=seed, **more)
            return rollout

        monkeypatch.setattr(node.engine, "generate", watch)
        node.step()
        node.step()
    assert len(set(noise)) == len(noise) == 8


def test_2n_steps_equal_n_then_resume_then_n_to_the_bit(swarm: MakeSwarm, tmp_path: Path) -> None:
    straight = alone(swarm)
    rows = [straight.step() for _ in range(6)]

    first = alone(swarm)
    for _ in range(3):
        first.step()
    save_checkpoint(tmp_path, first.checkpoint())
    resumed = alone(swarm)
    checkpoint = load_latest(tmp_path)
    assert checkpoint is not None
    resumed.restore(checkpoint)
    assert resumed.steps == 3
    after = [resumed.step() for _ in range(3)]

    assert torch.equal(weights(straight), weights(resumed))
    assert [row.reward_mean for row in after] == [row.reward_mean for row in rows[3:]]
    assert [row.group_size for row in after] == [row.group_size for row in rows[3:]]


def test_sequence_numbers_go_on_above_the_checkpoints_whatever_the_clock_says(swarm: MakeSwarm) -> None:
    """The first node's clock starts it at 9e18; it publishes two steps, of which the checkpoint holds one."""
    node = alone(swarm)
    node.gossip = deaf = Deaf()
    node._sequence = 9 * 10**18
    node.step()
    checkpoint = node.checkpoint()
    node.step()

    def numbers_after(checkpoint: Checkpoint, clock: int) -> list[int]:
        resumed = alone(swarm)
        resumed.gossip = mesh = Deaf()
        resumed._sequence = clock
        resumed.restore(checkpoint)
        resumed.step()
        return [decode_group(body).sequence for body in mesh.published]

    used = [decode_group(body).sequence for body in deaf.published]
    assert min(numbers_after(checkpoint, clock=5)) > max(used)
    ahead = 9 * 10**18 + 10**15
    assert numbers_after(checkpoint, clock=ahead) == [ahead + 1, ahead + 2]

    del checkpoint.state["sequence"]  # as versions before saved it
    assert numbers_after(checkpoint, clock=ahead) == [ahead + 1, ahead + 2]


def test_sparse_rollouts_with_their_adapter_resume_to_the_bit_too(swarm: MakeSwarm, tmp_path: Path) -> None:
    save_schedule(tmp_path / "one.json", Schedule((1,), 0.5, "test"))
    config = {
        **SMALL,
        # Hot enough that some completions grow beyond the four pages that are read anyway.
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 128, "temperature": 3.0},
        "sparsity": {"schedule": str(tmp_path / "one.json"), "threshold": 0.5},
        "distill": {"enabled": True, "rank": 4, "learning_rate": 1e-2},
    }
    straight = alone(swarm, config=config)
    rows = [straight.step() for _ in range(4)]
    sparse = [row for row in rows if row.sparse_share > 0]
    assert sparse
    assert all(row.sparse_budget == 1 and row.distill_loss > 0 for row in sparse)
    assert any(0 < row.acceptance_p5 < 1 for row in rows)
    assert f"sparse {sparse[0].sparse_share:.0%} of tokens, up to 1 pages" in step_line(sparse[0])

    first = alone(swarm, config=config)
    for _ in range(2):
        first.step()
    save_checkpoint(tmp_path / "checkpoints", first.checkpoint())
    resumed = alone(swarm, config=config)
    checkpoint = load_latest(tmp_path / "checkpoints")
    assert checkpoint is not None
    resumed.restore(checkpoint)
    after = [resumed.step() for _ in range(2)]
    assert torch.equal(weights(straight), weights(resumed))
    for name in ("distill_loss", "acceptance_p5", "sparse_share"):
        np.testing.assert_equal([getattr(row, name) for row in after], [getattr(row, name) for row in rows[2:]])

    with_engine = {**config, "rollout": {**config["rollout"], "engine": "reference"}}
    with pytest.raises(AdapterError, match=r"set distill\.enabled=false, or rollout\.engine=sparse"):
        alone(swarm, config=with_engine)


@pytest.mark.parametrize("lora", [False, True])
def test_a_step_abandoned_before_its_update_leaves_the_checkpoint_of_the_step_before(swarm: MakeSwarm, lora: bool) -> None:
    class Signal(BaseException):
        pass

    def interrupt() -> None:
        raise Signal

    node, straight = alone(swarm, lora=lora), alone(swarm, lora=lora)
    node.step()
    straight.step()
    with pytest.raises(Signal):
        node.step(before_update=interrupt)
    again = alone(swarm, lora=lora)
    again.restore(node.checkpoint())
    while straight.steps < again.steps:
        straight.step()
    again.step()
    straight.step()
    assert torch.equal(weights(again), weights(straight))


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(swarm: MakeSwarm) -> None:
    other = alone(swarm, lora=True)
    node = alone(swarm)
    before = weights(node).clone()
    with pytest.raises(ResumeError, match=r"made by tiny-s \(LoRA\) and this run is tiny-s \(full\)"):
        node.restore(other.checkpoint())
    assert torch.equal(weights(node), before)
    assert node.steps == 0


def test_rewards_of_peers_are_computed_here_and_an_error_is_not_a_wrong_answer(swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    node = alone(swarm)
    problem = node.next_problems()[0][0]
    tokens = {text: node.policy.tokenizer.encode(text) for text in (f"#{problem.answer}", "#999")}
    completions = [
        Completion(np.array([*ids, *sorted(node.policy.stop_ids)[:1]], np.int32), np.zeros(len(ids) + 1, np.float32), Finish.STOP)
        for ids in tokens.values()
    ]
    assert [score and score.value for score in node.score(problem, completions)] == [1.0, 0.0]

    def fail(*_: object) -> None:
        raise RewardError("no scorer")

    monkeypatch.setattr(type(node.task), "reward", fail)
    assert node.score(problem, completions) == [None, None]
    assert node.totals.reward_errors == 2


def test_what_a_peer_sends_is_scored_before_it_is_learned_from(swarm: MakeSwarm) -> None:
    house = swarm([NodeSpec("ada"), NodeSpec("ben")], seed=2)
    ada, ben = house["ada"].node, house["ben"].node
    ada.gossip, ben.gossip = Deaf(), Deaf()
    ben.step()
    assert isinstance(ada.gossip, Deaf)
    assert isinstance(ben.gossip, Deaf)
    ada.gossip.inbox = [Received("ben", body) for body in ben.gossip.published] + [Received("ben", b"junk")]
    taken = ada.take_in()
    assert [group.sender for group in taken] == ["ben", "ben"]
    assert not any(group.own for group in taken)
    for scored in taken:
        problem = ada.problem(scored.group.problem)
        right = [ada.task.reward(problem, ada.policy.decode(c.tokens)).value for c in scored.group.completions]
        assert list(scored.rewards) == right
    assert ada.rejections() == {"unsupported_version": 1}


def test_the_state_is_always_one_of_the_named_ones(swarm: MakeSwarm) -> None:
    node = alone(swarm)
    seen: list[State] = []
    enter = node.status.enter

    def watch(state: State, **facts: object) -> None:
        seen.append(state)
        enter(state, **facts)  # type: ignore[arg-type]

    node.status.enter = watch  # type: ignore[method-assign]
    node.step()
    assert seen == [State.ROLLING_OUT, State.EXCHANGING, State.LEARNING]


def test_a_flood_is_judged_in_part_and_the_rest_is_counted(swarm: MakeSwarm) -> None:
    node = alone(swarm)
    node.gossip = deaf = Deaf()
    limit = 4 * node.config.pool.foreign_per_step
    deaf.inbox = [Received("mallory", b"junk")] * (limit + 10)
    row = node.step()
    assert node.rejections() == {"unsupported_version": limit}
    assert row.groups_dropped == 10


def test_a_problem_that_cannot_be_made_is_passed_over(swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    node = alone(swarm)
    make = type(node.task).problem
    usual, _ = node.next_problems()

    def fail_first(task: Task, seed: int, index: int, split: Split = "train") -> Problem:
        if index == usual[0].index:
            raise TaskError("no such problem")
        return make(task, seed, index, split)

    monkeypatch.setattr(type(node.task), "problem", fail_first)
    problems, prompts = node.next_problems()
    assert len(problems) == len(prompts) == 2
    assert problems[0].index == usual[1].index
    node.context = 10
    unwrap(node.policy.model).config.max_position_embeddings = 10
    with pytest.raises(TaskError, match="none of 64 problems of chain-sum:2 can be used with a context of 10 tokens"):
        node.evaluate("eval")
    with pytest.raises(TaskError, match="none of 1024 problems of chain-sum:2 can be used with a context of 10 tokens"):
        node.next_problems()


def test_another_lora_rank_is_refused_as_a_checkpoint_that_does_not_fit(swarm: MakeSwarm) -> None:
    node, other = alone(swarm, lora=True), alone(swarm, lora=True)
    checkpoint = other.checkpoint()
    checkpoint.weights = {name: tensor[:1] for name, tensor in checkpoint.weights.items()}
    with pytest.raises(ResumeError, match="does not fit this configuration"):
        node.restore(checkpoint)


ROW = (
    "step time seconds reward_mean reward_std accuracy length_mean length_max truncated_share group_size sagc_lambda straggler_rate "
    "straggler_target feasible own_groups_used foreign_groups_used foreign_share pool_groups kept_share zero_variance_share stepped "
    "skipped loss grad_norm learning_rate ratio_mean ratio_max ratio_truncated_share clip_fraction approx_kl approx_kl_sum entropy "
    "rollout_tokens rollout_seconds rollout_tokens_per_second slot_idle_share straggler_seconds preemptions sparse_share "
    "sparse_budget acceptance_p5 schedule_change distill_loss distill_seconds learning_tokens learning_seconds "
    "learning_tokens_per_second peers groups_sent groups_received groups_admitted groups_dropped network_restarts rejections "
    "waiting_for"
)
"""The names in `metrics.jsonl` that files of every version have: they may be added to, and none may change."""


def test_a_step_s_row_says_what_its_reports_say_under_the_names_that_files_have(swarm: MakeSwarm) -> None:
    def completion(length: int, finish: Finish) -> Completion:
        return Completion(np.zeros(length, np.int32), np.zeros(length, np.float32), finish)

    node = alone(swarm)
    node.step()
    node.clock = lambda: 1234.5
    node.gossip = deaf = Deaf()
    deaf.report = lambda: NetworkReport(  # type: ignore[method-assign]
        peers=7, received=30, dropped=4, restarts=2, rejections={"stale": 5, "replay": 0}, trouble="no peers yet"
    )
    node.groups_unread = 6
    node.totals.straggler_sum, node.totals.straggler_weight = 0.75, 3.0
    rollout = Rollout(
        ((completion(3, Finish.STOP), completion(8, Finish.LENGTH)), (completion(1, Finish.STOP),)),
        RolloutReport(
            tokens=400, seconds=8.0, slot_idle_share=0.15, straggler_seconds=2.5, preemptions=9, sparse_share=0.35, largest_budget=61,
            acceptance_p5=0.87, schedule_change="raised", prefill_tokens=1001, prefill_seconds=1002.0, decode_steps=1003,
        ),
    )  # fmt: skip
    rewards = (Reward(1.0, True), Reward(0.5, True), Reward(0.0, False))
    loss = LossMetrics(
        kept_share=0.81, ratio_mean=1.02, ratio_max=1.9, ratio_truncated_share=0.03, clip_fraction=0.04, approx_kl=0.05, approx_kl_sum=0.06,
        entropy=0.07, completions=1004, tokens=1005,
    )  # fmt: skip
    learned = StepReport(
        step=1006, stepped=False, skipped="nothing to learn", loss=0.11, grad_norm=0.12, learning_rate=0.13, own_groups=3, foreign_groups=1,
        zero_variance_groups=12, tokens=600, seconds=4.0, metrics=loss, foreign_metrics=LossMetrics(kept_share=1007.0, entropy=1008.0),
    )  # fmt: skip
    observed = Observation(
        stragglers=1, groups=2, share=0.5, multiplier=0.45, infeasible=True, truncated_groups=0, censored_groups=0, counterfactual={}
    )
    group = ScoredGroup(*(None,) * 7)  # type: ignore[arg-type]  # only counted
    sampled = Sampled((group, group), rewards, rollout, Decision(size=6, multiplier=1009.0, sampled={}, changed=True))
    distilled = DistillReport(step=1010, loss=0.21, seconds=0.22)

    row = node._row(sampled, observed, learned, distilled, admitted=2, seconds=33.0)
    values = dataclasses.asdict(row)
    assert list(values) == ROW.split()
    assert values == {
        "step": 1, "time": 1234.5, "seconds": 33.0,
        "reward_mean": 0.5, "reward_std": pytest.approx((0.5 / 3) ** 0.5), "accuracy": pytest.approx(2 / 3),
        "length_mean": 4.0, "length_max": 8, "truncated_share": pytest.approx(1 / 3),
        "group_size": 6, "sagc_lambda": 0.45, "straggler_rate": 0.25, "straggler_target": node.config.control.delta, "feasible": False,
        "own_groups_used": 3, "foreign_groups_used": 1, "foreign_share": 0.25, "pool_groups": len(node.pool),
        "kept_share": 0.81, "zero_variance_share": 0.75,
        "stepped": False, "skipped": "nothing to learn", "loss": 0.11, "grad_norm": 0.12, "learning_rate": 0.13,
        "ratio_mean": 1.02, "ratio_max": 1.9, "ratio_truncated_share": 0.03, "clip_fraction": 0.04,
        "approx_kl": 0.05, "approx_kl_sum": 0.06, "entropy": 0.07,
        "rollout_tokens": 400, "rollout_seconds": 8.0, "rollout_tokens_per_second": 50.0,
        "slot_idle_share": 0.15, "straggler_seconds": 2.5, "preemptions": 9,
        "sparse_share": 0.35, "sparse_budget": 61, "acceptance_p5": 0.87, "schedule_change": "raised",
        "distill_loss": 0.21, "distill_seconds": 0.22,
        "learning_tokens": 600, "learning_seconds": 4.0, "learning_tokens_per_second": 150.0,
        "peers": 7, "groups_sent": 2, "groups_received": 30, "groups_admitted": 2, "groups_dropped": 10, "network_restarts": 2,
        "rejections": {"stale": 5}, "waiting_for": "no peers yet",
    }  # fmt: skip

    again = node._row(replace(sampled, rewards=()), observed, replace(learned, own_groups=0, foreign_groups=0), None, 0, 33.0)
    assert (again.groups_received, again.groups_dropped, again.network_restarts, again.rejections) == (0, 0, 0, {})
    assert np.isnan([again.reward_mean, again.accuracy, again.foreign_share, again.distill_loss, again.distill_seconds]).all()


def copy_model(name: str, folder: Path) -> Path:
    shutil.copytree(catalogue.find(name).folder, folder)
    return folder


@pytest.mark.parametrize(
    ("folder", "shown"),
    [("llama", "llama"), ("d" * 200, "d" * 128), ("ä" * 100, "ä" * 64), ("two\nlines", "two?lines"), ("\u202e!", "?!")],
)
def test_a_folders_name_travels_and_its_path_does_not(swarm: MakeSwarm, tmp_path: Path, folder: str, shown: str) -> None:
    place = copy_model("tiny-s", tmp_path / ("deep" * 40) / folder)
    node = alone(swarm, model=str(place))
    node.gossip = deaf = Deaf()
    node.step()
    assert [decode_group(body).policy.model for body in deaf.published] == [shown, shown]
    assert deaf.shown == shown
    assert not any(b"deepdeep" in body for body in deaf.published)
    assert node.checkpoint().state["model"] == str(place)


def test_a_node_resumes_where_its_model_has_moved_and_not_with_another_of_the_same_name(swarm: MakeSwarm, tmp_path: Path) -> None:
    node = alone(swarm, model=str(copy_model("tiny-s", tmp_path / "here" / "llama")))
    node.step()
    checkpoint = node.checkpoint()
    moved = alone(swarm, model=str(copy_model("tiny-s", tmp_path / "there" / "llama")))
    for named_as in (checkpoint.state["model"], "./llama", "llama"):  # versions before kept what the user had written
        checkpoint.state["model"] = named_as
        moved.restore(checkpoint)
        assert torch.equal(weights(moved), weights(node))
    other = alone(swarm, model=str(copy_model("tiny-m", tmp_path / "other" / "llama")))
    fingerprints = f"{node.policy.fingerprint} and this run is {tmp_path}/other/llama .full. with {other.policy.fingerprint}"
    with pytest.raises(ResumeError, match=rf"made by llama \(full\) with fingerprint {fingerprints}"):
        other.restore(checkpoint)
