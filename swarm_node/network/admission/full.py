"""The checks that need a group's content. One class a check; each raises `Rejected` with its own reason."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection

import numpy as np
from lru import LRU
from numpy.typing import NDArray
from swarm_protocols.group import Completion, Finish, Group, ProblemRef, hash_prompt
from swarm_protocols.reject import Reason, Rejected

POSITIVE_SLACK = 1e-3
"""Nats by which rounding may lift a log-prob above 0."""
CONSTANT_STD = 1e-6
"""Log-probs of a whole group that spread less than this were not recorded from a model."""
JUDGED_TOKENS = 8
"""Fewer log-probs than this are too few to judge their spread or mean."""
ENTROPY_SLACK = 1.0
"""Nats by which the mean of -log p may exceed the entropy of the uniform distribution, which bounds its expectation."""
TAIL_SLACK = 25.0
"""A token with p < exp(-25) / vocabulary size is drawn with probability below exp(-25): union bound over the vocabulary."""


class PromptCheck:
    """`unknown_task`, `prompt_mismatch`: the prompt is regenerated from its reference and must hash to what the sender claims."""

    def __init__(self, prompt_tokens: Callable[[ProblemRef], NDArray[np.int32]]) -> None:
        self._prompt_tokens = prompt_tokens

    def check(self, group: Group) -> NDArray[np.int32]:
        """The prompt's token ids, shape (P,)."""
        try:
            prompt = self._prompt_tokens(group.problem)
        except (ValueError, LookupError, OverflowError) as error:
            # What tasks raise for a reference that names no problem; TaskError is a ValueError.
            raise Rejected(Reason.UNKNOWN_TASK, f"{group.problem} names no problem here: {error}") from None
        regenerated = hash_prompt(prompt)
        if regenerated != group.prompt_hash:
            raise Rejected(
                Reason.PROMPT_MISMATCH, f"prompt hashes to {regenerated.hex()[:16]}, the sender claims {group.prompt_hash.hex()[:16]}"
            )
        return prompt


class TokenCheck:
    """`bad_tokens`: ids inside the vocabulary; a stop token only as the last one, and exactly where the finish reason says so."""

    def __init__(self, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._vocab_size = vocab_size
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int32)

    def check(self, group: Group) -> None:
        """Let the group pass. Raises Rejected for the first completion that breaks a rule."""
        for number, completion in enumerate(group.completions):
            self._check_completion(number, completion)

    def _check_completion(self, number: int, completion: Completion) -> None:
        if len(completion) < 1:
            raise Rejected(Reason.BAD_TOKENS, f"completion {number} is empty")
        low, high = int(completion.tokens.min()), int(completion.tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise Rejected(Reason.BAD_TOKENS, f"completion {number} has ids {low}..{high}, vocabulary {self._vocab_size}")
        stops = np.isin(completion.tokens, self._stop_ids)
        if stops[:-1].any():
            raise Rejected(Reason.BAD_TOKENS, f"completion {number} goes on after stop token {int(completion.tokens[stops.argmax()])}")
        if bool(stops[-1]) != (completion.finish is Finish.STOP):
            last = int(completion.tokens[-1])
            raise Rejected(Reason.BAD_TOKENS, f"completion {number} finished as {completion.finish.name.lower()} with token {last}")


class LengthCheck:
    """`too_large`: prompt and completion together are more than this node can learn from. No bound where `max_tokens` is None."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens

    def check(self, group: Group, prompt_tokens: int) -> None:
        """Let the group pass; `prompt_tokens` is the length of its prompt here. Raises Rejected."""
        if self._max_tokens is None:
            return
        for number, completion in enumerate(group.completions):
            if prompt_tokens + len(completion) > self._max_tokens:
                raise Rejected(
                    Reason.TOO_LARGE,
                    f"completion {number} has {len(completion)} tokens after a prompt of {prompt_tokens}, limit {self._max_tokens} in all",
                )


class LogprobCheck:
    """`bad_logprobs`: finite, not positive, not constant, and such as sampling from some distribution over this vocabulary gives."""

    def __init__(self, vocab_size: int) -> None:
        self._uniform = math.log(vocab_size)

    def check(self, group: Group) -> None:
        """Let the group pass; spread and mean are judged over all its completions together. Raises Rejected."""
        recorded = np.concatenate([completion.logprobs for completion in group.completions])
        if not np.isfinite(recorded).all():
            raise Rejected(Reason.BAD_LOGPROBS, f"{int((~np.isfinite(recorded)).sum())} log-probs are not finite")
        logprobs = recorded.astype(np.float64)
        if logprobs.max() > POSITIVE_SLACK:
            raise Rejected(Reason.BAD_LOGPROBS, f"log-prob {logprobs.max():.4g} is above 0")
        floor = -self._uniform - TAIL_SLACK
        if logprobs.min() < floor:
            raise Rejected(Reason.BAD_LOGPROBS, f"log-prob {logprobs.min():.4g} is below {floor:.4g}: sampling does not draw such tokens")
        if len(logprobs) < JUDGED_TOKENS:
            return
        if logprobs.std() < CONSTANT_STD:
            raise Rejected(Reason.BAD_LOGPROBS, f"all {len(logprobs)} log-probs are {logprobs[0]:.4g}")
        if -logprobs.mean() > self._uniform + ENTROPY_SLACK:
            limit = self._uniform + ENTROPY_SLACK
            raise Rejected(Reason.BAD_LOGPROBS, f"mean of -log p is {-logprobs.mean():.4g}, limit {limit:.4g} for this vocabulary")


class CopyCheck:
    """`copied`, `duplicate`: most completions were admitted before for the same prompt, from another sender or from this one.

    Only tokens are compared: a copycat may write any log-probs. Short answers coincide honestly, so completions below `MIN_TOKENS` do
    not count.
    """

    MIN_TOKENS = 16

    def __init__(self, capacity: int) -> None:
        self._owners: LRU[bytes, str] = LRU(capacity)

    def check(self, sender: str, group: Group) -> None:
        """Let the group pass. Raises Rejected when more than half of its completions that count are known."""
        keys = self._keys(group)
        owners = [owner for key in keys if (owner := self._owners.get(key)) is not None]
        foreign = sum(owner != sender for owner in owners)
        if 2 * foreign > len(keys):
            raise Rejected(Reason.COPIED, f"{foreign} of {len(keys)} completions came from another sender before")
        if 2 * (len(owners) - foreign) > len(keys):
            raise Rejected(Reason.DUPLICATE, f"{len(owners) - foreign} of {len(keys)} completions came from this sender before")

    def admitted(self, sender: str, group: Group) -> None:
        """Remember the group's completions as the sender's, unless somebody had them before."""
        for key in self._keys(group):
            self._owners.setdefault(key, sender)

    def _keys(self, group: Group) -> set[bytes]:
        return {
            hashlib.sha256(group.prompt_hash + completion.tokens.astype("<u4").tobytes()).digest()[:16]
            for completion in group.completions
            if len(completion) >= self.MIN_TOKENS
        }
