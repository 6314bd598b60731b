"""Stories of a simulated swarm: real nodes and real learning, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from swarm_protocols.codec import decode_group, encode_group
from swarm_protocols.group import ProblemRef, hash_prompt
from swarm_protocols.messages import GroupMessage, decode_message, encode_message

from swarm_node.config import ConfigError
from swarm_node.network.simulated.peers import RawPeer
from swarm_node.network.simulated.weather import Churn, Link
from swarm_node.simulation import NodeSpec, Swarm
from swarm_node.tasks.assignment import assigned_index

MakeSwarm = Callable[..., Swarm]
# A step of these takes one to two virtual seconds.
PAIR = (NodeSpec("ada", "tiny-s", tokens_per_s=200), NodeSpec("ben", "tiny-s", tokens_per_s=200))


def weights(swarm: Swarm, name: str) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in swarm[name].node.policy.trainable().values()])


def used(swarm: Swarm, name: str) -> int:
    return sum(row.foreign_groups_used for row in swarm[name].rows)


def refused(swarm: Swarm, name: str) -> dict[str, int]:
    return swarm[name].node.rejections()


def test_nodes_of_different_models_learn_from_each_other(swarm: MakeSwarm) -> None:
    house = swarm([NodeSpec("ada", "tiny-s"), NodeSpec("ben", "tiny-m"), NodeSpec("cyd", "tiny-m-words", lora=True)], seed=1)
    before = {node.spec.name: weights(house, node.spec.name).clone() for node in house}
    house.run(steps=4)
    for node in house:
        assert used(house, node.spec.name) > 0
        assert node.node.rejections() == {}
        assert not torch.equal(weights(house, node.spec.name), before[node.spec.name])


def test_the_same_seed_gives_the_same_swarm_to_the_bit(swarm: MakeSwarm) -> None:
    def history(seed: int) -> tuple[torch.Tensor, list[tuple[float, int, int]]]:
        house = swarm(PAIR, seed=seed, link=Link(loss=0.2))
        house.run(steps=3)
        return weights(house, "ada"), [(row.reward_mean, row.foreign_groups_used, row.rollout_tokens) for row in house["ben"].rows]

    first_weights, first_rows = history(seed=3)
    again_weights, again_rows = history(seed=3)
    other_weights, _ = history(seed=4)
    assert torch.equal(first_weights, again_weights)
    assert first_rows == again_rows
    assert not torch.equal(first_weights, other_weights)


def test_a_peer_that_sends_garbage_is_counted_and_changes_nothing(swarm: MakeSwarm) -> None:
    def garbage(peer: RawPeer, _: Swarm) -> None:
        peer.send_bytes(b"\xff" * 100)
        peer.send_bytes(encode_message(GroupMessage(b"\x00" * 50)))
        peer.send_bytes(b"")

    attacked = swarm(PAIR, seed=5, adversaries={"mallory": garbage})
    quiet = swarm(PAIR, seed=5)
    attacked.run(steps=4)
    quiet.run(steps=4)
    assert refused(attacked, "ada")["bad_encoding"] > 0
    assert torch.equal(weights(attacked, "ada"), weights(quiet, "ada"))
    assert used(attacked, "ada") == used(quiet, "ada") > 0


def test_stolen_and_forged_groups_are_refused_by_name(swarm: MakeSwarm) -> None:
    def thief(peer: RawPeer, house: Swarm) -> None:
        for _, raw in list(peer.heard)[-1:]:
            message = decode_message(raw)
            assert isinstance(message, GroupMessage)
            peer.send_bytes(raw)  # somebody else's message under the thief's own name: its problem was never the thief's
            stolen = decode_group(message.body)
            ada = house["ada"].node
            for number, logprob in enumerate((-1.0, 0.5)):
                # Everything but the log-probs is as it should be: a problem that really is the thief's, and its prompt.
                ref = ProblemRef(stolen.problem.task, 0, assigned_index("mallory", stolen.policy.step, number, 0))
                forged = dataclasses.replace(
                    stolen,
                    problem=ref,
                    prompt_hash=hash_prompt(ada.prompt(ada.problem(ref))),
                    sequence=stolen.sequence * 2 + number,
                    completions=tuple(dataclasses.replace(c, logprobs=np.full_like(c.logprobs, logprob)) for c in stolen.completions),
                )
                peer.send_bytes(encode_message(GroupMessage(encode_group(forged))))

    house = swarm(PAIR, seed=6, adversaries={"mallory": thief})
    house.run(steps=4)
    for name in ("ada", "ben"):
        # A stolen body is a duplicate to whoever had it from its maker, and not the thief's to send for everybody else.
        assert refused(house, name).keys() & {"duplicate", "not_assigned"}
        assert refused(house, name)["bad_logprobs"] > 0
    assert all("mallory" not in node.node.pool.report().peers for node in house)
    assert used(house, "ada") > 0


def test_a_node_without_peers_trains_alone_and_meets_them_when_the_partition_heals(swarm: MakeSwarm) -> None:
    house = swarm(PAIR, seed=7)
    house.network.partition(["ada"], ["ben"])
    house.run(steps=3)
    assert used(house, "ada") == used(house, "ben") == 0
    assert "no peers" in house["ada"].rows[-1].waiting_for
    house.network.heal()
    house.run(steps=4)
    assert used(house, "ada") > 0
    assert used(house, "ben") > 0
    assert house["ada"].rows[-1].waiting_for == ""


def test_loss_and_churn_cost_groups_but_never_a_step(swarm: MakeSwarm) -> None:
    house = swarm([*PAIR, NodeSpec("cyd", "tiny-s")], seed=8, link=Link(loss=0.5, duplication=0.2))
    house.network.churn(["ben", "cyd"], Churn(mean_up_s=2.0, mean_down_s=1.0))
    house.run(steps=5)
    assert [len(node.rows) for node in house] == [5, 5, 5]
    sent = sum(row.groups_sent for node in house for row in node.rows)
    received = sum(row.groups_received for node in house for row in node.rows)
    assert 0 < received < 2 * sent
    assert set(refused(house, "ada")) <= {"duplicate"}


def test_in_horizontal_collaboration_nodes_sample_parts_of_one_group(swarm: MakeSwarm) -> None:
    config = {"learning": {"collaboration": "horizontal", "learning_rate": 3e-4}, "control": {"group_size": 2}}
    house = swarm([dataclasses.replace(spec, config=config) for spec in PAIR], seed=10)
    house.run(steps=5)
    assert house["ada"].node.rejections() == {}
    ada, ben = ([problem.index for problem in house[name].node.next_problems()[0]] for name in ("ada", "ben"))
    assert ada == ben
    assert used(house, "ada") > 0
    assert used(house, "ben") > 0


def test_a_fast_machine_takes_more_steps_in_the_same_time(swarm: MakeSwarm) -> None:
    house = swarm([NodeSpec("slow", "tiny-s", tokens_per_s=200), NodeSpec("fast", "tiny-s", tokens_per_s=800)], seed=9)
    house.run(seconds=12)
    slow, fast = (sum(row.rollout_tokens + row.learning_tokens for row in house[name].rows) for name in ("slow", "fast"))
    # Each is within one step of its speed times 12 s.
    assert slow / 200 == pytest.approx(12, abs=5)
    assert fast / 800 == pytest.approx(12, abs=2)
    assert len(house["fast"].rows) > len(house["slow"].rows)


def test_a_wrong_option_is_named_before_anything_runs(swarm: MakeSwarm) -> None:
    with pytest.raises(ConfigError, match=r"unknown option rollout\.temprature; did you mean rollout\.temperature"):
        swarm([NodeSpec("ada", config={"rollout": {"temprature": 1.0}})])


def test_an_option_leaves_the_small_defaults_of_its_table_alone(swarm: MakeSwarm) -> None:
    config = swarm([NodeSpec("ada", config={"rollout": {"temperature": 0.5}})])["ada"].node.config
    assert (config.rollout.temperature, config.rollout.prompts_per_step, config.control.group_size) == (0.5, 2, 4)
