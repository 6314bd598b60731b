"""Answer grading: numbers read by a grammar that evaluates nothing, and the places where a final answer may stand.

`2003^2002^2001` or `9**9**9` is not a number here, so no text can make the grader work hard.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from swarm_node.tasks.base import Reward

MAX_DIGITS = 40
"""Digits of a number at most, numerator and denominator together: answers of school mathematics have far fewer."""

MAX_LENGTH = 200
"""Characters of a number at most, with sign, currency and unit."""

FORMAT_SHARE = 0.1
"""What an answer is worth for standing where it was asked for, right or wrong."""

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s?[$€£¥]?\s?"
    rf"(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))?"
    # A unit: anything without digits and operators; a hyphen or slash may join words, as in `miles/hour`.
    r"(?P<unit>(?:[^\d+*/^=<>-]|[/-](?=[A-Za-z]))*)"
)
_FIRST = re.compile(
    # The first digits of a line are a number of their own where neither an operator nor a letter stands before them ...
    r"\D*?(?<![^\W_])(?<![.,/^×÷·+-])(?<![\w)]\*)(?<![*/^×÷·+-]\s)"
    rf"(?P<number>(?>(?:[+-](?!\s)|(?<![\w)]\s)[+-]\s)?(?:[$€£¥]\s?)?{_DECIMAL}(?:\s?/\s?{_DECIMAL})?)"
    # ... and behind them neither another number nor an operator with one.
    r"(?:\S++|(?!\s+[\d½¼¾⅓⅔])))(?!\s*[-+*/^×÷·xX]{1,2}\s*[($€£¥]*\s*\d)"
)
_DIGIT = re.compile(r"[0-9]")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_MARKUP = re.compile(r"\\(?:boxed|text|mathrm)\b|[{}\\]")
_EDGE = " \t\r\n*_`\"'()[]:;!?,~≈"
_MINUS = str.maketrans("−–\u00a0\u202f", "--  ")


def parse_number(text: str) -> Fraction | None:
    r"""The number that `text` is, exactly: `1,234.50`, `-3/4`, `$18`, `50%`, `\boxed{7}`, `\frac{1}{2}`, `12 apples`; None for all else.

    A percent sign is a unit: `50%` is 50. Expressions, exponents and texts with two numbers are not numbers.
    """
    plain = numeral(text)
    if plain is None:
        return None
    top, _, bottom = plain.partition("/")
    divisor = Fraction(bottom or 1)
    return Fraction(top) / divisor if divisor else None


def numeral(text: str) -> str | None:
    """The bare digits of the number that `text` is: sign, digits, point, and a slash for a fraction; None where it is no number."""
    if len(text) > MAX_LENGTH:
        return None
    plain = _strip_markup(text).strip(_EDGE).rstrip(f"{_EDGE}.")
    # `$18$` is set as mathematics, `$18` is money.
    match = _NUMBER.fullmatch(plain.strip("$") if plain.endswith("$") else plain)
    if match is None or unicodedata.category(match["unit"].lstrip()[:1] or " ")[0] == "N":  # 5² and 1½ are other numbers
        return None
    bare = match["sign"].strip("+") + match["top"] + (f"/{match['bottom']}" if match["bottom"] else "")
    return bare.replace(",", "") if len(_DIGIT.findall(bare)) <= MAX_DIGITS else None


def first_number(text: str) -> str | None:
    """The first number of a line, as a numeral, whatever words follow it; of an expression, the value that it is said to equal."""
    for side in _strip_markup(text).split("="):
        match = _FIRST.match(side)
        number = numeral(match["number"]) if match else None
        if number is not None:
            return number
    return None


def last_number(text: str) -> str | None:
    """The last word with a digit in it, as a numeral, if it is a number: what a reader takes for the answer where no place is marked."""
    for word in reversed(re.split(r"[\s=]+", text)):
        if _DIGIT.search(word):
            return numeral(word)
    return None


def last_line(text: str) -> str:
    """The last line with anything on it, without the full stop."""
    return text.strip().rpartition("\n")[2].strip(" \t\r.")


def marked(text: str, marker: str = "####") -> str | None:
    """The number behind the last `marker` that has one, as a numeral; empty where none has, None where there is no marker.

    A marker has one number at most: the first of its own line or, where no digit stands there, the next line if that is a number.
    """
    _, *behind = text.split(marker)
    return next(filter(None, map(_stated, filter(_DIGIT.search, reversed(behind)))), "") if behind else None


def _stated(text: str) -> str | None:
    line, _, below = text.partition("\n")
    number = first_number(line) if _DIGIT.search(line) else numeral(below.strip().partition("\n")[0])
    return number if parse_number(number or "") is not None else None


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last `<tag>…</tag>` that holds more than dots; empty where none does, None where there is no such pair."""
    *closed, _ = text.split(f"</{tag}>")
    pairs = [inside.strip() for _, opened, inside in (before.rpartition(f"<{tag}>") for before in reversed(closed)) if opened]
    return next((inside for inside in pairs if inside.strip(".…")), "") if pairs else None


def _strip_markup(text: str) -> str:
    return _MARKUP.sub("", _FRACTION.sub(r"\1/\2", text.translate(_MINUS)))


def combine(form: float, answer: float, *, correct: bool) -> Reward:
    """One reward from its two parts, each in [0, 1]: whether an answer stood in its place, and how right it was."""
    return Reward(FORMAT_SHARE * form + (1 - FORMAT_SHARE) * answer, correct, {"answer": answer, "format": form})
