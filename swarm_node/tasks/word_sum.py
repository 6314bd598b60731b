"""`word-sum:LEVEL`: the sums of `chain-sum` with their terms in words.

prompt       seven plus fifteen plus nine=
completion   7+15+9=7+15=22,22+9=31#31
"""

from __future__ import annotations

from swarm_node.tasks.chain_sum import ChainSum

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class WordSum(ChainSum):
    """Same streams, levels, hold-out and verifier as `chain-sum`: only the prompt is spelt."""

    kind = "word-sum"

    def prompt(self, terms: tuple[int, ...]) -> str:
        """The terms in words: `seven plus fifteen plus nine=`."""
        return " plus ".join(map(spell, terms)) + "="


def spell(number: int) -> str:
    """A number below one million in English words, without "and": 2345 is `two thousand three hundred forty-five`."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[ones]}" if ones else "")
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, unit)
    return f"{spell(many)} {name}" + (f" {spell(rest)}" if rest else "")
