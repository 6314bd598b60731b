"""The checks that need a body's header only. One class a check; each raises `Rejected` with its own reason.

`check` judges an arrival; `admitted` is told of arrivals that every check let pass, and only then remembers them: what was refused
must not be able to block what is honest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lru import LRU
from swarm_protocols.codec import Header
from swarm_protocols.group import ProblemRef
from swarm_protocols.reject import Reason, Rejected

from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.network.admission.quota import Quota
from swarm_node.network.admission.recent import SeenDigests


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
        """Remember the digest."""
        self._seen.add(arrival.sender, arrival.digest)


class History:
    """Sequence number -> policy step of each sender's newest groups."""

    def __init__(self, options: AdmissionOptions) -> None:
        self._window = options.reorder_window
        self._senders: LRU[str, dict[int, int]] = LRU(options.senders)

    def of(self, sender: str) -> dict[int, int]:
        """Those of one sender; empty for a sender that is not remembered."""
        return self._senders.get(sender) or {}

    def is_full(self, sender: str) -> bool:
        """Whether the sender has as many as are remembered (`reorder_window`), so that an older one may have been forgotten."""
        return len(self.of(sender)) >= self._window

    def add(self, arrival: Arrival) -> None:
        """Remember an arrival; of more than `reorder_window` the lowest sequence number is forgotten."""
        steps = self._senders.setdefault(arrival.sender, {})
        steps[arrival.header.sequence] = arrival.header.policy.step
        if len(steps) > self._window:
            del steps[min(steps)]


class ReplayCheck(Check):
    """`replay`: a sequence number of this sender that was used, or that lies below everything still remembered."""

    def __init__(self, history: History) -> None:
        self._history = history

    def check(self, arrival: Arrival) -> None:
        """Compares the sequence number with those of the sender's history."""
        sequence, known = arrival.header.sequence, self._history.of(arrival.sender)
        if sequence in known:
            raise Rejected(Reason.REPLAY, f"sequence number {sequence} was used before")
        if self._history.is_full(arrival.sender) and sequence < min(known):
            raise Rejected(Reason.REPLAY, f"sequence number {sequence} is older than the newest {len(known)} of this sender")

    def admitted(self, arrival: Arrival) -> None:
        """Remember the sequence number."""
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
        step, newest = arrival.header.policy.step, max(self._history.of(arrival.sender).values(), default=0)
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
