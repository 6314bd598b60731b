"""Calibration: the prompts, where they lie, which budgets are chosen, and the whole on a small random policy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from swarm_node.cli import app as cli
from swarm_node.rollout.calibration.log import Place
from swarm_node.rollout.calibration.prompts import PromptError, SolvedProblems, TextWindows, worked_sum
from swarm_node.rollout.calibration.search import (
    Calibration,
    CalibrationError,
    CalibrationOptions,
    Cell,
    budgets_of,
    calibrate,
    choose,
    parse_budgets,
    plan,
    raised,
)
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.acceptance import Acceptance
from swarm_node.rollout.sparsity.schedule import DENSE, Schedule, load_schedule
from tests.support.policies import character_tokenizer, family_model, random_policy

# -- prompts --------------------------------------------------------------------------------------------------------------------------


def test_a_worked_sum_is_what_the_task_grades() -> None:
    assert worked_sum((7, 15, 9)) == "7+15=22,22+9=31#31"


def test_prompts_have_the_length_that_was_asked_for_and_end_with_an_open_question() -> None:
    tokenizer = character_tokenizer()
    prompts = SolvedProblems(tokenizer)
    for length in (1, 50, 3000):
        prompt = prompts.prompt("search", 5, length)
        assert prompt.dtype == np.int32
        assert len(prompt) == length
        assert np.array_equal(prompt, SolvedProblems(tokenizer).prompt("search", 5, length))
    text = str(tokenizer.decode(prompts.prompt("search", 5, 3000)))
    assert text.endswith("nswer<pad>")  # these characters alone have no colon
    assert not np.array_equal(prompts.prompt("search", 5, 500), prompts.prompt("search", 6, 500))
    assert not np.array_equal(prompts.prompt("search", 5, 500), prompts.prompt("held-out", 5, 500))
    assert not np.array_equal(prompts.prompt("search", 5, 500), SolvedProblems(tokenizer, seed=1).prompt("search", 5, 500))


def test_windows_of_a_text_keep_search_and_held_out_apart(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 750 + "b" * 250)
    prompts = TextWindows(character_tokenizer(), path)
    a, b = (character_tokenizer().encode(letter)[0] for letter in "ab")
    for index in range(20):
        assert set(prompts.prompt("search", index, 200).tolist()) == {a}
        assert set(prompts.prompt("held-out", index, 200).tolist()) == {b}
    with pytest.raises(PromptError, match=r"1000 tokens, of which 250 for held-out prompts, and one of 251 is needed"):
        prompts.prompt("held-out", 0, 251)
    with pytest.raises(PromptError, match="UTF-8"):
        TextWindows(character_tokenizer(), tmp_path / "missing.txt")


# -- where and what -------------------------------------------------------------------------------------------------------------------


def test_prompts_spread_over_the_sparse_positions_of_every_bin() -> None:
    options = CalibrationOptions(budgets=(29, 61), context=5000, prompts=8, new_tokens=100)
    places = plan(options, 8192)
    assert len({place.index for place in places}) == len(places) == 24
    for bin, low, high in ((0, 512, 1900), (1, 2000, 3900), (2, 4000, 4900)):
        lengths = sorted(place.length for place in places if place.bin == bin)
        assert len(lengths) == 8
        assert low <= lengths[0]
        assert lengths[-1] <= high
        assert max(np.diff(lengths)) < 0.25 * (high - low)
    more = plan(CalibrationOptions(budgets=(29, 61), context=5000, prompts=20, new_tokens=100), 8192)
    assert more[:24] == places


def test_a_bin_that_every_budget_covers_is_not_measured() -> None:
    options = CalibrationOptions(budgets=(122, 200), context=4000)
    assert {place.bin for place in plan(options, None)} == {1}
    assert budgets_of(0, options.budgets, 4000) == ()
    assert budgets_of(1, (200, 29, 29, 247, 300), 8000) == (29, 200)
    assert budgets_of(1, (200, 29), 3000) == (29,)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"9000 tokens is more than the model's 8192"):
        plan(CalibrationOptions(context=9000), 8192)
    with pytest.raises(CalibrationError, match="dense up to 512 tokens"):
        plan(CalibrationOptions(context=600), 8192)
    for text in ("", "29,x", "0,29", "29;61", str(DENSE)):
        with pytest.raises(CalibrationError, match="--budgets"):
            parse_budgets(text)
    assert parse_budgets("61, 29,61") == (29, 61)


def test_the_smallest_budget_that_holds_as_all_larger_ones_do_is_chosen() -> None:
    def cells(bin: int, *p5: float) -> list[Cell]:
        return [Cell(bin, budget, Acceptance(0.97, value, 500), 0.01) for budget, value in zip((29, 61, 93), p5, strict=True)]

    options = CalibrationOptions(context=12_000, threshold=0.86)
    found = choose(
        [
            *cells(0, 0.88, 0.90, 0.93),
            *cells(1, 0.88, 0.84, 0.93),  # 29 was lucky
            *cells(2, 0.80, 0.865, 0.90),  # 61 holds by less than its standard error
            *cells(3, 0.70, 0.75, 0.80),
            *cells(4, 0.50, 0.88, 0.865),  # a larger one need only hold it
        ],
        options,
        "Some/Model-1B",
    )
    assert found.pages == (29, 93, 93, DENSE, 61, 61)
    careful = choose(cells(0, 0.88, 0.90, 0.93), options.model_copy(update={"margin": 3.0}), "model")
    assert careful.pages == (61,) * 6
    doubtful = choose(cells(0, 0.862, 0.865, 0.868), options, "model")
    assert doubtful.pages == (93,) * 6  # none holds it with the margin, and all without: the largest
    assert choose([Cell(0, 29, Acceptance(0.9, 0.861, 500), float("nan"))], options, "model").pages == (29,) * 6
    assert (found.model, found.threshold, found.source) == ("model-1b", 0.86, "calibrated")


def test_a_bin_that_misses_on_held_out_prompts_gets_the_next_budget() -> None:
    def cell(bin: int, budget: int, p5: float, count: int = 500) -> Cell:
        return Cell(bin, budget, Acceptance(0.97, p5, count), 0.01)

    options = CalibrationOptions(budgets=(29, 61, 93), context=8_000, threshold=0.86)
    schedule = Schedule((29, 61, 93, DENSE), 0.86, "calibrated", "model")
    held_out = [cell(0, 29, 0.859), cell(1, 61, 0.86), cell(2, 93, 0.80), cell(3, DENSE, 0.0, 0)]
    assert raised(schedule, held_out, options) == Schedule((61, 61, DENSE, DENSE), 0.86, "calibrated", "model")
    assert raised(schedule, [cell(0, 29, 0.9), cell(1, 61, 0.9), cell(2, 93, 0.9), cell(3, DENSE, 0.0, 0)], options) == schedule
    unmeasured = raised(Schedule((29, 61, 61), 0.86, "calibrated"), [cell(0, 29, 0.9), cell(1, 61, 0.8)], options)
    assert unmeasured.pages == (29, 93, 93)  # the last bin is too short for a completion
    # In 1,600 positions 93 pages and the reserved ones leave 64 tokens; in 1,500 they leave nothing, so that 61 is the largest.
    short = options.model_copy(update={"context": 1500})
    assert raised(Schedule((61,), 0.86, "calibrated"), [cell(0, 61, 0.5)], short).pages == (DENSE,)


# -- the whole ------------------------------------------------------------------------------------------------------------------------

OPTIONS = CalibrationOptions(
    budgets=(1, 4, 16, 48), context=2600, prompts=3, held_out=2, new_tokens=24, threshold=0.5, margin=0.0, completions=1
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    """A small random policy, calibrated, and the log of it."""
    policy = random_policy(model=family_model("llama", max_position_embeddings=2600), stop_ids=frozenset({-1}))
    log = tmp_path_factory.mktemp("calibration") / "log"
    return calibrate(policy, SparseEngine(policy, RolloutOptions()), SolvedProblems(policy.tokenizer), OPTIONS, log=log), log


def test_every_bin_and_budget_is_measured_on_sparse_tokens(measured: tuple[Calibration, Path]) -> None:
    calibration, _ = measured
    assert [(cell.bin, cell.budget) for cell in calibration.cells] == [(bin, budget) for bin in (0, 1) for budget in (1, 4, 16, 48)]
    counts = {(cell.bin, cell.budget): cell.acceptance.count for cell in calibration.cells}
    # The first token of each comes from the prefill; beyond position 2,000 everything else is sparse.
    assert all(counts[1, budget] == 3 * 23 for budget in OPTIONS.budgets)
    # 48 pages and three are 816 tokens: of the three prompts of bin 0, those beyond count.
    lengths = [place.length for place in plan(OPTIONS, None) if place.bin == 0]
    assert counts[0, 48] == sum(length + offset >= 816 for length in lengths for offset in range(23))


def test_acceptance_grows_with_the_budget(measured: tuple[Calibration, Path]) -> None:
    means = [cell.acceptance.mean for cell in measured[0].cells if cell.bin == 1]
    assert means == sorted(means)
    assert 0.3 < means[0] < means[-1] <= 1.0


def test_the_schedule_is_verified_on_other_prompts(measured: tuple[Calibration, Path]) -> None:
    calibration, _ = measured
    assert [(cell.bin, cell.budget) for cell in calibration.held_out] == list(enumerate(calibration.schedule.pages))
    assert all(cell.acceptance.count == 2 * 4 * 23 for cell in calibration.held_out if cell.bin == 1 and cell.budget != DENSE)
    assert all(cell.acceptance.p5 >= OPTIONS.threshold for cell in calibration.held_out if cell.acceptance.count)


def test_an_interrupted_run_goes_on_where_it_was(measured: tuple[Calibration, Path], tmp_path: Path) -> None:
    calibration, log = measured
    policy = random_policy(model=family_model("llama", max_position_embeddings=2600), stop_ids=frozenset({-1}))
    cut = tmp_path / "log"
    lines = log.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:3]) + lines[3][:40])
    asked: list[int] = []

    class Counting(SparseEngine):
        def generate(self, requests, **arguments):  # type: ignore[no-untyped-def]
            asked.extend(request.key for request in requests)
            return super().generate(requests, **arguments)

    again = calibrate(policy, Counting(policy, RolloutOptions()), SolvedProblems(policy.tokenizer), OPTIONS, log=cut)
    assert len(asked) == len(lines) - 1 - 2  # the heading, and two finished prompts
    assert again.schedule == calibration.schedule
    for cell, other in zip(again.cells, calibration.cells, strict=True):
        assert cell.acceptance.p5 == pytest.approx(other.acceptance.p5, abs=2e-4)  # the file keeps four digits
    assert len(plan(OPTIONS, None)) == 6
    asked.clear()
    calibrate(policy, Counting(policy, RolloutOptions()), SolvedProblems(policy.tokenizer, seed=2), OPTIONS, log=cut)
    assert len(asked) == len(lines) - 1  # other prompts: nothing of the old file counts


def test_progress_names_each_prompt(measured: tuple[Calibration, Path]) -> None:
    calibration, log = measured
    seen: list[tuple[Place, int, int]] = []
    policy = random_policy(model=family_model("llama", max_position_embeddings=2600), stop_ids=frozenset({-1}))
    again = calibrate(
        policy,
        SparseEngine(policy, RolloutOptions()),
        SolvedProblems(policy.tokenizer),
        OPTIONS,
        log=log,
        progress=lambda place, done, total: seen.append((place, done, total)),
    )
    assert [done for _, done, _ in seen] == list(range(1, 11))
    assert {total for _, _, total in seen} == {10}
    assert [place.part for place, _, _ in seen] == ["search"] * 6 + ["held-out"] * 4
    assert again.schedule == calibration.schedule


# -- the command ----------------------------------------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["swarm-node", "calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_the_command_writes_schedule_numbers_and_plots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    arguments = ("--budgets", "1,3,8", "--context", "256", "--samples", "2", "--held-out", "1", "--new-tokens", "16")
    assert command(monkeypatch, "--model", "tiny-s", *arguments, "--home", home) == 0
    out = capsys.readouterr()
    assert "3 of 3: held-out prompt" in out.err
    assert "pages per 2,000 positions" in out.out
    schedule = load_schedule(home / "schedule.json")
    assert schedule.model == "tiny-s"
    results = json.loads((home / "calibration.json").read_text())
    assert results["schedule"] == list(schedule.pages)
    assert [cell["budget"] for cell in results["search"]] == [1, 3, 8]
    assert "By budget" in (home / "calibration.html").read_text()


def test_bad_input_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for arguments, message in (
        (("--budgets", "many"), "write them like 29,61,93"),
        (("--context", "100000"), "lower --context"),
        (("--budgets", "200", "--context", "256"), "smaller budgets"),
        (("--budgets", "1", "--context", "256", "--prompts", str(tmp_path / "none.txt")), "UTF-8"),
    ):
        assert command(monkeypatch, "--model", "tiny-s", *arguments, "--home", home) == 2
        assert message in capsys.readouterr().err
    assert not home.exists()
