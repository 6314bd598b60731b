"""gsm8k: the published format, named by content, format and answer rewarded apart and together."""

from __future__ import annotations

import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from swarm_node.tasks.base import Problem, TaskError
from swarm_node.tasks.gsm8k import GSM8K, load_gsm8k
from swarm_node.tasks.registry import load_task


def line(number: int, answer: str | None = None) -> str:
    solution = f"Half of {2 * number} is <<{2 * number}/2={number}>>{number}.\nThat is all.\n#### "
    return json.dumps({"question": f"What is half of {2 * number}?", "answer": solution + (answer or f"{number:,}")})


def write(path: Path, numbers: range) -> Path:
    path.write_text("\n".join(map(line, numbers)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", range(0, 60))
    write(tmp_path / "test.jsonl", range(1000, 1020))
    return tmp_path


def prompts(task: GSM8K, split: str, count: int = 400) -> set[str]:
    return {task.problem(0, index, split).prompt for index in range(count)}  # type: ignore[arg-type]


def test_a_folder_trains_on_its_training_file_and_evaluates_on_its_test_file(folder: Path) -> None:
    task = load_gsm8k(str(folder))
    problem = task.problem(seed=3, index=7)
    assert problem.prompt.startswith(f"What is half of {2 * problem.answer}?")
    assert "####" in problem.prompt
    assert (problem.answer.denominator, problem.level, problem.split) == (1, 2, "train")
    assert len(prompts(task, "train")) == 60
    assert len(prompts(task, "eval")) == 20
    assert all(1000 <= task.problem(0, index, "eval").answer < 1020 for index in range(50))


def test_a_single_file_holds_out_the_same_questions_whatever_else_is_in_it(tmp_path: Path) -> None:
    small, large = load_gsm8k(str(write(tmp_path / "a.jsonl", range(100)))), load_gsm8k(str(write(tmp_path / "b.jsonl", range(400))))
    assert prompts(small, "train", 2000).isdisjoint(prompts(small, "eval", 2000))
    assert len(prompts(small, "train", 3000) | prompts(small, "eval", 1000)) == 100
    assert prompts(small, "eval", 2000) == prompts(large, "eval", 5000) & (prompts(small, "train", 3000) | prompts(small, "eval", 1000))


def test_a_question_that_is_in_both_files_is_only_evaluated(folder: Path) -> None:
    write(folder / "test.jsonl", range(50, 70))
    task = load_gsm8k(str(folder))
    assert prompts(task, "train").isdisjoint(prompts(task, "eval"))
    assert len(prompts(task, "train")) == 50


def test_the_name_tells_the_content_and_not_the_path(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    task = load_gsm8k(str(folder))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "test.jsonl").write_text((folder / "test.jsonl").read_text())
    lines = (folder / "train.jsonl").read_text().splitlines()
    (elsewhere / "train.jsonl").write_text("\r\n".join(reversed(lines)))
    same = load_gsm8k(str(elsewhere))
    assert same.name == task.name
    assert task.name.startswith("gsm8k@")
    assert len(task.name) == len("gsm8k@") + 12
    assert [same.problem(1, i) for i in range(20)] == [task.problem(1, i) for i in range(20)]

    (elsewhere / "train.jsonl").write_text("\n".join([*lines[:-1], line(59, "60")]))
    assert load_gsm8k(str(elsewhere)).name != task.name


def test_problems_never_change_between_releases(folder: Path) -> None:
    task = load_gsm8k(str(folder))
    assert task.name == "gsm8k@63fe0ce6d556"
    assert [int(task.problem(0, index).answer) for index in range(6)] == [47, 50, 31, 42, 45, 34]


@pytest.mark.parametrize(
    ("completion", "form", "answer", "value", "correct"),
    [
        ("Half of 144 is 72.\n#### 72", 1, 1, 1.0, True),
        ("#### 72.00", 1, 1, 1.0, True),
        ("#### $72", 1, 1, 1.0, True),
        ("#### 71\n#### 72", 1, 1, 1.0, True),
        ("#### 71", 1, 0, 0.1, False),
        ("72\n#### 71", 1, 0, 0.1, False),
        ("The answer is 72.", 0, 1, 0.9, True),
        ("The answer is 71.", 0, 0, 0.0, False),
        ("72 ####", 0, 0, 0.0, False),
        ("#### seventy-two", 0, 0, 0.0, False),
        ("#### 72 and then 73", 1, 1, 1.0, True),
        ("#### 71 and then 72", 1, 0, 0.1, False),
        ("#### The answer is 72", 1, 1, 1.0, True),
        ("#### 72\nI checked it in 2 ways.", 1, 1, 1.0, True),
        ("#### 72" + " as shown" * 100, 1, 1, 1.0, True),
        ("#### 72\n####", 1, 1, 1.0, True),
        ("#### 72\n#### 71\n####", 1, 0, 0.1, False),
        ("#### 70\n#### 71\n#### 72\n#### 73", 1, 0, 0.1, False),
        ("The answer is 72" + " ok" * 100, 0, 1, 0.9, True),
        ("#### 8*9", 0, 0, 0.0, False),
        ("#### 2003^2002^2001", 0, 0, 0.0, False),
        ("", 0, 0, 0.0, False),
    ],
)
def test_format_and_answer_are_rewarded_apart_and_together(
    folder: Path, completion: str, form: float, answer: float, value: float, correct: bool
) -> None:
    task = load_gsm8k(str(folder))
    reward = task.reward(Problem(task.name, "train", 0, 0, "", Fraction(72)), completion)
    assert reward.value == pytest.approx(value)
    assert (reward.parts, reward.correct) == ({"format": form, "answer": answer}, correct)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{not json", "Expecting property name"),
        ("[1, 2]", "not a JSON object"),
        ('{"question": "What?", "answer": "#### 5', "Unterminated string"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(tmp_path: Path, bad: str, why: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(line(1) + "\n\n" + bad + "\n")
    with pytest.raises(TaskError, match=rf"train\.jsonl, line 3: .*{why}"):
        load_task(f"gsm8k:{tmp_path}")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('{"question": "What?"}', "must be texts"),
        ('{"question": "What?", "answer": 5}', "must be texts"),
        ('{"question": " ", "answer": "#### 1"}', "must be texts"),
        ('{"question": "What?", "answer": "5"}', "does not end with ####"),
        ('{"question": "What?", "answer": "#### five"}', "does not end with ####"),
        ('{"question": "What?", "answer": "#### 5 or 6"}', "does not end with ####"),
        ('{"question": "What?", "answer": "#### 1/0"}', "does not end with ####"),
        ('{"question": "What \\ud800?", "answer": "#### 1"}', "surrogates not allowed"),
    ],
)
def test_a_record_that_cannot_be_graded_is_left_out_and_counted_once(
    folder: Path, caplog: pytest.LogCaptureFixture, bad: str, why: str
) -> None:
    name = load_gsm8k(str(folder)).name
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "train.jsonl").write_text("\n".join([lines[0], bad, *lines[1:], bad]))
    assert not caplog.messages
    assert load_gsm8k(str(folder)).name == name
    (message,) = caplog.messages
    assert re.search(rf"train\.jsonl: 2 of 62 records cannot be used, first line 2: .*{why}.*left out", message)


def test_a_file_without_any_usable_record_is_refused(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "What?", "completion": "5"}\n' * 3)
    with pytest.raises(TaskError, match=r"train\.jsonl: 3 of 3 records cannot be used, first line 1: .*Each line must read"):
        load_gsm8k(str(folder))


def test_byte_order_marks_line_ends_and_blank_lines_are_no_content(folder: Path) -> None:
    name = load_gsm8k(str(folder)).name
    first, *others = (folder / "train.jsonl").read_bytes().splitlines()
    mark = "\ufeff".encode()
    (folder / "train.jsonl").write_bytes(mark + first + b"\r\n\r\n" + mark + b"\r\n".join(others) + b"\r\n \r\n" + mark)
    assert load_gsm8k(str(folder)).name == name


def test_a_missing_or_useless_path_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"cannot read .*nowhere.*give a \.jsonl file"):
        load_task(f"gsm8k:{tmp_path / 'nowhere'}")
    with pytest.raises(TaskError, match=r"holds no train\.jsonl"):
        load_task(f"gsm8k:{tmp_path}")
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="cannot read"):
        load_task(f"gsm8k:{tmp_path}")
    write(tmp_path / "train.jsonl", range(1))
    with pytest.raises(TaskError, match=r"no problem for the (train|eval) split"):
        load_task(f"gsm8k:{tmp_path}")


def test_there_is_no_ood_split(folder: Path) -> None:
    with pytest.raises(TaskError, match="no ood split"):
        load_gsm8k(str(folder)).problem(0, 0, "ood")


def test_without_pyarrow_the_hub_copy_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"pip install pyarrow.*gsm8k:PATH"):
        load_task("gsm8k")


def test_without_a_hub_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=None))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(TaskError, match=r"no route to host.*gsm8k:PATH"):
        load_task("gsm8k")


def test_the_hub_copy_and_a_local_copy_are_the_same_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_table(file: str) -> SimpleNamespace:
        path = folder / ("train.jsonl" if "train" in file else "test.jsonl")
        return SimpleNamespace(to_pylist=lambda: [json.loads(row) for row in path.read_text().splitlines()])

    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=SimpleNamespace(read_table=read_table)))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, file, repo_type: f"{repository}/{file}")
    assert load_task("gsm8k").name == load_gsm8k(str(folder)).name
