"""The checks that need a body's header only. One class a check; each raises `Rejected` with its own reason.

`check` judges an arrival; `admitted` is told of arrivals that every check let pass, and only then remembers them: what was refused
must not be able to block what is honest.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lru import LRU
from swarm_protocols.codec import Header
from swarm_protocols.group import ProblemRef
from swarm_protocols.reject import Reason, Rejected

from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.network.admission.quota import Quota
from swarm_node.network.admission.recent import SeenDigests

NEW_LIFE = 32
"""Groups with old sequence numbers, none of them seen before, after which their sender is believed to have begun to count again."""
MAX_RUNS = 32
"""Runs of forgotten sequence numbers kept for one sender."""


@dataclass(frozen=True)
class Arrival:
    """A body with a well-formed header, and who signed the message that brought it."""

    sender: str
    digest: bytes
    bytes: int
    header: Header


class Check:
    """A judgement about arrivals."""

    def check(self, arrival: Arrival) -> None:
        """Let the arrival pass.

        Raises:
            Rejected: with the check's reason.
        """
        raise NotImplementedError

    def admitted(self, arrival: Arrival) -> None:
        """The arrival passed every check."""


class QuotaCheck(Check):
    """`over_quota`: charged for whatever is well-formed and new, admitted or not."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota

    def check(self, arrival: Arrival) -> None:
        """Charge one group, its tokens and the body's bytes to the sender."""
        self._quota.take(arrival.sender, groups=1, tokens=arrival.header.tokens, bytes=arrival.bytes)


class DuplicateCheck(Check):
    """`duplicate`: this very body was admitted before, from whomever."""

    def __init__(self, seen: SeenDigests) -> None:
        self._seen = seen

    def check(self, arrival: Arrival) -> None:
        """Compares the digest alone."""
        if arrival.digest in self._seen:
            raise Rejected(Reason.DUPLICATE, f"body {arrival.digest.hex()[:16]} was admitted before")

    def admitted(self, arrival: Arrival) -> None:
        """Remember the digest, with sender and sequence number."""
        self._seen.add(arrival.sender, arrival.digest, arrival.header.sequence)


@dataclass
class SenderHistory:
    """What is remembered of one sender's groups, by sequence number."""

    steps: dict[int, int] = field(default_factory=dict)
    """Number -> policy step of the newest arrivals, in their order."""
    waiting: dict[int, int] = field(default_factory=dict)
    """As `steps`, of groups with old numbers that may be the first of a new life."""
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    """Runs of numbers, both ends included, whose bodies were admitted and whose digests are no longer remembered; sorted."""

    def forget(self, sequence: int) -> None:
        """The digest of an admitted body is gone. Where there are too many runs, the two nearest become one."""
        insort(self.forgotten, (sequence, sequence))
        if len(self.forgotten) > MAX_RUNS:
            runs = self.forgotten
            first = min(range(MAX_RUNS), key=lambda index: runs[index + 1][0] - runs[index][1])
            runs[first : first + 2] = [(runs[first][0], runs[first + 1][1])]

    def has_forgotten(self, sequence: int) -> bool:
        """Whether a number lies within one of the runs."""
        return any(low <= sequence <= high for low, high in self.forgotten)


class History:
    """The history of every sender."""

    def __init__(self, options: AdmissionOptions) -> None:
        self._window = options.reorder_window
        self._senders: LRU[str, SenderHistory] = LRU(options.senders)

    def of(self, sender: str) -> SenderHistory:
        """That of one sender; for a sender that is not remembered an empty one, which nothing keeps."""
        return self._senders.get(sender) or SenderHistory()

    def is_old(self, sender: str, sequence: int) -> bool:
        """Whether a number is taken, or lies below everything of a full window."""
        steps = self.of(sender).steps
        return sequence in steps or (len(steps) >= self._window and sequence < min(steps))

    def add(self, arrival: Arrival) -> None:
        """Remember an arrival; of more than `reorder_window` the one that came first is dropped."""
        if arrival.sender not in self._senders:
            self._senders[arrival.sender] = SenderHistory()
        steps = self._senders[arrival.sender].steps
        steps[arrival.header.sequence] = arrival.header.policy.step
        if len(steps) > self._window:
            del steps[next(iter(steps))]

    def forget(self, sender: str, sequence: int) -> None:
        """See `SenderHistory.forget`."""
        if history := self._senders.get(sender):
            history.forget(sequence)


class ReplayCheck(Check):
    """`replay`: a sequence number of this sender that was used, or that lies below everything still remembered.

    A sender that lost its checkpoint while its clock went back begins a new life with old numbers. It is taken again after NEW_LIFE
    groups. That admits no body twice, whoever repeats what: this check sees none whose digest is remembered, and the numbers of admitted
    bodies whose digests are forgotten stay refused.
    """

    def __init__(self, history: History) -> None:
        self._history = history

    def check(self, arrival: Arrival) -> None:
        """Compares with the sender's history. An old number that no run holds is noted, and passes as the NEW_LIFE-th of them."""
        sequence, sender = arrival.header.sequence, self._history.of(arrival.sender)
        if sender.has_forgotten(sequence):
            raise Rejected(Reason.REPLAY, f"sequence number {sequence} was used before")
        if not self._history.is_old(arrival.sender, sequence):
            return
        sender.waiting[sequence] = arrival.header.policy.step
        if len(sender.waiting) < NEW_LIFE:
            raise Rejected(
                Reason.REPLAY,
                f"sequence number {sequence} is taken or older than the newest {len(sender.steps)} of this sender "
                f"({len(sender.waiting)} of {NEW_LIFE} groups until it is believed to have begun again)",
            )
        sender.steps, sender.waiting = sender.waiting, {}

    def admitted(self, arrival: Arrival) -> None:
        """Remember the sequence number and its policy step."""
        self._history.add(arrival)


class StalenessCheck(Check):
    """`stale`: the policy step lies too far behind the newest one among this sender's remembered groups.

    A stale group still enters the history. So a sender that was restarted from an old checkpoint is taken again once the history holds
    nothing but its new life.
    """

    def __init__(self, history: History, bound: int) -> None:
        self._history = history
        self._bound = bound

    def check(self, arrival: Arrival) -> None:
        """Compares policy steps; what is refused is remembered all the same."""
        step, newest = arrival.header.policy.step, max(self._history.of(arrival.sender).steps.values(), default=0)
        if step < newest - self._bound:
            self._history.add(arrival)
            raise Rejected(Reason.STALE, f"policy step {step}, newest of this sender {newest}, at most {self._bound} behind")


class TaskCheck(Check):
    """`unknown_task`: a problem of a task that this swarm does not train on."""

    def __init__(self, tasks: Collection[str]) -> None:
        self._tasks = frozenset(tasks)

    def check(self, arrival: Arrival) -> None:
        """Compares canonical names."""
        task = arrival.header.problem.task
        if task not in self._tasks:
            raise Rejected(Reason.UNKNOWN_TASK, f"task {task!r}, this swarm trains on {', '.join(sorted(self._tasks))}")


class AssignmentCheck(Check):
    """`not_assigned`: a problem that this sender was not given at this step."""

    def __init__(self, assigned: Callable[[str, ProblemRef, int], bool]) -> None:
        self._assigned = assigned

    def check(self, arrival: Arrival) -> None:
        """Judges the problem at the policy step that the header claims."""
        problem, step = arrival.header.problem, arrival.header.policy.step
        if not self._assigned(arrival.sender, problem, step):
            raise Rejected(Reason.NOT_ASSIGNED, f"problem {problem.index} of stream {problem.seed} is not this sender's at step {step}")
