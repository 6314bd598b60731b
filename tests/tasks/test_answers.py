"""Grading answers: what is a number, what is not, and that nothing is ever evaluated."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.tasks.answers import MAX_DIGITS, combine, first_number, last_line, last_number, marked, parse_number, tagged


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
        ("**72**.", 72),
        ("12 m²", 12),
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
        "5²",
        "3½",
        "3 ½ cups",
        "42٣",
        "４２",
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
    for piece in ("9", "9,", "1/", "$", "\\frac{", "(", "a-", "<answer>", "</answer>", "####", "####\n", "####9+9", "- ", "=9"):
        text = piece * 100_000
        assert parse_number(text) is None
        assert last_number(text) in (None, "9", "-9")
        tagged(text)
        marked(text)
        first_number(text)


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
        ("The answer is 42" + " ok" * 1000, "42"),
        ("9 " + "x" * 1000, "9"),
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
        ("<answer>5</answer> so 6</answer>", "5"),
        ("<answer>5</answer> or <answer> \n</answer>", "5"),
        ("<answer>5</answer> in <answer>...</answer>", "5"),
        ("<answer>5</answer> and <answer>6", "5"),
        ("<answer>5</answer><answer>6</answer><answer></answer></answer>", "6"),
        ("<answer>1.</answer>", "1."),
        ("<answer> … </answer>", ""),
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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("five", None),
        ("a #### 5\n#### 6 ", "6"),
        ("#### 42\nI checked it in 2 ways.", "42"),
        ("#### 42" + " as shown" * 500, "42"),
        ("#### 42\r\n\r\nThen 7 more.\r\n", "42"),
        ("#### 42\n####", "42"),
        ("#### 42 ####", "42"),
        ("#### 42\n####\nI checked it in 2 ways", "42"),
        ("#### 42\n#### none", "42"),
        ("#### 42\n#### 40+2", "42"),
        ("#### 42\n#### 1/0", "42"),
        ("#### 1\n#### 2\n#### 3", "3"),
        ("#### 42" + " ####" * 200, "42"),
        ("####\n42\nThat was 1 way.", "42"),
        ("#### The answer is:\n\n**42**\n", "42"),
        ("####\n42 in 2 ways", ""),
        ("72 ####", ""),
        ("#### seventy-two", ""),
        ("####", ""),
    ],
)
def test_the_last_marker_that_has_a_number_counts_and_nothing_else_on_the_way(text: str, number: str | None) -> None:
    assert marked(text) == number


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("The answer is 42.", "42"),
        ("42, as I checked in 2 ways", "42"),
        ("42 (2 ways)", "42"),
        ("42 – in 2 ways", "42"),
        ("42% of 80", "42"),
        ("**42** and 2", "42"),
        ("$1,234.50 a day, 7 days", "1234.50"),
        ("US$18 in 2 days", "18"),
        ("-$5 in 2 days", "-5"),
        ("- 5 in 2 days", "-5"),
        ("it is −7 on day 2", "-7"),
        ("3 / 4 cup, 2 times", "3/4"),
        (r"$\boxed{\frac{1}{2}}$ of 3", "1/2"),
        (r"\boxed{ 42 } in 2 ways", "42"),
        ("60 miles/hour for 2 hours", "60"),
        ("18-inch or 2", "18"),
        ("x = 42 after 2 steps", "42"),
        ("40 + 2 = 42", "42"),
        ("3 x 4 = 12", "12"),
        ("42 = 40 + 2", "42"),
        ("41, 42, 43", "41"),
        ("41 or 42 or 43", "41"),
        ("41 42 43", None),
        ("1 234", None),
        ("1 1/2 cups", None),
        ("3 ½ cups", None),
        ("5² or 2", None),
        ("12,34 and 5", None),
        ("1.2.3 and 5", None),
        ("10-3", None),
        ("10 - 3", None),
        ("x - 5", None),
        ("x * 5", None),
        ("8*9", None),
        ("8 ** 9", None),
        ("(2 + 3) * 4", None),
        ("2003^2002^2001", None),
        ("1e5 or 2", None),
        ("Q2", None),
        ("3:2", None),
        ("٤٢ or 42", None),
        ("9" * (MAX_DIGITS + 1) + " or 2", None),
        ("", None),
    ],
)
def test_the_first_number_of_a_line_is_read_whatever_words_follow_and_no_expression_is(line: str, number: str | None) -> None:
    assert first_number(line) == number


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.sampled_from(["\n#### ", ", ", " or ", " ", "\n", " and then ", " #### "]))
def test_no_list_of_numbers_is_right_for_more_than_one_of_them(numbers: list[int], between: str) -> None:
    graded = marked("#### " + between.join(map(str, numbers)))
    assert graded in ("", str(numbers[0]), str(numbers[-1]))


def test_format_is_worth_a_tenth_and_is_reported_apart_from_the_answer() -> None:
    reward = combine(1.0, 0.5, correct=False)
    assert reward.value == pytest.approx(0.55)
    assert (reward.parts, reward.correct) == ({"format": 1.0, "answer": 0.5}, False)
    assert combine(1.0, 1.0, correct=True).value == 1.0
    assert combine(0.0, 0.0, correct=False).value == 0.0
