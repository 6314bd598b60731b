"""Recorded decode steps, by a recorder that needs no GPU: like a CUDA graph it keeps operations and addresses, and no line of Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from swarm_kernels.choose import Backend
from swarm_kernels.interface import NewTokens
from swarm_kernels.layout import LayerCache
from swarm_kernels.naive.append import rotate_new
from swarm_kernels.naive.backend import TorchKernels
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged import engine as paged_engine
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.paged.graphs import MAX_RECORDINGS, Recorder, StepGraphs, StepInputs, bucket_of
from swarm_node.rollout.sparsity.schedule import Schedule
from tests.support.policies import family_model, random_policy


class FixedShapes(TorchKernels):
    """Writes the first row's token once more where a row is padded, instead of leaving rows out."""

    def append(self, cache: LayerCache, tokens: NewTokens) -> None:
        keys = rotate_new(tokens)
        rows = torch.where(tokens.slots >= 0, torch.arange(len(tokens.slots)), 0)
        slots, keys, values = tokens.slots[rows], keys[rows], tokens.values[rows]
        pages, offsets = slots // cache.page_size, slots % cache.page_size
        written = (slots >= 0)[:, None, None]  # not even the first, in a step without sequences
        cache.keys[pages, :, offsets] = torch.where(written, keys, cache.keys[pages, :, offsets])
        cache.values[pages, :, offsets] = torch.where(written, values, cache.values[pages, :, offsets])
        complete = ((offsets == cache.page_size - 1) & (slots >= 0))[:, None, None]
        cache.centroids[pages] = torch.where(complete, cache.keys[pages].mean(dim=2), cache.centroids[pages])


