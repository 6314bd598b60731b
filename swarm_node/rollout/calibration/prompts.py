"""Long prompts to calibrate on: solved problems, one after the other, and then a new question; or windows of a text file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from swarm_node.tasks.chain_sum import ChainSum, draw_terms
from swarm_node.tasks.draws import Draws
from swarm_node.tasks.registry import load_task
from swarm_node.tasks.word_sum import WordSum

Part = Literal["search", "held-out"]
"""Budgets are chosen on the first; the schedule that comes out is verified on the second."""
HELD_OUT_SHARE = 4
"""The last quarter of a text file is held out."""


class PromptError(ValueError):
    """The text given for prompts cannot be used. The message says what to do."""


class Prompts(Protocol):
    """Where prompts come from. Deterministic: the same arguments give the same tokens."""

    name: str
    """Tells sources with different prompts apart."""

    def prompt(self, part: Part, index: int, length: int) -> NDArray[np.int32]:
        """Exactly `length` token ids."""


class SolvedProblems:
    """What long reasoning looks like to a small model: word problems and sums with their worked answers, then an open question.

    Search and held-out prompts draw on the tasks' `train` and `eval` problems, which have no problem in common.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        self.name = f"solved problems {seed}"
        self._tokenizer = tokenizer
        self._seed = seed
        self._words = load_task("reasoning-gym:gsm_symbolic")

    def prompt(self, part: Part, index: int, length: int) -> NDArray[np.int32]:
        """The last `length` tokens of enough problems; the text begins wherever that is."""
        draws = Draws("calibration", self._seed, part, index)
        start = self._encode("", special=True)
        question, _ = self._problem(draws, part)
        tail = self._encode(f"Question: {question}\nAnswer:")
        pieces: list[list[int]] = []
        while sum(map(len, pieces)) + len(tail) + len(start) < length:
            question, answer = self._problem(draws, part)
            pieces.append(self._encode(f"Question: {question}\nAnswer: {answer}\n\n"))
        body = [token for piece in pieces for token in piece] + tail
        return np.array((start + body[len(body) + len(start) - length :])[:length], dtype=np.int32)

    def _problem(self, draws: Draws, part: Part) -> tuple[str, str]:
        """A question and its worked answer: three in four are word problems."""
        kind, index = draws.below(8), draws.below(2**31)
        split: Literal["train", "eval"] = "train" if part == "search" else "eval"
        if kind < 6:
            entry = self._words.problem(self._seed, index, split).answer
            return entry["question"], entry["metadata"]["answer_cot"]
        task = ChainSum(4) if kind == 6 else WordSum(3)
        terms = draw_terms(task.level, self._seed, index, split)
        return task.prompt(terms), worked_sum(terms)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids


class TextWindows:
    """Windows of one text, spread evenly over its first three quarters (search) and its last (held-out)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
        """
        Raises:
            PromptError: the file cannot be read as UTF-8.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"the prompts {path} cannot be read ({error}): give a UTF-8 text file") from error
        self.name = f"text {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._path = path
        self._ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def prompt(self, part: Part, index: int, length: int) -> NDArray[np.int32]:
        """Window `index`; windows may overlap, those of different parts do not.

        Raises:
            PromptError: the part is shorter than `length` tokens.
        """
        cut = len(self._ids) - len(self._ids) // HELD_OUT_SHARE
        ids = self._ids[:cut] if part == "search" else self._ids[cut:]
        if len(ids) < length:
            raise PromptError(
                f"{self._path} has {len(self._ids)} tokens, of which {len(ids)} for {part} prompts, and one of {length} is needed: "
                f"give a text of {HELD_OUT_SHARE * length} tokens, or a smaller --context"
            )
        # The golden ratio spreads any number of windows evenly.
        start = int((len(ids) - length) * (index * 0.6180339887498949 % 1.0))
        return ids[start : start + length]


def worked_sum(terms: tuple[int, ...]) -> str:
    """`7+15=22,22+9=31#31`: the partial sums, then the answer, as `chain-sum` grades it."""
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return f"{','.join(steps)}#{total}"
