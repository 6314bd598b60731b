"""Grading answers: what is a number, what is not, and that nothing is ever evaluated."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.tasks.answers import MAX_DIGITS, combine, first_number, last_line, last_number, marked_number, parse_number, tagged


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 72.\n", 72),
        ("+7", 7),
        ("-7", -7),
        ("−7", -7),
        ("007", 7),
        ("1,234", 1234),
        ("1,234,567.50", Fraction("1234567.5")),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("6/8", Fraction(3, 4)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"\boxed{-42}", -42),
        (r"$\boxed{\dfrac{7}{3}}$", Fraction(7, 3)),
        (r"42\text{ dollars}", 42),
        ("$18", 18),
        (r"\$18.50", Fraction(37, 2)),
        ("-$5", -5),
        ("$18$", 18),
        ("€ 20", 20),
        ("20€", 20),
        ("50%", 50),
        (r"50\%", 50),
        ("12 apples", 12),
        ("60 miles/hour", 60),
        ("3/4 cup", Fraction(3, 4)),
        ("18-inch", 18),
        ("**72**", 72),
        ("(5)", 5),
        ("`5`", 5),
        ("9" * MAX_DIGITS, int("9" * MAX_DIGITS)),
    ],
)
def test_a_number_is_read_exactly_whatever_is_written_around_it(text: str, value: Fraction | int) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "apples",
        "-",
        "$",
        "/",
        ".",
        "2003^2002^2001",
        "9**9**9",
        "3+4",
        "3 + 4",
        "3*4",
        "3 = 3",
        "10-3",
        "1e5",
        "1e999999999",
        "1/0",
        "1/0.00",
        "1/2/3",
        "1,23",
        "1,2345",
        "12,34",
        "1.2.3",
        "1 2",
        "3 apples and 4 pears",
        "--5",
        "٣",
        "²",
        "nan",
        "inf",
        "0x10",
        "1_000",
        "9" * (MAX_DIGITS + 1),
        "1/" + "9" * MAX_DIGITS,
        "7" + " " * 300,
        "__import__('os')",
    ],
)
def test_everything_else_is_not_a_number(text: str) -> None:
    assert parse_number(text) is None


@given(st.fractions(max_denominator=10**9).filter(lambda value: abs(value.numerator) < 10**20))
def test_every_fraction_reads_back(value: Fraction) -> None:
    assert parse_number(str(value)) == value


@given(st.integers(-(10**30), 10**30))
def test_every_integer_reads_back_with_thousands_separators(value: int) -> None:
    assert parse_number(f"{value:,}") == value


@given(st.text(alphabet="0123456789^*/+-,.$%{}()\\ e=x", max_size=400))
def test_no_text_breaks_or_stalls_the_grader(text: str) -> None:
    for number in (parse_number(text), last_number(text)):
        assert number is None or len(str(number)) <= 2 * MAX_DIGITS + 2
    assert (last_number(text) is None) or parse_number(f"{last_number(text)} apples") == parse_number(last_number(text) or "")


def test_a_long_hostile_text_is_refused_in_linear_time() -> None:
    for piece in ("9", "9,", "1/", "$", "\\frac{", "(", "a-", "<answer>", "####"):
        text = piece * 200_000
        assert parse_number(text) is None
        assert last_number(text) is None
        assert first_number(text) is None
        tagged(text)
        marked_number(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48/2=24 and 48+24=72 clips", "72"),
        ("She earns $1,200.50.", "1200.50"),
        ("3 apples, then 5 pears.", "5"),
        ("x = -4", "-4"),
        ("it is +4", "4"),
        ("a half, **1/2**", "1/2"),
        ("no digits at all", None),
        ("it is 2003^2002^2001.", None),
        ("first 5, then 3+4", None),
    ],
)
def test_the_last_number_of_a_text(text: str, value: str | None) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>5</answer> no: <answer>\n 6 \n</answer> done", "6"),
        ("<answer>5 <answer>6</answer>", "6"),
        ("<answer>5</answer></answer>", "5"),
        ("<answer>5</answer> so <answer></answer>", "5"),
        ("<answer>5</answer> so <answer>", "5"),
        ("<answer>5</answer> so <answer>6", "5"),
        ("<answer></answer>", ""),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer>5<answer>", None),
        ("", None),
    ],
)
def test_the_answer_is_what_stands_in_the_last_tag(text: str, inside: str | None) -> None:
    assert tagged(text) == inside


def test_the_last_line_is_the_last_with_anything_on_it() -> None:
    assert last_line("I think\n  Yes. \n\n") == "Yes"
    assert last_line(" \n ") == ""


def test_a_marked_answer_follows_the_last_marker() -> None:
    assert marked_number("a #### 5\n#### 6 ") == (True, "6")
    assert marked_number("5 ####") == (True, None)
    assert marked_number("#### 5 ####") == (True, "5")
    assert marked_number("five") == (False, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" - 5 left", "-5"),
        ("$ 20 each", "20"),
        ("3 / 4 cup", "3/4"),
        (r"\boxed{-42}.", "-42"),
        ("about ~1,234.5 (rounded)", "1234.5"),
        ("\n\n 7\n8", "7"),
        ("x = 4", "4"),
        ("3 / 4 / 5", None),
        ("5 +", None),
        ("6 ^2", None),
        ("2003^2002^2001", None),
        ("none", None),
        ("1e5", None),
    ],
)
def test_the_first_number_of_a_line(text: str, value: str | None) -> None:
    assert first_number(text) == value


def test_format_is_worth_a_tenth_and_is_reported_apart_from_the_answer() -> None:
    reward = combine(1.0, 0.5, correct=False)
    assert reward.value == pytest.approx(0.55)
    assert (reward.parts, reward.correct) == ({"format": 1.0, "answer": 0.5}, False)
    assert combine(1.0, 1.0, correct=True).value == 1.0
    assert combine(0.0, 0.0, correct=False).value == 0.0
