"""The benchmarks: what is computed from given times, what vLLM's process is told, and that everything runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swarm_kernels.choose import choose_backend
from swarm_kernels.measure import Candidate, StepData, Workload, measure

from swarm_node.cli import app as cli
from swarm_node.cli.bench import _schedule as choose
from swarm_node.experiments.bench import machine
from swarm_node.experiments.bench.cost_model import ModelShape
from swarm_node.experiments.bench.engines import OwnEngine, TransformersEngine, cache_bytes, run_paced
from swarm_node.experiments.bench.kernels import bench_kernels
from swarm_node.experiments.bench.pace import PacedSchedule, Pacemaker
from swarm_node.experiments.bench.plan import LongCase, Plan, ShortCase, fit_memory, make_plan
from swarm_node.experiments.bench.report import case_table, render, summary
from swarm_node.experiments.bench.results import RATIOS, Decode, Predictor, make_predictor, ratios, times_apart
from swarm_node.experiments.bench.rollout import run_short
from swarm_node.experiments.bench.shapes import SHAPES, BenchError
from swarm_node.experiments.bench.shapes import random_policy as policy_of_shape
from swarm_node.experiments.bench.vllm import WORKER, VllmWorker
from swarm_node.policy.parts import unwrap
from swarm_node.rollout.sparsity.schedule import DENSE, Schedule
from tests.support.policies import random_policy

KEYS = {
    "dense_vs_transformers_b8",
    "dense_vs_transformers_b32",
    "dense_vs_vllm_b8",
    "dense_vs_vllm_b32",
    "sparse_vs_dense_4k_b8",
    "sparse_vs_dense_8k_b8",
    "sparse_vs_dense_8k_b32",
    "sparse_vs_vllm_4k_b8",
}
SHAPE = ModelShape(layers=3, heads=1, kv_heads=1, head_size=32, parameters=1000)
"""A dense token reads 2 numbers x 32 x 2 bytes x 3 layers = 384 bytes; the weights are 2,000 bytes."""
FAST = 1e30
"""FLOP/s that cost no time."""


# -- ratios from given times ------------------------------------------------------------------------------------------------------


def test_decode_is_what_many_tokens_take_longer_than_one() -> None:
    prefill, decode = times_apart("b8", "dense", 8, 64, 5, first=[1.0, 2.0, 1.5], whole=[5.0, 12.0, 7.5])
    assert decode.seconds == (4.0, 10.0, 6.0)
    assert decode.step_seconds == 6.0 / 4
    assert decode.tokens_per_second == pytest.approx(8 / 1.5)
    assert decode.context == 66.5
    assert (prefill.tokens, prefill.seconds) == (512, (1.0, 2.0, 1.5))


def _decode(case: str, engine: str, *seconds: float, batch: int = 8, context: float = 160, budget: float | None = None) -> Decode:
    return Decode(case, engine, batch, context, 1, seconds, budget)


def test_ratios_are_of_medians_and_name_what_is_missing() -> None:
    decodes = [
        _decode("b8", "dense", 2.0, 9.0, 1.0),
        _decode("b8", "transformers", 5.0, 4.0, 60.0),
        _decode("4k_b8", "dense", 3.0),
        _decode("4k_b8", "sparse", 2.0, budget=2),
        _decode("4k_b8", "vllm", 5.0),
    ]
    found = ratios(decodes, make_predictor(SHAPE, FAST, 1.0, decodes), {"8k_b32": "too large", "vllm": "not here"})
    assert set(found) == KEYS == set(RATIOS)
    assert found["dense_vs_transformers_b8"]["measured"] == 2.5
    assert found["dense_vs_transformers_b8"]["predicted"] is None
    assert "not predicted" in found["dense_vs_transformers_b8"]["reason"]
    assert found["sparse_vs_dense_4k_b8"]["measured"] == 1.5
    assert found["sparse_vs_vllm_4k_b8"]["measured"] == 2.5
    assert found["sparse_vs_vllm_4k_b8"]["predicted"] == found["sparse_vs_dense_4k_b8"]["predicted"]
    assert found["sparse_vs_dense_8k_b32"] == {"measured": None, "predicted": None, "reason": "too large"}
    assert found["dense_vs_vllm_b8"]["reason"] == "not here"


def test_predictions_count_the_bytes_that_must_move_and_the_overhead_of_short_prompts() -> None:
    """160 tokens are 10 pages. Dense: 2,000 + 160 x 384 = 63,440 bytes. Budget 2 reads 5 pages, 80 tokens, in the last of 3 layers, and 10
    centroids of 64 bytes: 2,000 + 160 x 256 + 80 x 128 + 640 = 53,840."""
    sparse, dense = _decode("4k_b8", "sparse", 1.0, batch=1, budget=2), _decode("4k_b8", "dense", 1.0, batch=1)
    bare = Predictor(SHAPE, FAST, 1000.0, {})
    assert bare.floor_seconds(dense) == pytest.approx(63.44)
    assert bare.floor_seconds(sparse) == pytest.approx(53.84)
    assert bare.step_seconds(sparse) == pytest.approx(53.84)
    short = _decode("b1", "dense", 12.0, batch=1, context=10)  # 2,000 + 10 x 384 = 5,840 bytes: 5.84 s, so 6.16 s are overhead
    with_overhead = make_predictor(SHAPE, FAST, 1000.0, [short, sparse, dense])
    assert with_overhead.overheads == {1: pytest.approx(6.16)}
    assert with_overhead.floor_seconds(dense) == pytest.approx(63.44)
    found = ratios([sparse, dense], with_overhead, {})["sparse_vs_dense_4k_b8"]
    assert found["predicted"] == pytest.approx((63.44 + 6.16) / (53.84 + 6.16))


# -- the pacemaker ----------------------------------------------------------------------------------------------------------------


def test_blocks_take_turns_once_the_batch_is_full_and_the_clock_stands_still_between_rounds() -> None:
    now = [0.0]
    pauses = []

    def pause() -> None:
        pauses.append(now[0])
        now[0] += 1000

    pacemaker = Pacemaker(("dense", "sparse"), batch=2, steps=3, rounds=2, between=pause, clock=lambda: now[0])
    schedule = PacedSchedule((4, 6), 0.86, "mine", "", pacemaker)
    seen = []
    for step in range(30):
        full = step >= 5
        positions = np.arange(2000 + step, 2000 + step + (2 if full else 1))
        budgets = schedule.budgets_at(positions)
        seen.append("dense" if (budgets == DENSE).all() else "sparse")
        assert seen[-1] == "dense" or budgets.tolist() == [6, 6]
        now[0] += 1.0 if seen[-1] == "sparse" else 2.0
        if pacemaker.finished:
            break
    assert seen == ["dense"] * 5 + (["dense"] * 3 + ["sparse"] * 3) * 3 + ["dense"]
    assert pacemaker.blocks["dense"].seconds == [6.0, 6.0]
    assert pacemaker.blocks["sparse"].seconds == [3.0, 3.0]
    assert len(pauses) == 3
    # The first counted dense block is steps 11 to 13, of sequences with 2,012.5 tokens and on; the second 17 to 19.
    assert pacemaker.blocks["dense"].context == pytest.approx(np.mean([2012.5, 2013.5, 2014.5, 2018.5, 2019.5, 2020.5]))
    assert pacemaker.blocks["sparse"].budget == 6


def test_an_engine_alternates_over_one_batch_with_pages_of_its_own() -> None:
    policy = policy_of_shape("0.5m", torch.float32, torch.device("cpu"))
    case = LongCase("4k_b8", batch=3, context=400, steps=4, rounds=2)
    prompts = list(np.random.default_rng(0).integers(0, 100, (3, case.prompt), dtype=np.int32))
    pacemaker = Pacemaker(("dense", "sparse"), batch=3, steps=4, rounds=2)
    report = run_paced(policy, prompts, 1, case.tokens, Schedule((5,), 0.86, "five"), pacemaker)
    assert report.prefill_tokens == 3 * case.prompt
    assert [len(blocks.seconds) for blocks in pacemaker.blocks.values()] == [2, 2]
    assert report.sparse_share == pytest.approx(3 * 4 * 3 / (3 * case.tokens))  # of three rounds, the first included
    assert report.largest_budget == 5
    assert pacemaker.blocks["sparse"].budget == 5
    assert case.prompt < pacemaker.blocks["dense"].context < case.context


# -- fairness ---------------------------------------------------------------------------------------------------------------------


def test_no_engine_stops_early_and_all_are_given_the_same_prompts() -> None:
    policy = policy_of_shape("0.5m", torch.float32, torch.device("cpu"))
    stop_everywhere = unwrap(policy.model).generation_config
    stop_everywhere.eos_token_id = list(range(100))
    case = ShortCase(batch=2, prompt=5, tokens=7)
    prompts = list(np.random.default_rng(0).integers(0, 100, (2, 5), dtype=np.int32))
    seen: list[tuple[Any, int]] = []

    class Recorder:
        name = "recorder"

        def seconds(self, prompts: Any, tokens: int) -> float:
            seen.append((prompts, tokens))
            return 1.0 if tokens == 1 else 13.0

    results = run_short(case, [OwnEngine(policy, 16), TransformersEngine(policy), Recorder()], prompts, rounds=2)
    assert [decode.engine for _, decode in results] == ["dense", "transformers", "recorder"]
    assert results[2][1].seconds == (12.0, 12.0)
    assert results[2][1].steps == 6
    assert [tokens for _, tokens in seen] == [1, 7, 1, 7, 1, 7]  # the first round warms up
    assert all(given is prompts for given, _ in seen)
    assert unwrap(policy.model).generation_config is stop_everywhere


def test_transformers_keeps_the_prompts_and_nothing_else() -> None:
    policy = policy_of_shape("0.5m", torch.float32, torch.device("cpu"))
    engine = TransformersEngine(policy)
    prompts = list(np.random.default_rng(0).integers(0, 100, (2, 30), dtype=np.int32))
    for tokens in (1, 5, 1):
        assert engine.resumed_seconds(prompts, tokens) > 0
        assert engine._cache is not None
        assert engine._cache.get_seq_length() == 29


def test_a_cache_is_as_large_as_its_keys_and_values() -> None:
    policy = random_policy()  # 2 layers, 2 KV heads of 12, float32
    assert cache_bytes(policy, 10) == 10 * 2 * 2 * 2 * 12 * 4


# -- the plan ---------------------------------------------------------------------------------------------------------------------


def test_the_full_plan_is_what_was_promised() -> None:
    plan = make_plan(8192, rounds=5, quick=False, accelerator=False)
    assert [(case.batch, case.prompt, case.tokens) for case in plan.short] == [(8, 64, 64), (32, 64, 64)]
    assert [(case.key, case.batch, case.context, case.shared) for case in plan.long] == [
        ("4k_b8", 8, 4096, False),
        ("8k_b8", 8, 8192, False),
        ("8k_b32", 32, 8192, False),
        ("4k_b8_shared", 8, 4096, True),
    ]
    assert all(case.prompt + case.tokens == case.context for case in plan.long)
    assert (plan.shared_prompt, plan.shared_group, plan.rounds) == (2048, 8, 5)
    assert "16k_b8" in {case.key for case in make_plan(32768, rounds=5, quick=False, accelerator=True).long}


def test_contexts_shrink_with_the_model_and_what_does_not_fit_is_left_out_with_its_reason() -> None:
    plan = make_plan(2048, rounds=5, quick=False, accelerator=False)
    assert [case.context for case in plan.long] == [1024, 2048, 2048, 1024]
    short = make_plan(256, rounds=5, quick=False, accelerator=False)
    assert [case.key for case in short.long] == ["8k_b8", "8k_b32"]
    assert short.left_out[0] == ("4k_b8", "a context of 128 tokens leaves no room for 201 new ones")
    with pytest.raises(BenchError, match="context of 48 tokens is too short"):
        make_plan(48, rounds=5, quick=True, accelerator=False)
    fitted = fit_memory(plan, token_bytes=1000, free=40e6)
    assert [case.key for case in fitted.long] == ["4k_b8", "8k_b8", "4k_b8_shared"]
    assert fitted.left_out[0][0] == "8k_b32"
    assert "does not fit" in fitted.left_out[0][1]


# -- vLLM's process ---------------------------------------------------------------------------------------------------------------

FAKE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print("noise", file=sys.stderr)
    if request["op"] == "load":
        answer = {"version": "9.9 " + request["dtype"]} if request["model"] != "missing" else {"error": "OSError: no such model"}
    elif request["tokens"] == 13:
        sys.exit("vLLM fell over")
    else:
        count = len(request["prompts"]) * request["tokens"]
        answer = {"seconds": count + 0.5 * request["forget"], "tokens": count - (request["tokens"] == 7)}
    print(json.dumps(answer), flush=True)
"""
PROMPTS = [np.array([1, 2], dtype=np.int32), np.array([3, 4], dtype=np.int32)]
LOAD: dict[str, Any] = {"dtype": "bfloat16", "context": 64, "batch": 2, "threads": 1, "cache_gib": 1, "random": False}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[VllmWorker]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    with VllmWorker(Path(sys.executable), script) as started:
        yield started


