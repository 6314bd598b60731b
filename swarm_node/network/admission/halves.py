"""Admission: what a peer sends is checked here, cheap before dear, before anything else of the node sees it.

The cheap half runs in the network process on bytes and headers; the full half runs beside the learner, which knows prompts and the
vocabulary. Every refusal has a stable reason that is counted; `docs/admission.md` explains each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.codec import Header, decode_group, decode_header, digest
from swarm_protocols.group import Group, ProblemRef
from swarm_protocols.limits import DEFAULT_LIMITS, Limits
from swarm_protocols.messages import Announcement, Ignored, Message, decode_message
from swarm_protocols.reject import Reason, Rejected

from swarm_node.network.admission.cheap import (
    Arrival,
    AssignmentCheck,
    Check,
    DuplicateCheck,
    History,
    QuotaCheck,
    ReplayCheck,
    StalenessCheck,
    TaskCheck,
)
from swarm_node.network.admission.full import CopyCheck, LengthCheck, LogprobCheck, PromptCheck, TokenCheck
from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.network.admission.quota import Quota
from swarm_node.network.admission.recent import SeenDigests


class CheapAdmission:
    """The half that needs no task, tokenizer or model: some microseconds a body, nothing decompressed.

    Not safe to share between threads. Memory is bounded by the options, whatever peers send.
    """

    def __init__(
        self,
        options: AdmissionOptions | None = None,
        *,
        tasks: Collection[str],
        assigned: Callable[[str, ProblemRef, int], bool],
        limits: Limits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            options: quotas, and what is remembered of senders; None: the defaults.
            tasks: canonical names of the tasks that this swarm trains on.
            assigned: whether a sender (peer id) was given a problem at one of its policy steps.
            limits: what a message and a header may hold.
            clock: seconds, for quotas.
        """
        options = options or AdmissionOptions()
        self.limits = limits
        self._rejections: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()
        self._quota = Quota(options, clock)
        history = History(options)
        self._seen = SeenDigests(options.digests, options.digests_per_sender, options.senders, history.forget)
        self._checks: tuple[Check, ...] = (
            # Before the quota: anyone may repeat a sender's old messages, and must not be able to spend what the sender has left.
            DuplicateCheck(self._seen),
            ReplayCheck(history),
            QuotaCheck(self._quota),
            StalenessCheck(history, options.staleness_steps),
            TaskCheck(tasks),
            AssignmentCheck(assigned),
        )

    @property
    def rejections(self) -> Mapping[str, int]:
        """Reject reason -> count."""
        return dict(self._rejections)

    @property
    def ignored(self) -> Mapping[str, int]:
        """Why messages were ignored without fault -> count."""
        return dict(self._ignored)

    def open(self, raw: bytes) -> Message | Ignored:
        """Read a gossip message.

        Raises:
            Rejected: `too_large`, `bad_encoding` or `bad_schema`; already counted.
        """
        try:
            message = decode_message(raw, self.limits)
        except Rejected as rejected:
            self._count(rejected)
            raise
        if isinstance(message, Ignored):
            self._ignored[message.why] += 1
        return message

    def admit(self, sender: str, body: bytes) -> Header:
        """Judge a group's body, inline or pulled; it is remembered if it passes.

        Raises:
            Rejected: `too_large`, `bad_encoding`, `unsupported_version`, `bad_schema`, `duplicate`, `replay`, `over_quota`, `stale`,
                `unknown_task` or `not_assigned`; already counted.
        """
        try:
            header = decode_header(body, self.limits)
            arrival = Arrival(sender, digest(body), len(body), header)
            for check in self._checks:
                check.check(arrival)
        except Rejected as rejected:
            self._count(rejected)
            raise
        for check in self._checks:
            check.admitted(arrival)
        return header

    def admit_announcement(self, sender: str, announcement: Announcement) -> None:
        """Judge whether an announced body is worth pulling. The pulled body is charged when it is admitted.

        Raises:
            Rejected: `over_quota` or `duplicate`; already counted.
        """
        try:
            self._quota.take(sender, announcements=1)
            if announcement.digest in self._seen:
                raise Rejected(Reason.DUPLICATE, f"body {announcement.digest.hex()[:16]} was admitted before")
            self._quota.require(sender, groups=1, tokens=announcement.tokens, bytes=announcement.size)
        except Rejected as rejected:
            self._count(rejected)
            raise

    def _count(self, rejected: Rejected) -> None:
        self._rejections[rejected.reason.value] += 1


class FullAdmission:
    """The half that knows the task, the tokenizer and the vocabulary. Rewards are not judged: every node computes its own.

    Expects bodies that passed `CheapAdmission`. Not safe to share between threads.
    """

    def __init__(
        self,
        options: AdmissionOptions | None = None,
        *,
        prompt_tokens: Callable[[ProblemRef], NDArray[np.int32]],
        vocab_size: int,
        stop_ids: Collection[int],
        max_tokens: int | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """
        Args:
            options: how many completions are remembered; None: the defaults.
            prompt_tokens: token ids (P,) of the prompt that a reference names; raises ValueError or LookupError where it names none.
            vocab_size: of the model's logits.
            stop_ids: tokens that end a completion.
            max_tokens: of prompt and completion together that this node can learn from; None for no bound.
            limits: what a group may hold.
        """
        options = options or AdmissionOptions()
        self._limits = limits
        self._rejections: Counter[str] = Counter()
        self._prompts = PromptCheck(prompt_tokens)
        self._lengths = LengthCheck(max_tokens)
        self._tokens = TokenCheck(vocab_size, stop_ids)
        self._logprobs = LogprobCheck(vocab_size)
        self._copies = CopyCheck(options.completions)

    @property
    def rejections(self) -> Mapping[str, int]:
        """Reject reason -> count."""
        return dict(self._rejections)

    def admit(self, sender: str, body: bytes) -> tuple[Group, NDArray[np.int32]]:
        """The group and its prompt's token ids, shape (P,).

        Raises:
            Rejected: what decoding raises, `unknown_task`, `prompt_mismatch`, `too_large`, `bad_tokens`, `bad_logprobs`, `copied` or
                `duplicate`; already counted.
        """
        try:
            group = decode_group(body, self._limits)
            prompt = self._prompts.check(group)
            self._lengths.check(group, len(prompt))
            self._tokens.check(group)
            self._logprobs.check(group)
            self._copies.check(sender, group)
        except Rejected as rejected:
            self._rejections[rejected.reason.value] += 1
            raise
        self._copies.admitted(sender, group)
        return group, prompt