class Tape:
    """Records the operations of a function, and counts recordings and replays."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        self.recordings += 1
        out = function().clone()
        recorded = make_fx(function)()

        def replay() -> None:
            self.replays += 1
            out.copy_(recorded())

        return replay, out


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[SparseEngine, Tape]]:
    """An engine whose decode steps are recorded, with kernels whose operations a tape sees."""
    monkeypatch.setattr(paged_engine, "choose_backend", lambda _: Backend(FixedShapes(), "kernels: a test's"))

    def make(**arguments: Any) -> tuple[SparseEngine, Tape]:
        engine, tape = SparseEngine(random_policy(model=family_model("qwen3", layers=3)), RolloutOptions(), **arguments), Tape()
        engine.runner._graphs = StepGraphs(tape)
        return engine, tape

    return make


def generate(engine: SparseEngine, seed: int = 1, **changes: Any) -> Rollout:
    draws = np.random.default_rng(0)
    requests = [GroupRequest(draws.integers(4, 64, length).astype(np.int32), size, length) for length, size in ((150, 3), (9, 4), (64, 3))]
    return engine.generate(requests, **{"seed": seed, "temperature": 1.0, "max_new_tokens": 12} | changes)


def assert_same(left: Rollout, right: Rollout) -> None:
    for group, other in zip(left.groups, right.groups, strict=True):
        for a, b in zip(group, other, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("schedule", [None, Schedule((2,), 0.86, "test")], ids=["dense", "sparse"])
def test_replayed_steps_sample_what_computed_ones_sample(
    schedule: Schedule | None, graphed: Callable[..., tuple[SparseEngine, Tape]]
) -> None:
    engine, tape = graphed(schedule=schedule)
    computed = SparseEngine(engine._policy, RolloutOptions(), schedule)
    assert computed.runner._graphs is None
    assert_same(generate(engine), generate(computed))
    recorded, replays = tape.recordings, tape.replays
    assert engine.runner._graphs is not None
    assert 1 < recorded == len(engine.runner._graphs) < 12
    again = generate(engine)
    assert_same(again, generate(computed))
    assert (tape.recordings, tape.replays) == (recorded, replays + again.report.decode_steps - 1)  # the first tokens need no step
    assert_same(generate(engine, seed=2), generate(computed, seed=2))


def test_new_values_of_weights_and_of_the_adapter_are_seen(graphed: Callable[..., tuple[SparseEngine, Tape]]) -> None:
    engine, tape = graphed()
    policy = replace(engine._policy, stop_ids=frozenset({-1}))  # so that every call has the same steps
    engine._policy = policy
    adapter = RolloutAdapter(policy.model, rank=2, alpha=2.0, seed=0)
    engine.wear(adapter)
    first = generate(engine)
    recorded = tape.recordings
    with torch.no_grad():
        policy.model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.5)
        for name, factor in adapter.parameters().items():
            factor.add_(0.1 if name.endswith("B") else 0.0)
    engine.policy_updated(1)
    second = generate(engine)
    assert tape.recordings == recorded
    computed = SparseEngine(policy, RolloutOptions())
    computed.wear(adapter)
    assert_same(second, generate(computed))
    assert [c.logprobs.tolist() for c in first.groups[0]] != [c.logprobs.tolist() for c in second.groups[0]]
    assert_same(generate(engine, dense=True), generate(computed, dense=True))
    assert tape.recordings > recorded  # those without the adapter are others


def test_recordings_end_with_the_weights_and_the_cache_that_they_read(graphed: Callable[..., tuple[SparseEngine, Tape]]) -> None:
    engine, _ = graphed()
    generate(engine, max_new_tokens=4)
    projection = engine._policy.model.get_submodule("model.layers.0.mlp.up_proj")
    projection.weight = torch.nn.Parameter(projection.get_parameter("weight") * 2)
    assert_same(generate(engine, max_new_tokens=4), generate(SparseEngine(engine._policy, RolloutOptions()), max_new_tokens=4))
    engine._cache = None
    assert_same(generate(engine, seed=3), generate(SparseEngine(engine._policy, RolloutOptions()), seed=3))


def test_recordings_end_where_modules_do_something_else(graphed: Callable[..., tuple[SparseEngine, Tape]]) -> None:
    engine, _ = graphed()
    generate(engine, max_new_tokens=4)
    projection = engine._policy.model.get_submodule("model.layers.0.mlp.up_proj")
    hook = projection.register_forward_hook(lambda module, inputs, out: out * 2)
    assert_same(generate(engine, max_new_tokens=4), generate(SparseEngine(engine._policy, RolloutOptions()), max_new_tokens=4))
    hook.remove()
    assert_same(generate(engine, max_new_tokens=4), generate(SparseEngine(engine._policy, RolloutOptions()), max_new_tokens=4))


def _raises(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing")


def _does_nothing(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    return lambda: None, function()


def _is_wrong(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    out = function().clone()
    return lambda: out.copy_(function() * 1.2), out


@pytest.mark.parametrize(
    ("record", "message"), [(_raises, "not permitted"), (_does_nothing, "off by nan"), (_is_wrong, "off by 0.2 of its norm")]
)
def test_steps_are_computed_where_recording_fails(
    record: Recorder, message: str, graphed: Callable[..., tuple[SparseEngine, Tape]]
) -> None:
    engine, _ = graphed()
    engine.runner._graphs = StepGraphs(record)
    with pytest.warns(RuntimeWarning, match=message) as warned:
        rollout = generate(engine)
    assert len(warned) == 1
    assert len(engine.runner._graphs) == 0
    assert_same(rollout, generate(SparseEngine(engine._policy, RolloutOptions())))


def test_a_replay_that_loses_small_numbers_beside_a_large_one_is_found() -> None:
    def compute(inputs: StepInputs, width: int) -> Tensor:
        return torch.cat([torch.full((len(inputs.tokens), 1), 90.0), inputs.tokens[:, None].expand(-1, 63).float()], dim=1)

    def record(function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        out = function().clone()
        return lambda: out.copy_(torch.nn.functional.pad(function()[:, :1], (0, 63))), out

    row = torch.ones(8, dtype=torch.int64)
    inputs = StepInputs(row, row, row.int()[:, None], row.int(), row, row.int())
    with pytest.warns(RuntimeWarning, match="off by"):
        StepGraphs(record).decode(compute, inputs, 0, cache=TorchKernels(), adapted=False)


def test_buckets() -> None:
    assert [bucket_of(rows, 1, 0)[0] for rows in (1, 2, 3, 4, 5, 8, 9, 31, 32)] == [1, 2, 4, 4, 8, 8, 16, 32, 32]
    assert [bucket_of(1, pages, 0)[1] for pages in (1, 16, 17, 512, 513)] == [16, 16, 32, 512, 1024]
    assert [bucket_of(1, 600, width)[2] for width in (0, 5, 64, 65)] == [0, 16, 64, 80]


def test_the_number_of_recordings_is_bounded() -> None:
    graphs, cache = StepGraphs(Tape()), TorchKernels()  # any object will do
    for rows in range(8, 8 * (MAX_RECORDINGS + 3), 8):
        row = torch.arange(rows)
        inputs = StepInputs(row, row, row.int()[:, None], row.int(), row, row.int())
        out = graphs.decode(lambda i, _: i.tokens[:, None] * 2.0, inputs, 0, cache=cache, adapted=False)
        assert out[:, 0].tolist() == [2.0 * number for number in range(rows)]
    assert len(graphs) == 2
