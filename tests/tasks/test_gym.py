"""reasoning-gym behind our interface: the same problems everywhere, held-out questions, scorers that peers cannot abuse."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from swarm_node.tasks.base import Problem, RewardError, TaskError
from swarm_node.tasks.gym import Gym, load_gym
from swarm_node.tasks.gym_guards import is_arithmetic, is_formula, is_json_list, is_json_moves, is_literal, is_polynomial, may_score
from swarm_node.tasks.registry import load_task

EASY = "chain_sum?max_digits=1&max_terms=3"


@pytest.fixture(scope="module")
def sums() -> Gym:
    return load_gym(EASY)


def answer(task: Gym, problem: Problem, text: object) -> tuple[float, bool]:
    reward = task.reward(problem, f"I think so. <answer>{text}</answer>")
    assert reward.parts["format"] == 1.0
    return reward.parts["answer"], reward.correct


def test_the_prompt_is_the_datasets_question_and_says_where_the_answer_goes(sums: Gym) -> None:
    problem = sums.problem(seed=1, index=2)
    assert problem.prompt.startswith(problem.answer["question"])
    assert "<answer>" in problem.prompt
    assert (problem.task, problem.split, problem.seed, problem.index) == (sums.name, "train", 1, 2)


def test_what_stands_between_the_last_tags_is_the_answer(sums: Gym) -> None:
    problem = sums.problem(0, 0)
    right = problem.answer["answer"]
    full = sums.reward(problem, f"Let me see. <answer>{right}</answer>")
    assert (full.value, full.correct, full.parts) == (1.0, True, {"answer": 1.0, "format": 1.0})
    wrong = sums.reward(problem, "<answer>-1000</answer>")
    assert wrong.value == pytest.approx(0.1)
    assert not wrong.correct
    assert sums.reward(problem, f"<answer>{right}</answer> no, <answer>-1000</answer>").parts["answer"] == 0.0
    assert sums.reward(problem, f"{right} <answer></answer>").parts == {"answer": 0.0, "format": 1.0}
    for later in ("<answer></answer>", "</answer>", "or -1000</answer>", "<answer>-1000", "so <answer>...</answer>"):
        assert sums.reward(problem, f"<answer>{right}</answer> {later}").value == 1.0


def test_without_tags_the_last_number_is_worth_the_answers_share(sums: Gym) -> None:
    problem = sums.problem(0, 0)
    right = problem.answer["answer"]
    for text in (right, f"The answer is {right}.", f"3 + 1000 = {right}", f"**{right}**"):
        reward = sums.reward(problem, text)
        assert reward.value == pytest.approx(0.9)
        assert (reward.correct, reward.parts) == (True, {"answer": 1.0, "format": 0.0})
    for text in ("", "I do not know.", f"{right} or 1000", "9**9**9"):
        assert sums.reward(problem, text).value == 0.0


def test_without_tags_the_last_line_answers_a_question_that_asks_for_words() -> None:
    task = load_gym("syllogism")
    problem = task.problem(0, 0)
    right = problem.answer["answer"]
    assert right in ("Yes", "No")
    assert task.reward(problem, f"Let me think.\n{right}.").parts == {"answer": 1.0, "format": 0.0}
    assert task.reward(problem, f"{right}.\nThat follows").parts["answer"] == 0.0


@pytest.mark.parametrize(
    "dataset",
    ["gsm_symbolic", "basic_arithmetic", "letter_counting", "list_functions", "acre", "pool_matrix", "spiral_matrix", "leg_counting"],
)
def test_a_dataset_accepts_its_own_answers_and_draws_many_questions(dataset: str) -> None:
    task = load_gym(dataset)
    problems = [task.problem(5, index) for index in range(12)]
    assert len({problem.prompt for problem in problems}) == 12
    for problem in problems:
        assert task.reward(problem, f"<answer>{problem.answer['answer']}</answer>").correct


def test_gsm_symbolic_asks_word_problems_and_scores_their_number() -> None:
    task = load_task("reasoning-gym:gsm_symbolic")
    problem = task.problem(0, 0)
    assert task.name == "reasoning-gym:gsm_symbolic"
    assert float(problem.answer["answer"]) >= 0
    assert task.reward(problem, f"So.\n<answer>{problem.answer['answer']}</answer>").correct
    assert not task.reward(problem, "<answer>987654321</answer>").correct
    assert not task.reward(problem, "<answer>none</answer>").correct


def test_partial_credit_of_the_scorer_is_passed_on_without_counting_as_correct() -> None:
    task = load_gym("letter_jumble")
    problem = task.problem(0, 0)
    words = problem.answer["answer"].split()
    assert len(words) > 1
    score, correct = answer(task, problem, " ".join([*words[:-1], "zzz"]))
    assert 0 < score < 1
    assert not correct


def test_every_process_generates_the_same_problems() -> None:
    code = (
        "from swarm_node.tasks.gym import load_gym\n"
        f"for name in ({EASY!r}, 'gsm_symbolic', 'list_functions', 'acre', 'pool_matrix', 'course_schedule', 'family_relationships'):\n"
        "    task = load_gym(name)\n"
        "    for split in ('train', 'eval'):\n"
        "        print(*[hash_(task.problem(7, index, split).prompt) for index in (0, 1, 2**53 - 1)])\n"
    )
    code = "from hashlib import sha256\nhash_ = lambda text: sha256(text.encode()).hexdigest()[:8]\n" + code
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert len(set(runs.pop().split())) == 7 * 2 * 3


def test_generating_leaves_the_processs_random_generators_alone() -> None:
    for name in ("list_functions", "pool_matrix"):
        task = load_gym(name)
        random.seed(11)
        np.random.seed(11)
        expected = random.random(), np.random.rand()
        random.seed(11)
        np.random.seed(11)
        task.problem(0, 0)
        assert (random.random(), np.random.rand()) == expected


def test_no_evaluation_question_occurs_in_training_under_any_option_or_seed(sums: Gym) -> None:
    held_out = {problem.answer["question"] for seed in (0, 1) for problem in (sums.problem(seed, index, "eval") for index in range(150))}
    other = load_gym("chain_sum?max_digits=1&max_terms=2")
    trained = {task.problem(seed, index).answer["question"] for task in (sums, other) for seed in (0, 2) for index in range(600)}
    assert len(held_out) > 100
    assert len(trained) > 300
    assert held_out.isdisjoint(trained)


def test_a_dataset_of_one_question_has_one_split_and_says_so(sums: Gym, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_generate", lambda number: {"question": "1 + 1 =", "answer": "2"})
    assert sums.problem(0, 0, "train").prompt.startswith("1 + 1 =")
    with pytest.raises(TaskError, match="too few different questions to hold some out: none for eval in 100 draws"):
        sums.problem(0, 0, "eval")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("chain_sum", "chain_sum"),
        ("chain_sum?max_terms=3&max_digits=1", "chain_sum?max_digits=1&max_terms=3"),
        ("chain_sum?max_digits=01&max_terms=3&min_terms=2", "chain_sum?max_digits=1&max_terms=3"),
        ("chain_sum?allow_negation=true", "chain_sum?allow_negation=true"),
        ("chain_sum?allow_negation=false", "chain_sum"),
        ("acre?train=1", "acre"),
    ],
)
def test_a_name_is_canonical_and_loads_itself(spec: str, name: str) -> None:
    task = load_task(f"reasoning-gym:{spec}")
    assert task.name == f"reasoning-gym:{name}"
    again = load_task(task.name)
    assert again.name == task.name
    assert again.problem(1, 2) == task.problem(1, 2)


def test_options_reach_the_dataset(sums: Gym) -> None:
    for index in range(50):
        entry = sums.problem(0, index).answer
        assert entry["metadata"]["num_terms"] in (2, 3)
        assert entry["metadata"]["num_digits"] == 1


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("chain_summ", "no dataset 'chain_summ': did you mean chain_sum"),
        ("qqqqqq", "no dataset 'qqqqqq': write reasoning-gym:NAME, for example"),
        ("chain_sum?max_term=3", "no option 'max_term'.*choose from allow_negation, max_digits, max_terms"),
        ("chain_sum?seed=3", "no option 'seed'"),
        ("chain_sum?size=3", "no option 'size'"),
        ("chain_sum?max_terms=3&max_terms=4", "or has it twice"),
        ("chain_sum?max_terms=three", "write an integer"),
        ("chain_sum?max_terms=3.5", "write an integer"),
        ("chain_sum?max_terms=99999999999", "of at most 10"),
        ("chain_sum?max_terms", "write an integer"),
        ("chain_sum?allow_negation=1", "write true or false"),
        ("chain_sum?min_terms=5&max_terms=3", "refuses its options"),
        ("gsm_symbolic?difficulty=nan", "write a number"),
        ("gsm_symbolic?difficulty=2.0", "refuses its options"),
        ("word_ladder", "peers cannot regenerate its prompts"),
        ("knight_swap", "peers cannot regenerate its prompts"),
        ("intermediate_integration", "hostile answer"),
        ("composite", "mixes datasets"),
        ("game_of_life_halting", "nothing to learn"),
    ],
)
def test_what_cannot_be_loaded_says_why_and_what_to_do(spec: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        load_task(f"reasoning-gym:{spec}")


def test_a_name_without_a_dataset_is_refused() -> None:
    with pytest.raises(TaskError, match="write reasoning-gym:NAME, for example reasoning-gym:gsm_symbolic"):
        load_task("reasoning-gym")


def test_there_is_no_ood_split(sums: Gym) -> None:
    with pytest.raises(TaskError, match="no ood split"):
        sums.problem(0, 0, "ood")


class FakeDataset:
    def __init__(self, score: object) -> None:
        self.score = score

    def score_answer(self, text: str, entry: object) -> object:
        if isinstance(self.score, Exception):
            raise self.score
        return self.score


@pytest.mark.parametrize("score", [ZeroDivisionError("boom"), float("nan"), float("inf"), -0.1, 1.1, None, "text"])
def test_a_scorer_that_fails_is_an_error_and_not_a_wrong_answer(sums: Gym, monkeypatch: pytest.MonkeyPatch, score: object) -> None:
    problem = sums.problem(0, 0)
    monkeypatch.setattr(sums, "_dataset", FakeDataset(score))
    with pytest.raises(RewardError, match="scorer of reasoning-gym:chain_sum"):
        sums.reward(problem, "<answer>1</answer>")


def test_a_full_score_with_rounding_is_correct_and_worth_one(sums: Gym, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = sums.problem(0, 0)
    for score, correct in ((1 - 1e-12, True), (1 + 1e-12, True), (0.99, False)):
        monkeypatch.setattr(sums, "_dataset", FakeDataset(score))
        reward = sums.reward(problem, "<answer>1</answer>")
        assert reward.correct is correct
        assert reward.value <= 1


ATTACK = "__import__('pathlib').Path({!r}).touch()"


@pytest.mark.parametrize(
    "dataset", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24", "simple_integration"]
)
def test_an_answer_never_runs_as_code(dataset: str, tmp_path: object) -> None:
    # Without the guard each of these scorers creates the file.
    task = load_gym(dataset)
    problem = task.problem(0, 0)
    for wrap in ("{}", "[{}]", "1+{}", "[x for x in [{}]]"):
        score, correct = answer(task, problem, wrap.format(ATTACK.format(f"{tmp_path}/owned")))
        assert not correct
        assert score < 0.5
    assert not os.listdir(str(tmp_path))
    assert answer(task, problem, problem.answer["answer"]) == (1.0, True)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ("countdown", "9**9**9**9"),
        ("puzzle24", "99**99**99"),
        ("puzzle24", "9999!!!!!"),
        ("simple_integration", "x**9999999999"),
        ("simple_integration", "((9**64)**64)**64"),
        ("simple_integration", "1/(x+1)**64"),
        ("simple_integration", "x**x"),
        ("simple_integration", "2**(10**10*x/x)"),
        ("simple_integration", "(a+b+c+d+e+f+g)**60"),
        ("countdown", "1e-999999"),
        ("simple_integration", "1e-999999*x"),
        ("simple_integration", "x.real"),
        ("simple_integration", "f(x)"),
        ("propositional_logic", "¬" * 4000),
        ("propositional_logic", "∧".join("abcdefghijklmnopqrstuvwxyz")),
        ("propositional_logic", "∧".join(f"{a}{b}" for a in "PQRS" for b in "PQRS")),
        ("propositional_logic", "A(B)∧A(C)"),
        ("propositional_logic", "A)∧(B"),
        ("boxnet", '{"a": 1}'),
        ("boxnet", '[{"here": "move(box_red, square[0.5, 1.5])"}]'),
        ("game_of_life", '{"a": 1}'),
        ("game_of_life", "[" * 4000),
        ("prime_factorization", "I do not know"),
        ("prime_factorization", "2 3"),
        ("coin_flip", "9" * 4000),
        ("coin_flip", "1e999999999"),
        ("rubiks_cube", "R9999999999"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan+nanj"),
        ("string_insertion", "oracle_answer"),
        ("spiral_matrix", "1 " * 5000),
        ("n_queens", "[" * 5000),
        ("n_queens", "-" * 4000 + "1"),
    ],
)
def test_an_answer_that_would_hang_or_fool_a_scorer_is_wrong_unscored(dataset: str, text: str) -> None:
    assert not may_score(dataset, text, "expected")


@pytest.mark.parametrize(
    ("guard", "text"),
    [
        (is_literal, "[[1, 0], [0, -1]]"),
        (is_literal, "['A', 'B', 'C']"),
        (is_literal, "1 2 3 4"),
        (is_literal, "Q _ _ _\n_ _ Q _"),
        (is_arithmetic, "(5 + 3) * 4 - 16 / 2"),
        (is_arithmetic, "-5 + 29"),
        (is_polynomial, "7*x**3/3 - 4.5*x**2 + 10*x + C"),
        (is_polynomial, "(x + 1)**4 + C"),
        (is_polynomial, "X"),
        (is_formula, "(P → Q) ∧ ¬(R ∨ S)"),
        (is_json_list, "[[1, 0], [0, 1]]"),
        (is_json_moves, '[{"Agent[0.5, 0.5]": "move(box_red, target_red)"}]'),
    ],
)
def test_honest_answers_pass_the_guards(guard: object, text: str) -> None:
    assert guard(text)  # type: ignore[operator]


def test_other_forms_of_a_right_answer_are_still_scored() -> None:
    integral = load_gym("simple_integration")
    problem = integral.problem(0, 3)
    expected = problem.answer["answer"]
    assert answer(integral, problem, f"5 + ({expected.replace(' + C', '')})") == (1.0, True)
    matrix = load_gym("spiral_matrix")
    problem = matrix.problem(0, 0)
    assert answer(matrix, problem, [int(number) for number in problem.answer["answer"].split()]) == (0.1, False)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("division by zero"), RecursionError("too deep"), KeyError("x"), RuntimeError("no draw")]
)
def test_a_dataset_that_fails_to_generate_is_an_error_of_the_task(sums: Gym, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Failing:
        def __getitem__(self, number: int) -> object:
            raise error

    monkeypatch.setattr(sums, "_dataset", Failing())
    state = random.getstate()
    with pytest.raises(TaskError, match="chain_sum.* failed to generate entry .*" + type(error).__name__):
        sums.problem(1, 2)
    assert random.getstate() == state