def test_the_process_is_asked_line_by_line(worker: VllmWorker) -> None:
    worker.load("model", **LOAD)
    assert worker.version == "9.9 bfloat16"
    assert worker.seconds(PROMPTS, 4) == 8.5  # what was cached is dropped
    assert worker.resumed_seconds(PROMPTS, 4) == 8.0


def test_what_goes_wrong_in_the_process_is_said(worker: VllmWorker) -> None:
    with pytest.raises(BenchError, match="OSError: no such model"):
        worker.load("missing", **LOAD)
    with pytest.raises(BenchError, match="sampled 13 tokens instead of 14"):
        worker.seconds(PROMPTS, 7)
    with pytest.raises(BenchError, match="vLLM fell over"):
        worker.seconds(PROMPTS, 13)
    with pytest.raises(BenchError, match="the process has ended"):
        worker.seconds(PROMPTS, 4)


def test_a_python_that_is_not_there_and_one_without_vllm_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nowhere cannot be started"):
        VllmWorker(tmp_path / "nowhere")
    assert "swarm_node" not in WORKER.read_text()
    with VllmWorker(Path(sys.executable)) as started, pytest.raises(BenchError, match="No module named 'vllm'"):
        started.load("model", **LOAD)


# -- kernels ----------------------------------------------------------------------------------------------------------------------


