"""Admission: every reason has a body that triggers it, and an honest body beside it that passes."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray
from swarm_protocols.codec import digest, encode_group
from swarm_protocols.group import Completion, Finish, Group, ProblemRef
from swarm_protocols.limits import DEFAULT_LIMITS
from swarm_protocols.messages import Announcement, GroupMessage, Ignored, encode_message
from swarm_protocols.reject import Reason, Rejected

from swarm_node.network.admission.cheap import MAX_RUNS, NEW_LIFE, SenderHistory
from swarm_node.network.admission.halves import CheapAdmission, FullAdmission
from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.network.admission.quota import Quota
from swarm_node.network.admission.recent import SeenDigests
from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.tasks.assignment import EVERYBODY, MAX_SLOTS, assigned_index
from swarm_node.tasks.base import TaskError
from tests.support.group_samples import PROMPT, STOP, VOCAB, sample_completion, sample_group


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def cheap(
    clock: Callable[[], float] | None = None, assigned: Callable[[str, ProblemRef, int], bool] | None = None, **options: int
) -> CheapAdmission:
    return CheapAdmission(
        AdmissionOptions(**options),
        tasks={"chain-sum:2"},
        assigned=assigned or (lambda sender, problem, step: True),
        clock=clock or Clock(),
    )


def full(**options: int) -> FullAdmission:
    return FullAdmission(AdmissionOptions(**options), prompt_tokens=lambda ref: PROMPT, vocab_size=VOCAB, stop_ids={STOP, 0})


def body_of(number: int, step: int = 12, **changes: Any) -> bytes:
    """Different content and sequence number for each `number`."""
    return encode_group(sample_group(seed=number, step=step, sequence=number, **changes))


def reason_of(call: Callable[..., Any], *arguments: Any) -> Reason:
    with pytest.raises(Rejected) as caught:
        call(*arguments)
    return caught.value.reason


# -- the cheap half


def test_an_honest_group_passes_both_halves_and_brings_its_prompt() -> None:
    group = sample_group()
    body = encode_group(group)
    header = cheap().admit("alice", body)
    admitted, prompt = full().admit("alice", body)
    assert (header.problem, header.tokens) == (group.problem, 115)
    assert [len(c) for c in admitted.completions] == [20, 30, 25, 40]
    assert prompt is PROMPT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body + bytes(DEFAULT_LIMITS.body_bytes), Reason.TOO_LARGE),
        (lambda body: body[:-1], Reason.BAD_ENCODING),
        (lambda body: b"\x09" + body[1:], Reason.UNSUPPORTED_VERSION),
        (lambda body: body.replace(b"\xabchain-sum:2\x07", b"\xabchain-sum:2\xff"), Reason.BAD_SCHEMA),
    ],
)
def test_a_malformed_body_is_refused_with_its_reason_counted(change: Callable[[bytes], bytes], reason: Reason) -> None:
    admission = cheap()
    assert reason_of(admission.admit, "alice", change(body_of(1))) == reason
    assert admission.rejections == {reason.value: 1}
    admission.admit("alice", body_of(1))


@pytest.mark.parametrize("kind", ["groups", "tokens", "bytes"])
def test_a_sender_over_its_quota_waits_and_others_do_not(kind: str) -> None:
    clock, bodies = Clock(), [body_of(number) for number in range(11)]
    costs = {"groups": 10, "tokens": 10 * 115, "bytes": sum(map(len, bodies[:10]))}
    admission = cheap(clock, None, **{f"{kind}_per_minute": costs[kind]})
    for body in bodies[:10]:
        admission.admit("alice", body)
    assert reason_of(admission.admit, "alice", bodies[10]) == Reason.OVER_QUOTA
    admission.admit("bob", bodies[10])
    clock.now += 12  # a fifth of a minute: room for two
    admission.admit("alice", body_of(11))
    assert admission.rejections == {"over_quota": 1}


def test_a_quota_refills_in_a_minute_and_holds_no_more_than_that() -> None:
    clock = Clock()
    quota = Quota(AdmissionOptions(tokens_per_minute=600), clock)
    quota.take("alice", tokens=600)
    clock.now += 30
    with pytest.raises(Rejected, match="301 tokens with 300 left of 600 a minute"):
        quota.take("alice", tokens=301)
    quota.take("alice", tokens=300)
    clock.now += 3600
    with pytest.raises(Rejected, match="601 tokens with 600 left"):
        quota.require("alice", tokens=601)


def test_refused_groups_count_against_the_quota() -> None:
    admission = cheap(groups_per_minute=3)
    admission.admit("alice", body_of(1))
    assert reason_of(admission.admit, "alice", body_of(2, task="gsm8k")) == Reason.UNKNOWN_TASK
    assert reason_of(admission.admit, "alice", body_of(3, task="gsm8k")) == Reason.UNKNOWN_TASK
    assert reason_of(admission.admit, "alice", body_of(4)) == Reason.OVER_QUOTA


def test_who_repeats_a_senders_old_messages_does_not_spend_the_senders_quota() -> None:
    admission = cheap(groups_per_minute=8, reorder_window=4, digests_per_sender=2)
    for number in range(1, 7):
        admission.admit("alice", body_of(number))
    for _ in range(10):
        assert [reason_of(admission.admit, "alice", body_of(number)) for number in (1, 3, 6)] == [
            Reason.REPLAY,  # below the window
            Reason.REPLAY,  # in it; its digest is forgotten
            Reason.DUPLICATE,
        ]
    admission.admit("alice", body_of(7))
    admission.admit("alice", body_of(8))
    assert reason_of(admission.admit, "alice", body_of(9)) == Reason.OVER_QUOTA


def test_the_same_body_is_a_duplicate_from_whomever() -> None:
    admission = cheap()
    admission.admit("alice", body_of(1))
    assert reason_of(admission.admit, "alice", body_of(1)) == Reason.DUPLICATE
    assert reason_of(admission.admit, "mallory", body_of(1)) == Reason.DUPLICATE


def test_a_copy_that_arrives_first_and_is_refused_does_not_block_the_original() -> None:
    admission = cheap(assigned=lambda sender, problem, step: sender == "alice")
    assert reason_of(admission.admit, "mallory", body_of(1)) == Reason.NOT_ASSIGNED
    admission.admit("alice", body_of(1))


def test_a_used_sequence_number_is_a_replay() -> None:
    admission = cheap()
    admission.admit("alice", encode_group(sample_group(seed=1, sequence=5)))
    assert reason_of(admission.admit, "alice", encode_group(sample_group(seed=2, sequence=5))) == Reason.REPLAY
    admission.admit("bob", encode_group(sample_group(seed=3, sequence=5)))


def test_groups_may_overtake_each_other_within_the_window_and_older_ones_are_replays() -> None:
    admission = cheap(reorder_window=4)
    for sequence in (100, 104, 101, 103):
        admission.admit("alice", body_of(sequence))
    admission.admit("alice", body_of(102))  # pushes 100 out
    assert reason_of(admission.admit, "alice", body_of(100, group_size=5)) == Reason.REPLAY
    assert reason_of(admission.admit, "alice", body_of(7)) == Reason.REPLAY
    admission.admit("alice", body_of(2_000_000_000))  # a restart starts from the clock


def outcomes(admission: CheapAdmission, bodies: Iterable[bytes]) -> list[str]:
    return [reason.value if (reason := reason_of_or_none(admission, "alice", body)) else "admitted" for body in bodies]


@pytest.mark.parametrize(("first", "sent"), [(1, 40), (1, 100), (9800, 200), (9990, 100), (10_000, 200), (10_030, 100)])
def test_a_sender_that_lost_its_checkpoint_and_whose_clock_went_back_is_taken_again(first: int, sent: int) -> None:
    """Numbers from 10,000 before, at policy steps from 500; then from `first`, at steps from 0."""
    admission = cheap()
    assert set(outcomes(admission, (body_of(10_000 + number, step=500 + number // 8) for number in range(sent)))) == {"admitted"}
    again = outcomes(admission, (body_of(first + number, step=number // 8, group_size=5) for number in range(300)))
    assert again.index("admitted") <= 64
    assert set(again[again.index("admitted") :]) == {"admitted"}


def test_numbers_whose_bodies_are_forgotten_stay_refused_and_those_beside_them_do_not() -> None:
    admission = cheap(digests_per_sender=16, reorder_window=8)
    for number in range(10_000, 10_100):
        admission.admit("alice", body_of(number))
    again = outcomes(admission, (body_of(number, group_size=5) for number in range(10_000, 10_200)))
    # 10,084 is the oldest whose digest is remembered; every later one is provably new, and the 32nd of those begins the new life.
    assert again == ["replay"] * (84 + 15) + ["replay"] + ["admitted"] * 100


def test_no_body_is_ever_admitted_twice_whatever_is_repeated_and_however_little_is_remembered() -> None:
    """Three lives of one sender, the second behind the first; everything that was sent is repeated again and again, in bursts."""
    draws = np.random.default_rng(3)
    admission = cheap(digests=12, digests_per_sender=8, reorder_window=4)
    admitted: Counter[bytes] = Counter()
    sent: list[bytes] = []
    for start in (100_000, 50_000, 200_000):
        for number in range(80):
            sent.append(body_of(start + number))
            repeated = [sent[index] for index in draws.integers(0, len(sent), int(draws.integers(0, 12)))]
            for body in [sent[-1], *repeated, *sent[:40]]:
                if reason_of_or_none(admission, "alice", body) is None:
                    admitted[body] += 1
    assert set(admitted.values()) == {1}
    fresh = [body in admitted for body in sent]
    assert fresh[:80] == [True] * 80
    assert fresh[80:160] == [False] * (NEW_LIFE - 1) + [True] * (80 - NEW_LIFE + 1)
    assert fresh[160:] == [True] * 80


def test_runs_of_forgotten_numbers_stay_few_and_exact_where_it_matters() -> None:
    history = SenderHistory()
    for life in range(10):
        for number in range(1000):
            history.forget(life * 10**9 + number)
    assert len(history.forgotten) <= MAX_RUNS
    assert all(history.has_forgotten(life * 10**9 + number) for life in range(10) for number in (0, 1, 500, 999))
    assert not any(history.has_forgotten(life * 10**9 + number) for life in range(10) for number in (-1, 1000, 5 * 10**8))
    for number in range(1000):
        history.forget(-(10**12) * (number + 1))
    assert len(history.forgotten) <= MAX_RUNS
    assert all(history.has_forgotten(-(10**12) * (number + 1)) for number in range(1000))


def test_staleness_is_counted_from_the_same_senders_newest_step() -> None:
    admission = cheap(staleness_steps=10)
    admission.admit("alice", body_of(1, step=500))
    admission.admit("bob", body_of(2, step=0))
    admission.admit("alice", body_of(3, step=490))
    assert reason_of(admission.admit, "alice", body_of(4, step=489)) == Reason.STALE
    assert admission.rejections == {"stale": 1}


def test_a_sender_restarted_from_an_old_checkpoint_is_taken_again_after_one_window() -> None:
    admission = cheap(staleness_steps=10, reorder_window=4)
    admission.admit("alice", body_of(1, step=500))
    outcomes = []
    for number in range(2, 9):
        try:
            admission.admit("alice", body_of(number, step=number))
            outcomes.append("admitted")
        except Rejected as rejected:
            outcomes.append(rejected.reason.value)
    assert outcomes == ["stale"] * 4 + ["admitted"] * 3


def test_a_task_that_the_swarm_does_not_train_on_is_unknown() -> None:
    assert reason_of(cheap().admit, "alice", body_of(1, task="gsm8k")) == Reason.UNKNOWN_TASK


def test_a_problem_must_be_the_one_that_its_sender_was_given() -> None:
    asked = []

    def assigned(sender: str, problem: ProblemRef, step: int) -> bool:
        asked.append((sender, problem, step))
        return problem.index == 1234

    admission = cheap(assigned=assigned)
    admission.admit("alice", body_of(1))
    assert reason_of(admission.admit, "alice", body_of(2, index=1235)) == Reason.NOT_ASSIGNED
    assert asked[0] == ("alice", ProblemRef("chain-sum:2", 7, 1234), 12)


def test_a_swarm_s_rules_assign_problems_of_its_own_stream_alone() -> None:
    index = assigned_index("alice", 12, 3, 7)
    for shared, owner, seed, good in [
        (False, "alice", 7, True),
        (False, "bob", 7, False),
        (False, "alice", 8, False),  # whoever may choose the stream may choose the problem
        (True, "alice", 7, False),
        (True, EVERYBODY, 7, True),
    ]:
        group = sample_group(step=12, sequence=1)
        problem = replace(group.problem, index=assigned_index(owner, 12, 3, 7) if shared else index, seed=seed)
        body = encode_group(replace(group, problem=problem))
        sender = "mallory" if shared else owner
        admission = AdmissionRules(("chain-sum:2",), 7, shared_problems=shared).build(Clock())
        if good:
            admission.admit(sender, body)
        else:
            assert reason_of(admission.admit, sender, body) == Reason.NOT_ASSIGNED


# -- messages


def test_messages_are_opened_and_what_is_ignored_is_counted_apart_from_what_is_refused() -> None:
    admission = cheap()
    assert admission.open(encode_message(GroupMessage(b"x"))) == GroupMessage(b"x")
    assert admission.open(msgpack.packb([0, "weather"])) == Ignored("unknown_kind")
    assert reason_of(admission.open, b"garbage") == Reason.BAD_ENCODING
    assert reason_of(admission.open, bytes(DEFAULT_LIMITS.message_bytes + 1)) == Reason.TOO_LARGE
    assert (admission.ignored, admission.rejections) == ({"unknown_kind": 1}, {"bad_encoding": 1, "too_large": 1})


def announce(body: bytes, tokens: int = 115) -> Announcement:
    return Announcement(digest(body), len(body), 4, tokens, "")


def test_a_known_body_or_one_over_quota_is_not_worth_pulling() -> None:
    admission = cheap(tokens_per_minute=200)
    admission.admit_announcement("alice", announce(body_of(1)))
    admission.admit("alice", body_of(1))
    assert reason_of(admission.admit_announcement, "bob", announce(body_of(1))) == Reason.DUPLICATE
    assert reason_of(admission.admit_announcement, "alice", announce(body_of(2))) == Reason.OVER_QUOTA
    admission.admit_announcement("bob", announce(body_of(2)))


def test_an_announced_size_is_held_against_the_bytes_that_are_left() -> None:
    admission = cheap(bytes_per_minute=2000)
    admission.admit_announcement("alice", Announcement(bytes(32), 2000, 4, 5, ""))
    assert reason_of(admission.admit_announcement, "alice", Announcement(bytes(32), 2001, 4, 5, "")) == Reason.OVER_QUOTA


def test_a_flood_of_announcements_is_over_quota() -> None:
    admission = cheap(groups_per_minute=5)
    for number in range(5):
        admission.admit_announcement("mallory", announce(bytes([number])))
    assert reason_of(admission.admit_announcement, "mallory", announce(b"6")) == Reason.OVER_QUOTA


# -- the full half


def test_a_prompt_other_than_the_regenerated_one_is_a_mismatch() -> None:
    assert reason_of(full().admit, "alice", body_of(1, prompt_hash=bytes(32))) == Reason.PROMPT_MISMATCH


@pytest.mark.parametrize("error", [TaskError("no such level"), IndexError("beyond the data"), OverflowError("too big")])
def test_a_reference_that_names_no_problem_is_unknown(error: Exception) -> None:
    def prompt_tokens(ref: ProblemRef) -> NDArray[np.int32]:
        raise error

    admission = FullAdmission(prompt_tokens=prompt_tokens, vocab_size=VOCAB, stop_ids={STOP})
    assert reason_of(admission.admit, "alice", body_of(1)) == Reason.UNKNOWN_TASK


def test_a_completion_longer_than_the_node_can_learn_from_is_too_large() -> None:
    def bounded(max_tokens: int) -> FullAdmission:
        return FullAdmission(prompt_tokens=lambda ref: PROMPT, vocab_size=VOCAB, stop_ids={STOP, 0}, max_tokens=max_tokens)

    longest = len(PROMPT) + 40
    bounded(longest).admit("alice", encode_group(sample_group()))
    admission = bounded(longest - 1)
    with pytest.raises(Rejected, match=f"completion 3 has 40 tokens after a prompt of {len(PROMPT)}, limit {longest - 1}") as caught:
        admission.admit("alice", encode_group(sample_group()))
    assert caught.value.reason == Reason.TOO_LARGE
    assert admission.rejections == {"too_large": 1}


def with_completion(tokens: list[int], finish: Finish) -> bytes:
    odd = Completion(np.array(tokens, np.int32), np.linspace(-1, -0.5, len(tokens), dtype=np.float32), finish)
    return encode_group(sample_group((3, 3), completions=(sample_completion(9), odd)))


@pytest.mark.parametrize(
    ("tokens", "finish", "good"),
    [
        ([5, 6, STOP], Finish.STOP, True),
        ([5, 6, 0], Finish.STOP, True),  # the second stop id
        ([STOP], Finish.STOP, True),
        ([5, 6, 7], Finish.LENGTH, True),
        ([VOCAB - 1, STOP], Finish.STOP, True),
        ([VOCAB, STOP], Finish.STOP, False),
        ([5, 6, 7], Finish.STOP, False),
        ([5, 6, STOP], Finish.LENGTH, False),
        ([5, STOP, 7], Finish.LENGTH, False),
        ([5, STOP, 0], Finish.STOP, False),
    ],
)
def test_stop_tokens_stand_at_the_end_and_agree_with_the_finish_reason(tokens: list[int], finish: Finish, good: bool) -> None:
    if good:
        full().admit("alice", with_completion(tokens, finish))
    else:
        assert reason_of(full().admit, "alice", with_completion(tokens, finish)) == Reason.BAD_TOKENS


def with_logprobs(change: Callable[[NDArray[np.float32]], Any], lengths: tuple[int, ...] = (20, 30)) -> Group:
    group = sample_group(lengths)
    return replace(group, completions=tuple(replace(c, logprobs=change(c.logprobs).astype(np.float32)) for c in group.completions))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda values: values + 3, "above 0"),
        (lambda values: np.where(np.arange(len(values)) == 4, -40, values), "below -35.8"),
        (lambda values: np.full_like(values, -0.75), "all 50 log-probs are -0.75"),
        (lambda values: np.zeros_like(values), "all 50 log-probs are 0"),
        (lambda values: values * 0.01 - 12, "mean of -log p is 12.* limit 11.8"),
    ],
)
def test_logprobs_that_no_sampling_gives_are_refused(change: Callable[[NDArray[np.float32]], Any], detail: str) -> None:
    with pytest.raises(Rejected, match=f"bad_logprobs: .*{detail}"):
        full().admit("alice", encode_group(with_logprobs(change)))


def test_logprobs_that_are_not_finite_are_refused() -> None:
    body = encode_group(with_logprobs(lambda values: np.where(np.arange(len(values)) == 3, -2.0, values)))
    # float16 -2.0 is 0xc000 and -inf is 0xfc00: only a hostile encoder writes it.
    for high in (b"\xfc", b"\xfe"):
        hostile = hostile_high_plane(body, high)
        assert reason_of(full().admit, "alice", hostile) == Reason.BAD_LOGPROBS


def hostile_high_plane(body: bytes, value: bytes) -> bytes:
    size = 3 + int.from_bytes(body[1:3], "little")
    fields = msgpack.unpackb(body[3:size])
    columns = body[size : len(body) - fields[18][-1]]
    fields[18][-1] = fields[15]
    header: bytes = msgpack.packb(fields)
    return body[:1] + len(header).to_bytes(2, "little") + header + columns + value * int(fields[15])


def test_honest_extremes_pass() -> None:
    sure = with_logprobs(lambda values: values * 1e-4)  # a converged policy
    unsure = with_logprobs(lambda values: values * 0.1 - np.log(VOCAB))  # nearly uniform
    short = with_logprobs(lambda values: np.full_like(values, -0.5), (2, 3))  # too few to judge
    for group in (sure, unsure, short):
        full().admit("alice", encode_group(group))


def test_most_completions_from_another_sender_make_a_copy_whatever_their_logprobs() -> None:
    admission, original = full(), sample_group()
    admission.admit("alice", encode_group(original))
    fresh = sample_group(seed=5).completions
    disguised = tuple(replace(c, logprobs=c.logprobs * np.float32(0.9)) for c in original.completions)
    copy = replace(original, sequence=1, completions=(*disguised[:3], fresh[3]))
    assert reason_of(admission.admit, "mallory", encode_group(copy)) == Reason.COPIED
    assert reason_of(admission.admit, "alice", encode_group(copy)) == Reason.DUPLICATE
    half = replace(copy, completions=(*original.completions[:2], *fresh[2:]))
    admission.admit("bob", encode_group(half))
    assert admission.rejections == {"copied": 1, "duplicate": 1}


def test_short_answers_may_coincide() -> None:
    admission, group = full(), sample_group((3, 4, 5, 15))
    admission.admit("alice", encode_group(group))
    admission.admit("bob", encode_group(replace(group, sequence=9)))


# -- memory


def test_one_sender_cannot_flush_the_digests_of_others_and_what_is_forgotten_is_told() -> None:
    told: list[tuple[str, int]] = []
    seen = SeenDigests(capacity=10, per_sender=4, senders=5, forgotten=lambda *body: told.append(body))
    seen.add("alice", b"alice", 7)
    for number in range(100):
        seen.add("mallory", bytes([number]), number)
    assert b"alice" in seen
    assert len(seen) == 5
    assert [bytes([number]) in seen for number in (95, 96, 99)] == [False, True, True]
    assert told == [("mallory", number) for number in range(96)]
    for number in range(6):
        seen.add(f"peer-{number}", bytes([200 + number]), number)
    assert b"alice" not in seen
    assert told[96:] == [("alice", 7)]


def test_a_flood_of_identities_and_groups_does_not_grow_memory() -> None:
    admission = cheap(senders=8, digests=64, digests_per_sender=8, reorder_window=4)
    bodies = [body_of(number) for number in range(100)]

    def flood(senders: range) -> None:
        for sender in senders:
            reason_of_or_none(admission, f"peer-{sender}", bodies[sender % 100])

    flood(range(1000))
    tracemalloc.start()
    flood(range(1000, 3000))
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 100_000


def reason_of_or_none(admission: CheapAdmission, sender: str, body: bytes) -> Reason | None:
    try:
        admission.admit(sender, body)
    except Rejected as rejected:
        return rejected.reason
    return None


# -- documentation


def test_every_reason_has_a_row_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "admission.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", text, flags=re.MULTILINE)
    assert sorted(rows) == sorted(reason.value for reason in Reason)


def test_the_documentation_says_which_reasons_are_never_raised() -> None:
    root = Path(__file__).parents[3]
    source = "".join(
        file.read_text(encoding="utf-8") for folder in ("swarm_node", "protocols/swarm_protocols") for file in (root / folder).rglob("*.py")
    )
    text = (root / "docs" / "admission.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| .*this version never raises it", text, flags=re.MULTILINE)
    assert documented == [reason.value for reason in Reason if f"Reason.{reason.name}" not in source]


def test_the_documentation_counts_the_slots_that_a_sender_chooses_among() -> None:
    text = (Path(__file__).parents[3] / "docs" / "admission.md").read_text(encoding="utf-8")
    assert f"among {MAX_SLOTS:,} slots" in text
