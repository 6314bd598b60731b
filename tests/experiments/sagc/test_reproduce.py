"""The group-size study: its runs, what is kept between starts, its tables and its report."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_protocols.group import Finish

from swarm_node.control.options import SagcOptions
from swarm_node.experiments.sagc import study
from swarm_node.experiments.sagc.bandit import bandit_study
from swarm_node.experiments.sagc.mixed_levels import MixedLevels
from swarm_node.experiments.sagc.over_sampling import OverSamplingEngine, first_to_finish
from swarm_node.experiments.sagc.recorded import RecordedTrace, recorded_trace
from swarm_node.experiments.sagc.report import render
from swarm_node.experiments.sagc.tables import kept_length, posterior_error, seconds_to, summary, target_accuracy, training_rows
from swarm_node.experiments.sagc.traces import trace_study
from swarm_node.experiments.sagc.training import TrainingSpec, train
from swarm_node.experiments.workers import ExperimentError, Job, finished, run_jobs
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.reference import ReferenceEngine
from swarm_node.tasks.chain_sum import ChainSum

SPEC = TrainingSpec(
    "SAGC", "grpo", 3, steps=2, prompts=2, probe_every=1, probe_problems=2, probe_samples=8, final_problems=2, model="tiny-s"
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ModelOptions(name="tiny-s", device="cpu"))


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(json.dumps(train(SPEC)))
    return recorded


# -- a run ------------------------------------------------------------------------------------------------------------------------


def test_a_run_records_every_step_and_probe(run: dict[str, Any]) -> None:
    assert [probe["step"] for probe in run["probes"]] == [0, 1, 2]
    assert len(run["steps"]) == 2
    assert run["probes"][2]["seconds"] == pytest.approx(sum(step["seconds"] for step in run["steps"]))
    assert run["probes"][0]["seconds"] == 0
    assert all(step["seconds"] > 0 and step["wall"] > 0 for step in run["steps"])
    assert set(run["probes"][0]["truth"]) == {"4", "8"}  # of eight samples no group of 16 can be cut
    assert 2 <= run["steps"][0]["log2_g"] <= 3  # starts at the smallest candidate and moves one at most
    assert run["spec"] == json.loads(json.dumps(asdict(SPEC)))


def test_the_same_spec_gives_the_same_run_but_for_its_seconds(run: dict[str, Any]) -> None:
    again = json.loads(json.dumps(train(SPEC)))
    for first, second in zip(run["steps"] + run["probes"], again["steps"] + again["probes"], strict=True):
        assert {**first, "seconds": 0, "wall": 0} == {**second, "seconds": 0, "wall": 0}
    assert (run["eval"], run["ood"]) == (again["eval"], again["ood"])


def test_a_fixed_size_and_dapo_run_too() -> None:
    result = train(replace(SPEC, algorithm="dapo", control={"group_size": 4}, extra=2, levels=(1, 2), steps=1))
    assert result["steps"][0]["log2_g"] == 2
    assert result["steps"][0]["information"] == 6  # two groups of 4


# -- over-sampling ----------------------------------------------------------------------------------------------------------------


def _sample(engine: ReferenceEngine, policy: Policy, size: int) -> Rollout:
    task = ChainSum(2)
    requests = [GroupRequest(policy.encode_prompt(task.problem(0, index).prompt), size, index) for index in range(3)]
    return engine.generate(requests, seed=5, temperature=1.0, max_new_tokens=96)


def test_over_sampling_keeps_the_shortest_and_samples_no_further(policy: Policy) -> None:
    """Noise belongs to (seed, group, member): the plain engine shows what every completion would have become."""
    options = RolloutOptions()
    whole = _sample(ReferenceEngine(policy, options), policy, 9)
    kept = _sample(OverSamplingEngine(policy, options, extra=3), policy, 6)
    for everything, group in zip(whole.groups, kept.groups, strict=True):
        first = first_to_finish([len(completion) for completion in everything], 6)
        assert [completion.tokens.tolist() for completion in group] == [everything[index].tokens.tolist() for index in first]
        assert all(completion.finish is Finish.STOP for completion in group)
    cut = [
        sum(min(len(completion), max(map(len, group))) for completion in everything)
        for everything, group in zip(whole.groups, kept.groups, strict=True)
    ]
    assert kept.report.tokens == sum(cut) < whole.report.tokens


def test_over_sampling_takes_cut_completions_where_too_few_end(policy: Policy) -> None:
    engine = OverSamplingEngine(policy, RolloutOptions(), extra=2)
    prompt = policy.encode_prompt("7+15+9=")
    group = engine.generate([GroupRequest(prompt, 4, 0)], seed=0, temperature=1.0, max_new_tokens=1).groups[0]
    assert [len(completion) for completion in group] == [1, 1, 1, 1]


# -- tasks and lengths ------------------------------------------------------------------------------------------------------------


def test_mixed_levels_draw_every_level_and_grade_as_they_do() -> None:
    task = MixedLevels((1, 3))
    problems = [task.problem(4, index) for index in range(200)]
    assert 70 < sum(problem.level == 1 for problem in problems) < 130
    assert {problem.level for problem in problems} == {1, 3}
    assert {problem.task for problem in problems} == {"chain-sum-mix:1-3"}
    assert problems[7] == task.problem(4, 7)
    assert task.reward(problems[0], f"#{problems[0].answer}").correct
    assert not task.reward(problems[0], f"#{problems[0].answer + 1}").correct


def test_a_recorded_group_comes_from_one_problem_without_repeats() -> None:
    trace = RecordedTrace("mine", {0: np.array([[1, 2, 3], [10, 20, 30]]), 4: np.array([[7, 7, 7]])}, stretch=2)
    groups = trace.sample(np.random.default_rng(0), 1, 50, 3)
    assert {tuple(sorted(group)) for group in groups.tolist()} == {(1, 2, 3), (10, 20, 30)}
    assert trace.mean_length(3) == 11
    assert trace.mean_length(5) == 7  # nearer to step 8 than to step 0
    assert trace.settled == 8
    with pytest.raises(ValueError, match="a group of 4"):
        trace.sample(np.random.default_rng(0), 0, 1, 4)


def test_the_committed_record_has_a_tail_at_its_start() -> None:
    trace = recorded_trace()
    lengths = trace.sample(np.random.default_rng(0), 0, 400, 16)
    assert (lengths.max(axis=1) > 2 * np.median(lengths, axis=1)).mean() > 0.2
    assert lengths.min() >= 1


# -- what is kept between starts --------------------------------------------------------------------------------------------------

WORKER = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'spec': json.loads(sys.argv[2]), 'made': 'now'}))"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a worker's module that only copies its spec."""
    (tmp_path / "copying_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "copying_worker"


def test_finished_runs_are_kept_and_others_are_done(tmp_path: Path, worker: str) -> None:
    kept, changed, fresh = (Job(name, worker, {"seed": seed}) for name, seed in (("a", 1), ("b", 2), ("c", 3)))
    (tmp_path / "a.json").write_text(json.dumps({"spec": {"seed": 1}, "made": "before"}))
    (tmp_path / "b.json").write_text(json.dumps({"spec": {"seed": 9}, "made": "before"}))
    said: list[str] = []
    results = run_jobs([kept, changed, fresh], tmp_path, 2, said.append)
    assert [result["made"] for result in results] == ["before", "now", "now"]
    assert said[0] == "1 of 3 runs are kept from before"
    assert finished(fresh, tmp_path) == {"spec": {"seed": 3}, "made": "now"}


def test_a_result_of_other_weights_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = study.training_specs(quick=True)[0]
    job = study.job_of(spec)
    (tmp_path / f"{job.name}.json").write_text(json.dumps({"spec": job.spec}))
    assert finished(study.job_of(spec), tmp_path) is not None
    monkeypatch.setattr(study, "SHIPPED", tmp_path)
    (tmp_path / "tiny-m").mkdir()
    (tmp_path / "tiny-m" / "model.safetensors").write_bytes(b"others")
    assert finished(study.job_of(spec), tmp_path) is None


def test_a_failed_run_says_what_it_said(tmp_path: Path, worker: str) -> None:
    (tmp_path / "copying_worker.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(ExperimentError, match="no such model"):
        run_jobs([Job("a", worker, {})], tmp_path, 1, lambda line: None)


# -- tables -----------------------------------------------------------------------------------------------------------------------


def _made_up(label: str, accuracy: float, seconds: float, length: float = 20.0, seed: int = 0) -> dict[str, Any]:
    """A run of 2 steps of `seconds` each, whose accuracy rises from .2 to `accuracy` in the second one."""
    step: dict[str, Any] = {"length": length, "information": 28.0, "posterior": {"8": 0.25, "16": 0.5}}
    step |= {"log2_g": 3.0, "rate": 0.5, "multiplier": 1.0, "infeasible": False, "seconds": seconds, "wall": 2 * seconds, "reward": 0.5}
    probes = [
        {"step": at, "seconds": at * seconds, "wall": 2 * at * seconds, "accuracy": found, "length": 20.0, "truth": {"8": 0.5, "16": 0.5}}
        for at, found in enumerate((0.2, 0.2, accuracy))
    ]
    control = {"group_size": int(label.split()[1])} if label.startswith("fixed") else {}
    spec = {"label": label, "algorithm": "grpo", "seed": seed, "levels": [1], "control": control}
    return {"spec": spec, "steps": [step, step], "probes": probes, "eval": accuracy, "ood": 0.1}


def test_the_target_is_nine_tenths_of_the_best_fixed_sizes_gain() -> None:
    runs = {"fixed 8": [_made_up("fixed 8", 0.5, 1.0)], "fixed 16": [_made_up("fixed 16", 0.7, 4.0)], "SAGC": [_made_up("SAGC", 0.9, 1.0)]}
    assert target_accuracy(runs) == pytest.approx(0.2 + 0.9 * 0.5)


def test_seconds_to_a_target_lie_on_the_line_between_probes() -> None:
    probes = _made_up("SAGC", 0.6, 10.0)["probes"]
    assert seconds_to(probes, 0.4) == pytest.approx(15.0)
    assert seconds_to(probes, 0.4, "wall") == pytest.approx(30.0)
    assert seconds_to(probes, 0.61) is None


def test_training_rows_average_seeds_and_compare_with_fixed_16() -> None:
    runs = [_made_up("fixed 16", 0.7, 4.0), _made_up("SAGC", 0.7, 1.0), _made_up("SAGC", 0.8, 2.0, seed=1)]
    fixed, ours = training_rows(runs)
    assert (fixed["controller"], ours["controller"], ours["seeds"]) == ("fixed 16", "SAGC", 2)
    assert fixed["seconds_to_target"] == pytest.approx(7.6)  # 4 s, then .9 of 4 s
    assert ours["seconds_to_target"] == pytest.approx(((1 + 0.9) + (2 + 2 * 0.45 / 0.6)) / 2, abs=0.01)
    assert ours["seconds_to_target_over_fixed_16"] == pytest.approx(ours["seconds_to_target"] / 7.6, abs=1e-3)
    assert ours["eval_accuracy"] == 0.75
    assert ours["eval_accuracy_sd"] == pytest.approx(statistics.stdev([0.7, 0.8]), abs=1e-4)
    assert ours["posterior_error"] == 0.125  # .25 at 8 and 0 at 16
    assert fixed["posterior_error"] is None


def test_a_mean_time_is_not_given_where_a_seed_never_arrived() -> None:
    runs = [_made_up("fixed 16", 0.7, 4.0), _made_up("SAGC", 0.7, 1.0), _made_up("SAGC", 0.3, 2.0, seed=1)]
    row = training_rows(runs)[1]
    assert (row["reached_target"], row["seconds_to_target"], row["seconds_to_target_over_fixed_16"]) == (1, None, None)


def test_kept_length_compares_what_was_trained_on_with_what_the_policy_writes() -> None:
    assert kept_length(_made_up("over-sampling 8 of 12", 0.5, 1.0, length=15.0)) == pytest.approx(0.75)
    assert posterior_error(_made_up("fixed 8", 0.5, 1.0)) is None


# -- the whole --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The study with its training runs given, so that only the simulations are done."""
    out = tmp_path_factory.mktemp("out")
    short = bandit_study({"paper": SagcOptions()}, steps=40, seeds=2)
    traces = trace_study(20, 1)
    with pytest.MonkeyPatch.context() as patch:
        runs = [{**run, "spec": {**run["spec"], "label": label}} for label in ("SAGC", "over-sampling 8 of 12")]
        fixed = {**run, "spec": {**run["spec"], "label": "fixed 16", "control": {"group_size": 16}}}
        patch.setattr(study, "run_jobs", lambda *given: [fixed, *runs])
        patch.setattr(study, "bandit_study", lambda **given: short)
        patch.setattr(study, "trace_study", lambda *given: traces)
        patch.setattr(study, "decision_times", lambda: {"paper": 30.0, "all extensions": 150.0})
        found = study.reproduce(out, quick=True, workers=1, say=lambda line: None)
    return found, out


def test_the_json_holds_what_it_promises(results: tuple[dict[str, Any], Path]) -> None:
    found, out = results
    saved = json.loads((out / "results.json").read_text())
    assert saved == json.loads(json.dumps(found))
    assert set(saved["bandit"]) >= {"straggler_rate_second_half", "mean_log2_g", "optimum_log2_g"}
    assert saved["bandit"]["optimum_log2_g"] == pytest.approx(2.8)
    assert saved["decision_us"] == 30.0
    assert [row["controller"] for row in saved["training"]] == ["fixed 16", "SAGC", "over-sampling 8 of 12"]
    assert all(0 <= row["straggler_rate"] <= 1 and row["seconds_per_step"] > 0 for row in saved["training"])
    assert {row["problem"] for row in saved["traces"]} >= {"recorded", "levels", "growing"}


def test_the_report_has_every_plot_and_the_papers_numbers(results: tuple[dict[str, Any], Path]) -> None:
    found, out = results
    page = (out / "report.html").read_text()
    assert page == render(found)
    headings = ("accuracy over seconds", "accuracy over steps", "answer length", "group size", "λ", "straggler rate", "seconds a step")
    for heading in (*headings, "belief and truth"):
        assert f"<h2>chain-sum:1, GRPO: {heading}</h2>" in page
    assert page.count('class="plotly-graph-div"') == 9
    assert "99.6 %" in page
    assert "29.5 h" in page
    assert len(page) < 6_000_000
    assert 'src="http' not in page


def test_the_summary_says_what_was_hoped_for_and_measured(results: tuple[dict[str, Any], Path]) -> None:
    found, out = results
    text = (out / "summary.md").read_text()
    assert text == summary(found)
    assert "(0.7 hoped for)" in text
    assert "| controller | straggler rate |" in text


def test_the_full_study_has_three_seeds_of_every_controller_and_both_algorithms() -> None:
    specs = study.training_specs(quick=False)
    assert len({study.job_of(spec).name for spec in specs}) == len(specs)
    one_level = {(spec.label, spec.algorithm, spec.seed) for spec in specs if spec.levels == (1,)}
    assert len(one_level) == len(study.CONTROLLERS) * 2 * 3
    assert {spec.seed for spec in specs if spec.levels == study.MIXED_LEVELS and spec.label == "SAGC prompt_aware"} == {0, 1, 2}
