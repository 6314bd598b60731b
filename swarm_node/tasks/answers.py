"""Answer grading: numbers read by a grammar that evaluates nothing, and the places where a final answer may stand.

`2003^2002^2001` or `9**9**9` is not a number here, so no text can make the grader work hard.
"""

from __future__ import annotations

import re
from fractions import Fraction

from swarm_node.tasks.base import Reward

MAX_DIGITS = 40
"""Digits of a number at most, numerator and denominator together: answers of school mathematics have far fewer."""

MAX_LENGTH = 200
"""Characters of a number at most, with sign, currency and unit."""

MAX_MARKS = 64
"""Marks of a text that are looked at, from its end."""

FORMAT_SHARE = 0.1
"""What an answer is worth for standing where it was asked for, right or wrong."""

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s?[$€£¥]?\s?"
    rf"(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))?"
    # A unit: anything without digits and operators; a hyphen or slash may join words, as in `miles/hour`.
    r"(?:[^0-9+*/^=<>-]|[/-](?=[A-Za-z]))*"
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
    plain = _MARKUP.sub("", _FRACTION.sub(r"\1/\2", text.translate(_MINUS))).strip(_EDGE)
    # `$18$` is set as mathematics, `$18` is money.
    match = _NUMBER.fullmatch(plain.strip("$") if plain.endswith("$") else plain)
    if match is None:
        return None
    bare = match["sign"].strip("+") + match["top"] + (f"/{match['bottom']}" if match["bottom"] else "")
    return bare.replace(",", "") if len(_DIGIT.findall(bare)) <= MAX_DIGITS else None


def last_number(text: str) -> str | None:
    """The last word with a digit in it, as a numeral, if it is a number: what a reader takes for the answer where no place is marked."""
    last = max(map(text.rfind, "0123456789"))
    if last < 0:
        return None
    # Longer words are no numbers, so nothing farther away needs to be looked at.
    before = re.split(r"[\s=]+", text[max(0, last - MAX_LENGTH) : last + 1])[-1]
    after = re.split(r"[\s=]+", text[last + 1 : last + MAX_LENGTH])[0]
    return numeral(before + after)


def first_number(text: str) -> str | None:
    """The first number on the first line that is not empty, as a numeral: words may stand around it, but `3 + 4` is no number."""
    words = text.lstrip()[: 2 * MAX_LENGTH].partition("\n")[0].translate(_MINUS).split()
    at = next((index for index, word in enumerate(words) if _DIGIT.search(word)), None)
    if at is None:
        return None
    start = at - 1 if at and re.fullmatch(r"[+-]?[$€£¥]?", words[at - 1]) else at  # `- 5`, `$ 20`
    end = at + 3 if words[at + 1 : at + 2] == ["/"] else at + 1  # `3 / 4`
    if len(words) > end and re.match(r"[-+*/^=×÷<>]+($|[0-9(])", words[end]):
        return None
    return numeral(" ".join(words[start:end]))


def last_line(text: str) -> str:
    """The last line with anything on it, without the full stop."""
    return text.strip().rpartition("\n")[2].strip(" \t\r.")


def marked_number(text: str, marker: str = "####") -> tuple[bool, str | None]:
    """Whether there is a `marker`, and the number right behind the last one that has any: what follows that number, further marks without a
    number included, takes nothing back. Of many marks the last MAX_MARKS count."""
    at = text.rfind(marker)
    found = at >= 0
    for _ in range(MAX_MARKS):
        if at < 0:
            break
        start = at + len(marker)
        number = first_number(text[start : start + 4 * MAX_LENGTH].partition(marker)[0])
        if number is not None:
            return True, number
        at = text.rfind(marker, 0, at)
    return found, None


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last `<tag>…</tag>` that is not empty; None where there is no such pair at all. A tag without its partner does not
    count, wherever it stands."""
    inside, opened = None, None
    for match in re.finditer(rf"<(/?){tag}>", text):
        if not match[1]:
            opened = match.end()
        elif opened is not None:
            inside = text[opened : match.start()].strip() or inside or ""
            opened = None
    return inside


def combine(form: float, answer: float, *, correct: bool) -> Reward:
    """One reward from its two parts, each in [0, 1]: whether an answer stood in its place, and how right it was."""
    return Reward(FORMAT_SHARE * form + (1 - FORMAT_SHARE) * answer, correct, {"answer": answer, "format": form})
