"""What all engines do alike: order, seconds of stragglers, the model's mode, what none but the sparse one can do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from swarm_protocols.group import Completion, Finish

from swarm_node.policy.policy import Policy
from swarm_node.policy.rollout_adapter import AdapterError, RolloutAdapter
from swarm_node.rollout.engine import Engine, GroupRequest, Rollout, RolloutReport, by_group, completion_streams, straggler_seconds
from swarm_node.rollout.noise import streams
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.reference import ReferenceEngine, batches
from tests.support.policies import family_model, random_policy

PROMPT = np.array([5, 6, 7], dtype=np.int32)


class Watched(Engine):
    """Notes in which mode it found the model; fails when told."""

    name = "watched"

    def __init__(self, policy: Policy, error: type[BaseException] | None = None) -> None:
        super().__init__(policy, RolloutOptions())
        self.found: list[bool] = []
        self._error = error

    def policy_updated(self, step: int) -> None: ...

    def _generate(self, requests: object, seed: int, temperature: float, max_new_tokens: int, dense: bool) -> Rollout:
        self.found += [module.training for module in self._policy.model.modules()]
        if self._error:
            raise self._error
        completion = Completion(np.array([2], np.int32), np.zeros(1, np.float32), Finish.STOP)
        return Rollout(((completion,),), RolloutReport(1, 1.0, 0.0, 0.0))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize("training", [False, True])
def test_every_engine_samples_in_evaluation_mode_and_leaves_the_mode_as_it_was(training: bool, error: type[BaseException] | None) -> None:
    policy = random_policy()
    policy.model.train(training)
    engine = Watched(policy, error)
    with pytest.raises(error) if error else nullcontext():
        engine.generate([GroupRequest(PROMPT, 1, 0)], seed=0, temperature=1.0, max_new_tokens=4)
    assert set(engine.found) == {False}
    assert {module.training for module in policy.model.modules()} == {training}


def test_what_cannot_be_sampled_never_reaches_an_engine_and_nothing_asked_is_nothing_sampled() -> None:
    engine = Watched(random_policy())
    with pytest.raises(ValueError, match=r"context of 512 tokens; lower rollout\.max_new_tokens"):
        engine.generate([GroupRequest(PROMPT, 1, 0)], seed=0, temperature=1.0, max_new_tokens=510)
    assert engine.generate([], seed=0, temperature=1.0, max_new_tokens=4).groups == ()
    assert engine.found == []


def test_stragglers_cost_the_time_from_half_of_their_group_s_end_to_the_last_one_s() -> None:
    requests = [GroupRequest(PROMPT, size, key) for key, size in enumerate((1, 2, 3, 4))]
    ends = [9.0, 1.0, 5.0, 8.0, 2.0, 4.0, 7.0, 1.0, 3.0, 4.5]
    assert by_group(requests, ends) == ((9.0,), (1.0, 5.0), (8.0, 2.0, 4.0), (7.0, 1.0, 3.0, 4.5))
    assert straggler_seconds(requests, ends) == 0 + (5 - 1) + (8 - 4) + (7 - 3)


def test_streams_follow_the_requests_and_their_members() -> None:
    requests = [GroupRequest(PROMPT, 2, 7), GroupRequest(PROMPT, 1, 2**64 + 3), GroupRequest(PROMPT, 3, -1)]
    keys = np.array([7, 7, 3, 2**64 - 1, 2**64 - 1, 2**64 - 1], dtype=np.uint64)
    members = np.array([0, 1, 0, 0, 1, 2], dtype=np.uint64)
    assert completion_streams(requests, 11).tolist() == streams(11, keys, members).tolist()


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([4, 3, 5], 7, [(0, 7), (7, 12)]),
        ([4, 3, 5], 12, [(0, 12)]),
        ([2, 2], 3, [(0, 2), (2, 4)]),
        ([5, 1, 3], 4, [(0, 4), (4, 6), (6, 9)]),  # the larger group's rest takes the next one along
        ([1, 9], 4, [(0, 1), (1, 5), (5, 9), (9, 10)]),
        ([4], 4, [(0, 4)]),
    ],
)
def test_batches_keep_groups_whole_where_they_fit(sizes: list[int], limit: int, expected: list[tuple[int, int]]) -> None:
    assert [(batch.start, batch.stop) for batch in batches(sizes, limit)] == expected


@pytest.mark.parametrize("make", [ReferenceEngine, SparseEngine])
def test_an_adapter_is_worn_or_refused_by_name(make: Callable[[Policy, RolloutOptions], Engine]) -> None:
    policy = random_policy(model=family_model("llama"))
    adapter = RolloutAdapter(policy.model, rank=2, alpha=2.0)
    for index, parameter in enumerate(adapter.parameters().values()):
        parameter.data += 0.1 * (index % 3 - 1)
    engine = make(policy, RolloutOptions())

    def sampled(dense: bool) -> list[float]:
        [[completion]] = engine.generate([GroupRequest(PROMPT, 1, 0)], seed=1, temperature=1.0, max_new_tokens=6, dense=dense).groups
        logprobs: list[float] = completion.logprobs.tolist()
        return logprobs

    bare = sampled(False)
    if make is ReferenceEngine:
        with pytest.raises(AdapterError, match="this node samples with reference"):
            engine.wear(adapter)
        assert sampled(False) == bare
    else:
        engine.wear(adapter)
        assert sampled(False) != bare
        assert sampled(True) == bare