def test_the_floor_reads_the_whole_cache_and_rows_are_held_against_it() -> None:
    workload = Workload(batch=2, length=64, layers=3, kv_heads=2, group=2, head_size=32, budget=1)
    assert workload.cache_bytes == 2 * 2 * 64 * 2 * 32 * 2 * 3
    assert workload.centroid_bytes == workload.cache_bytes / 32
    assert workload.list_width == 4
    data = StepData(workload)
    floor = data.floor(choose_backend(torch.device("cpu")).kernels)
    assert data.caches[0].keys.untyped_storage().nbytes() == floor.size == workload.cache_bytes
    ran = []
    rows = measure([floor, Candidate("half", lambda: ran.append(1), floor.size / 2)], 3, torch.device("cpu"))
    assert len(ran) == 4
    assert [len(row.seconds) for row in rows] == [3, 3]
    assert rows[0].share == pytest.approx(1)
    assert rows[1].share == pytest.approx(rows[1].rate / rows[0].rate)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits from little data, which is all that a test needs."""
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_MATRIX", {"cpu": 64, "cuda": 64})


def test_every_kernel_is_timed_against_its_bytes(small_buffers: None) -> None:
    times = bench_kernels("0.5m", batch=2, context=128, budget=2, repeats=1, dtype=torch.float32, device=torch.device("cpu")).as_json()
    sizes = {row["name"]: row["bytes"] for row in times["kernels"]}
    width = 2 * 32 * 4  # two KV heads of 32 float32
    assert sizes == {
        "memory read (floor)": 3 * 2 * 2 * 128 * width,
        "append, a decode step": 3 * 2 * 2 * (2 * width + 2 * width),  # read and write: keys, values, and twice as many query heads
        "append, 128 tokens of prefill": 3 * 128 * 2 * (2 * width + 2 * width),
        "select, 5 of 8 pages": 3 * 2 * 8 * width,
        "attend, dense": 3 * 2 * 2 * 128 * width,
        "attend, 5 of 8 pages": 3 * 2 * 2 * 80 * width,
        "attend, 128 tokens of prefill": 3 * (2 * 128 * width + 2 * 128 * 2 * width),
        "linear, 2 tokens": 3 * (320 * 128 + 2 * (128 + 320)) * 4,
        "linear, 512 tokens": 3 * (320 * 128 + 512 * (128 + 320)) * 4,
        "sum and norm, 512 tokens": 3 * 4 * 512 * 128 * 4,
        "gate, 512 tokens": 3 * 3 * 512 * 320 * 4,
        "log-probs of 512 tokens and back": (3 * 100 * 128 + 2 * 512 * 128) * 4,
        "log-probs of 512 tokens and back, whole logits": (3 * 100 * 128 + 2 * 512 * 128) * 4,
    }
    assert times["machine"]["read_bytes_per_second"] > 0
    with pytest.raises(BenchError, match="try 112"):
        bench_kernels("0.5m", batch=2, context=100, budget=2, repeats=1, dtype=torch.float32, device=torch.device("cpu"))


def test_known_shapes_have_as_many_parameters_as_their_models() -> None:
    policy = policy_of_shape("0.5m", torch.bfloat16, torch.device("cpu"))
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}
    counts = {"0.5m": sum(parameter.numel() for parameter in policy.model.parameters())}
    for name, shape in SHAPES.items():
        attention = shape.hidden * shape.head_size * (2 * shape.heads + 2 * shape.kv_heads)
        layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
        embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
        count = shape.layers * layer + embeddings + shape.hidden
        assert counts.get(name, count) == count
        counts[name] = count
    assert counts["135m"] == 134_515_008
    assert counts["8b"] == 8_030_261_248
    assert 1.7e9 < counts["1.7b"] < 1.8e9


# -- the whole ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(small_buffers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int | str, str, str]:
        monkeypatch.setattr(sys, "argv", ["swarm-node", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


def test_a_quick_run_of_a_tiny_model_writes_what_it_prints(run: Any, tmp_path: Path) -> None:
    code, out, err = run(
        *("rollout", "--model", "tiny-s", "--quick", "--repeats", 1, "--budget", 2, "--dtype", "float32", "--device", "cpu", "--json"),
        *("--out", tmp_path / "out"),
    )
    assert code == 0, err
    results = json.loads(out)
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["ratios"]) == KEYS
    for name, entry in results["ratios"].items():
        assert (entry["measured"] is None) == ("vllm" in name)
        assert (entry["predicted"] is None) == (not name.startswith("sparse_vs_dense"))
        assert entry["predicted"] is not None or entry["reason"]
    assert [(case["case"], case["engine"]) for case in results["cases"]] == [
        ("b8", "dense"),
        ("b8", "transformers"),
        ("b32", "dense"),
        ("b32", "transformers"),
        ("4k_b8", "dense"),
        ("4k_b8", "sparse"),
        ("4k_b8", "transformers"),
        ("8k_b8", "dense"),
        ("8k_b8", "sparse"),
        ("8k_b32", "dense"),
        ("8k_b32", "sparse"),
        ("4k_b8_shared", "dense"),
        ("4k_b8_shared", "sparse"),
    ]
    assert all(len(case["seconds"]) == 1 for case in results["cases"])
    assert results["machine"]["dtype"] == "float32"
    assert results["shared_prompt"]["group"] == 8
    text, page = (tmp_path / "out" / "summary.md").read_text(), (tmp_path / "out" / "report.html").read_text()
    assert (text, page) == (summary(results), render(results))
    assert "swarm-node bench rollout --model tiny-s --quick" in text
    assert results["machine"]["processor"] in text
    assert page.count('class="plotly-graph-div"') == 2
    assert len(case_table(results)[1]) == 13


def test_a_model_without_a_schedule_is_timed_densely_and_told_what_to_do() -> None:
    chosen, why = choose("auto", None, "random 0.5m")
    assert chosen is None
    assert "swarm-node calibrate" in why
    assert "--budget" in why
    chosen, _ = choose("qwen3-1.7b@0.86", None, "random 0.5m")
    assert chosen is not None
    assert chosen.pages[:2] == (29, 61)
    found = ratios([_decode("4k_b8", "dense", 1.0)], make_predictor(SHAPE, FAST, 1.0, []), {"sparse": why})
    assert found["sparse_vs_dense_4k_b8"] == {"measured": None, "predicted": None, "reason": why}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollout", "--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["rollout", "--random-shape", "7q"], "unknown shape '7q'. Known shapes: 0.5m (tiny-s), 135m"),
        (["rollout", "--model", "tiny-s", "--schedule", "nothing"], "there is no schedule 'nothing'"),
        (["rollout", "--model", "tiny-s", "--schedule", "dense", "--budget", "4"], "exclude each other"),
        (["rollout", "--model", "tiny-s", "--quick", "--vllm-python", "nowhere/python"], "nowhere/python cannot be started"),
        (["kernels", "--shape", "7q"], "unknown shape '7q'"),
        (["kernels", "--context", "100"], "no whole number of pages"),
    ],
)
def test_bad_input_is_named(run: Any, arguments: list[str], expected: str) -> None:
    code, out, err = run(*arguments, "--device", "cpu")
    assert (code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err


def test_a_plan_gives_rivals_room_for_their_longest_case() -> None:
    long = (LongCase("4k_b8", 8, 4096, 16, 5, rivals=True), LongCase("8k_b8", 8, 8192, 16, 5))
    plan = Plan(5, (ShortCase(32),), 2048, 8, long)
    assert plan.longest == 4096
    assert plan.rival_tokens() == 8 * 4096
