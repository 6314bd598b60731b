"""Grading numbers: what is a number, what is not, and that nothing is ever evaluated."""

from __future__ import annotations

from fractions import Fraction

import pytest

from swarm_node.tasks.answers import MAX_DIGITS, last_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", Fraction(18)),
        (" 18. ", Fraction(18)),
        ("1,234,567", Fraction(1234567)),
        ("1,234.50", Fraction(2469, 2)),
        ("007", Fraction(7)),
        (".5", Fraction(1, 2)),
        ("-3", Fraction(-3)),
        ("−3", Fraction(-3)),
        ("+3", Fraction(3)),
        ("-0", Fraction(0)),
        ("$18", Fraction(18)),
        ("-$18", Fraction(-18)),
        ("$-18", Fraction(-18)),
        ("€ 2.50", Fraction(5, 2)),
        ("3/4", Fraction(3, 4)),
        ("-6/8", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("50%", Fraction(50)),
        ("18 dollars", Fraction(18)),
        ("5km.", Fraction(5)),
        ("9" * MAX_DIGITS, Fraction(10**MAX_DIGITS - 1)),
    ],
)
def test_numbers_have_their_exact_value(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ".",
            "-",
            "$",
            "abc",
            "1,23",
            "12,3456",
            "1.2.3",
            "--3",
            "-$-3",
            "1/0",
            "0/0",
            "2 + 3",
            "2*3",
            "1e9",
            "0x10",
            "5 million",
            "5k",
        ),
        *("2003^2002^2001", "2003**2002**2001", "9" * (MAX_DIGITS + 1), "1/" + "9" * 100_000),
        *("٣", "nan", "inf", "18 red apples", "__import__('os')"),
    ],
)
def test_anything_else_is_no_number_and_is_not_evaluated(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 cats and 12 dogs.", "12"),
        ("It costs $1,234.50!", "$1,234.50"),
        ("so 7 - 9 = -2", "-2"),
        ("about 3/4 of it", "3/4"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_hostile_text_is_searched_in_linear_time() -> None:
    # A quadratic search over these would take hours.
    for hostile in ("1," * 200_000, "9" * 400_000, "1/" * 200_000, "-$" * 200_000, "2003^2002^" * 40_000):
        last_number(hostile)
        assert parse_number(hostile) is None
