r"""`gsm8k:PATH`: grade-school word problems (arXiv 2110.14168) in the published JSONL format.

    {"question": "Natalia sold clips to 48 …", "answer": "She sold 48/2 = <<48/2=24>>24 clips …\n#### 72"}

A folder gives `train.jsonl` to training and `test.jsonl` to evaluation; a single file holds one problem in HOLDOUT out, by a hash of its
question. The path stays on this machine: the task is named by its content, so peers with the same problems have the same task. A record
without an answer that can be graded is left out and counted. A line that is no record is refused: the file is damaged, and what is left of
it would be another task than the peers'.
There is no `ood` split: evaluate on another file for that.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from swarm_node.tasks.answers import combine, last_number, marked, parse_number
from swarm_node.tasks.base import Problem, Reward, Split, Task, TaskError
from swarm_node.tasks.draws import Draws, hash64

log = logging.getLogger(__name__)

HOLDOUT = 8
"""One in HOLDOUT questions of a single file is held out for `eval`."""

REPOSITORY = "openai/gsm8k"
"""The data set on the hub, and its files: training, test."""
_FILES = ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")

_FORM = 'Each line must read {"question": "...", "answer": "... #### NUMBER"}'
_PROMPT = "{question}\n\nSolve it step by step. Write the final answer as a number in the last line, after ####, for example: #### 42"


class WordProblem(NamedTuple):
    """One problem with its worked solution's answer."""

    question: str
    answer: Fraction
    steps: int
    """Lines of the worked solution: the problem's level."""


class GSM8K(Task):
    """Word problems from a file. `format` is a number right behind a `####`; `answer` is whether the last such number is right.

    Without `####` the text's last number is graded, so that a model that reasons well and forgets the mark learns the mark first.
    """

    def __init__(self, train: list[WordProblem], held_out: list[WordProblem]) -> None:
        """
        Raises:
            TaskError: a split is empty.
        """
        kept = {problem.question: problem for problem in held_out}
        # A question that occurs on both sides is held out; sorting makes the draw independent of the file's order.
        learnt = {problem.question: problem for problem in train if problem.question not in kept}
        self._problems: dict[Split, list[WordProblem]] = {"train": sorted(learnt.values()), "eval": sorted(kept.values())}
        for split, problems in self._problems.items():
            if not problems:
                raise TaskError(
                    f"gsm8k has no problem for the {split} split: give more problems, or a folder with train.jsonl and test.jsonl"
                )
        lines = (f"{split}\0{p.question}\0{p.answer}\0{p.steps}\0" for split, problems in self._problems.items() for p in problems)
        self.name = f"gsm8k@{hashlib.sha256(''.join(lines).encode()).hexdigest()[:12]}"

    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        """A problem of the file, drawn by hash; `answer` is its answer as a Fraction."""
        if split not in self._problems:
            raise TaskError("gsm8k has no ood split: evaluate on another file instead, with --task gsm8k:PATH")
        problems = self._problems[split]
        drawn = problems[Draws("gsm8k", seed, index, split).below(len(problems))]
        prompt = _PROMPT.format(question=drawn.question)
        return Problem(self.name, split, seed, index, prompt, drawn.answer, drawn.steps)

    def reward(self, problem: Problem, completion: str) -> Reward:
        """0.1 for a number right behind `####`, 0.9 for the right number."""
        stated = marked(completion)
        right = parse_number((last_number(completion) if stated is None else stated) or "") == problem.answer
        return combine(float(bool(stated)), float(right), correct=right)


def load_gsm8k(path: str) -> GSM8K:
    """The task from a file or folder, or from the hub where no path is given.

    Raises:
        TaskError: nothing there, a line that is no record (named), too few problems, or no hub.
    """
    if not path:
        return GSM8K(*_from_hub())
    place = Path(path).expanduser()
    if place.is_dir():
        train, test = place / "train.jsonl", place / "test.jsonl"
        if not train.is_file():
            raise TaskError(f"{place} holds no train.jsonl: gsm8k:PATH takes a .jsonl file, or a folder with train.jsonl and test.jsonl")
        if test.is_file():
            return GSM8K(_read(train), _read(test))
        place = train
    problems = _read(place)
    return GSM8K(problems, [problem for problem in problems if hash64("gsm8k", problem.question) % HOLDOUT == 0])


def _read(path: Path) -> list[WordProblem]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"gsm8k cannot read {path} ({error}): give a .jsonl file, or a folder with train.jsonl and test.jsonl") from error
    return _parse_all(path, _records(path, lines))


def _records(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The JSON objects of the lines that hold any, each with where it stands."""
    for number, line in enumerate(lines, start=1):
        text = line.strip("\ufeff \t\r")  # a byte order mark stands before every part of a file that was put together from several
        if not text:
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}, line {number}: {error}. {_FORM}") from error
        if not isinstance(record, dict):
            raise TaskError(f"{path}, line {number}: it is not a JSON object. {_FORM}")
        yield f"line {number}", record


def _parse_all(source: object, records: Iterable[tuple[str, Mapping[str, object]]]) -> list[WordProblem]:
    """The problems that can be asked and graded.

    Raises:
        TaskError: there are records, and none of them is one.
    """
    problems, left_out = [], []
    for place, record in records:
        try:
            problems.append(_parse(record))
        except ValueError as error:
            left_out.append(f"{place}: {error}")
    if left_out:
        found = f"{source}: {len(left_out)} of {len(left_out) + len(problems)} records cannot be used, first {left_out[0]}"
        if not problems:
            raise TaskError(f"{found}. {_FORM}")
        log.warning("%s; they are left out", found)
    return problems


def _parse(record: Mapping[str, object]) -> WordProblem:
    question, solution = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(solution, str) or not question.strip():
        raise TaskError("`question` and `answer` must be texts")
    question.encode()  # half of a surrogate pair is JSON and no text
    # A gold answer is the whole of what follows the mark: of a text with two numbers nobody knows which one is meant.
    _, mark, final = solution.rpartition("####")
    answer = parse_number(final) if mark else None
    if answer is None:
        raise TaskError("the answer does not end with #### and a number")
    return WordProblem(question.strip(), answer, solution.strip().count("\n"))


def _from_hub() -> Iterator[list[WordProblem]]:
    """The problems of the two published files, train first. The hub keeps them as Parquet, which needs pyarrow to read."""
    instead = "Or give a local copy in JSONL: gsm8k:PATH"
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise TaskError(f"gsm8k from the hub needs pyarrow: pip install pyarrow. {instead}") from error
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HTTPError

    for file in _FILES:
        try:
            place = hf_hub_download(REPOSITORY, file, repo_type="dataset")
        except (HTTPError, OSError) as error:
            raise TaskError(f"{REPOSITORY} cannot be fetched from the hub ({error}): check the connection. {instead}") from error
        rows = parquet.read_table(place).to_pylist()
        yield _parse_all(f"{REPOSITORY}/{file}", ((f"row {number}", row) for number, row in enumerate(rows)))
