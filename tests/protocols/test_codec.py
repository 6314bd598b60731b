"""The group body: round trips, size, and everything that a hostile body may try."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_protocols.codec import BODY_VERSION, PRELUDE_BYTES, decode_group, decode_header, digest, encode_group
from swarm_protocols.group import Completion, Finish, Group
from swarm_protocols.limits import DEFAULT_LIMITS, Limits
from swarm_protocols.reject import Reason, Rejected

from tests.support.group_samples import VOCAB, same_content, sample_completion, sample_group

COMPLETIONS, TOKENS, COLUMNS = 14, 15, 18
"""Places in the header."""


def refused(body: bytes, limits: Limits = DEFAULT_LIMITS) -> Reason:
    with pytest.raises(Rejected) as caught:
        decode_group(body, limits)
    return caught.value.reason


def take_apart(body: bytes) -> tuple[list[Any], list[bytes]]:
    """Header fields and columns."""
    size = int.from_bytes(body[1:3], "little")
    fields = msgpack.unpackb(body[3 : 3 + size])
    cuts = np.cumsum([3 + size, *fields[COLUMNS]])
    return fields, [body[start:end] for start, end in itertools.pairwise(cuts)]


def put_together(fields: list[Any], columns: list[bytes], version: int = BODY_VERSION) -> bytes:
    header: bytes = msgpack.packb(fields)
    return bytes([version]) + len(header).to_bytes(2, "little") + header + b"".join(columns)


def with_column(number: int, column: bytes, body: bytes | None = None) -> bytes:
    """A valid body with one column replaced and its size declared truthfully."""
    fields, columns = take_apart(body or encode_group(sample_group()))
    columns[number] = column
    fields[COLUMNS][number] = len(column)
    return put_together(fields, columns)


def with_field(number: int, value: Any) -> bytes:
    fields, columns = take_apart(encode_group(sample_group()))
    fields[number] = value
    return put_together(fields, columns)


# -- round trips


def test_exact_is_true_to_the_bit() -> None:
    group = sample_group()
    assert same_content(decode_group(encode_group(group, exact=True)), group)


def test_float16_keeps_tokens_and_rounds_logprobs_to_the_nearest_float16() -> None:
    group = sample_group()
    decoded = decode_group(encode_group(group))
    expected = tuple(replace(c, logprobs=c.logprobs.astype(np.float16).astype(np.float32)) for c in group.completions)
    assert same_content(decoded, replace(group, completions=expected))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("vocab", [100, VOCAB, 200_000])
def test_a_body_we_made_encodes_again_to_the_same_bytes(exact: bool, vocab: int) -> None:
    body = encode_group(sample_group((1, 300, 77), vocab=vocab), exact)
    assert encode_group(decode_group(body), exact) == body


def test_ids_above_sixteen_bits_survive() -> None:
    completion = Completion(np.array([0, 65_536, 2**31 - 1, 3], np.int32), np.full(4, -0.5, np.float32), Finish.LENGTH)
    body = encode_group(sample_group((3, 3), completions=(completion, completion)))
    assert decode_header(body).token_width == 4
    assert decode_group(body).completions[0].tokens.tolist() == [0, 65_536, 2**31 - 1, 3]


def test_finish_reasons_keep_their_completions() -> None:
    completions = tuple(sample_completion(5 + n, n, finish=Finish.LENGTH if n % 2 else Finish.STOP) for n in range(5))
    decoded = decode_group(encode_group(sample_group((1,) * 5, completions=completions)))
    assert [(len(c), c.finish) for c in decoded.completions] == [(5, 0), (6, 1), (7, 0), (8, 1), (9, 0)]


def test_the_digest_is_sha256() -> None:
    assert digest(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# -- what a group costs


@pytest.mark.parametrize(("completions", "length"), [(8, 64), (16, 32), (4, 256), (16, 600)])
def test_a_group_takes_at_most_three_and_a_half_bytes_a_token(completions: int, length: int) -> None:
    spread = [max(1, length + (-1) ** n * n) for n in range(completions)]
    group = sample_group(spread)
    assert group.tokens >= 512 - completions
    assert len(encode_group(group)) / group.tokens <= 3.5


def test_float16_errs_at_most_half_a_percent_of_a_ratio_above_minus_eight() -> None:
    logprobs = -np.linspace(0, 8, 30_001, dtype=np.float32)[:-1]
    completion = Completion(np.full(30_000, 9, np.int32), logprobs, Finish.LENGTH)
    decoded = decode_group(encode_group(sample_group((3, 3), completions=(completion, completion)))).completions[0]
    errors = np.abs(np.expm1(decoded.logprobs.astype(np.float64) - logprobs.astype(np.float64)))
    assert 0.001 < errors.max() <= 0.005


# -- what encoding refuses, before peers would


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completions": ()}, "no completions"),
        ({"completions": (sample_completion(4),)}, "completions is 1, minimum 2"),
        ({"fingerprint": "00"}, "fingerprint has 1 bytes"),
        ({"prompt_hash": b"short"}, "prompt hash has 5 bytes"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": 1e-12}, "temperature is 1e-12, allowed 0.05 to 16.0"),
        ({"temperature": 0.0499}, "temperature is 0.0499"),
        ({"sequence": -1}, "sequence is -1"),
        ({"model": "x" * 129}, "model has 129 bytes, limit 128"),
        ({"group_size": 3}, "completions is 4"),
        (
            {"completions": (Completion(np.ones(3, np.int32), np.zeros(2, np.float32), Finish.STOP),) * 2},
            "3 tokens and 2 log-probs",
        ),
        ({"completions": (Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), Finish.STOP),) * 2}, "0 tokens"),
        ({"completions": (Completion(np.array([-1]), np.zeros(1, np.float32), Finish.STOP),) * 2}, "token ids span -1..-1"),
        ({"completions": (Completion(np.array([1]), np.array([np.nan], np.float32), Finish.STOP),) * 2}, "finite"),
    ],
)
def test_encoding_names_what_is_wrong_with_a_group(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_group(sample_group(**changes))


# -- hostile bodies: every field, every column


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: b"", Reason.BAD_ENCODING),
        (lambda body: body[:2], Reason.BAD_ENCODING),
        (lambda body: b"\x02" + body[1:], Reason.UNSUPPORTED_VERSION),
        (lambda body: body[:-1], Reason.BAD_ENCODING),
        (lambda body: body + b"\0", Reason.BAD_ENCODING),
        (lambda body: body[:1] + b"\xff\xff" + body[3:], Reason.TOO_LARGE),
        (lambda body: body[:1] + b"\xff\x03" + body[3:40], Reason.BAD_ENCODING),
        (lambda body: body + bytes(DEFAULT_LIMITS.body_bytes), Reason.TOO_LARGE),
        (lambda body: body[:PRELUDE_BYTES] + b"\xc1" + body[4:], Reason.BAD_ENCODING),
    ],
)
def test_a_broken_frame_is_refused(change: Callable[[bytes], bytes], reason: Reason) -> None:
    assert refused(change(encode_group(sample_group()))) == reason


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, b"chain-sum:2", Reason.BAD_SCHEMA),
        (0, "x" * 129, Reason.TOO_LARGE),
        (0, "é" * 65, Reason.TOO_LARGE),
        (0, "chain\x1b[2Jsum", Reason.BAD_SCHEMA),
        (1, -1, Reason.BAD_SCHEMA),
        (1, 2**63, Reason.BAD_SCHEMA),
        (2, 1.0, Reason.BAD_SCHEMA),
        (3, b"short", Reason.BAD_SCHEMA),
        (5, b"\0" * 9, Reason.BAD_SCHEMA),
        (6, True, Reason.BAD_SCHEMA),
        (10, float("nan"), Reason.BAD_SCHEMA),
        (10, 0.0, Reason.BAD_SCHEMA),
        (10, 1e9, Reason.BAD_SCHEMA),
        (10, 1, Reason.BAD_SCHEMA),
        (11, 65, Reason.TOO_LARGE),
        (11, 1, Reason.BAD_SCHEMA),
        (12, float("inf"), Reason.BAD_SCHEMA),
        (13, None, Reason.BAD_SCHEMA),
        (COMPLETIONS, 5, Reason.BAD_SCHEMA),
        (COMPLETIONS, 1, Reason.BAD_SCHEMA),
        (TOKENS, 2**40, Reason.TOO_LARGE),
        (TOKENS, 3, Reason.BAD_SCHEMA),
        (TOKENS, 114, Reason.BAD_ENCODING),
        (16, 3, Reason.BAD_SCHEMA),
        (17, 4, Reason.BAD_SCHEMA),
        (COLUMNS, [1, 2], Reason.BAD_SCHEMA),
        (COLUMNS, [0] * 19, Reason.TOO_LARGE),
        (COLUMNS, {}, Reason.BAD_SCHEMA),
        (COLUMNS, ["8"] * 5, Reason.BAD_SCHEMA),
    ],
)
def test_every_header_field_is_held_to_its_type_and_limit(place: int, value: Any, reason: Reason) -> None:
    assert refused(with_field(place, value)) == reason


def test_missing_and_additional_header_fields_are_refused() -> None:
    fields, columns = take_apart(encode_group(sample_group()))
    assert refused(put_together(fields[:-1], [])) == Reason.BAD_SCHEMA
    assert refused(put_together([*fields, 0], columns)) == Reason.BAD_SCHEMA


def test_a_header_in_another_than_the_canonical_form_is_refused() -> None:
    # The same number in nine bytes instead of one: the group would have a second digest.
    body = encode_group(sample_group())
    size = int.from_bytes(body[1:3], "little")
    header = body[3 : 3 + size]
    longer = header.replace(b"chain-sum:2\x07", b"chain-sum:2\xcf" + (7).to_bytes(8, "big"))
    assert len(longer) == size + 8
    assert refused(body[:1] + len(longer).to_bytes(2, "little") + longer + body[3 + size :]) == Reason.BAD_ENCODING


def test_lengths_must_add_up() -> None:
    def lengths(*values: int) -> bytes:
        return np.array(values, "<u2").tobytes()

    assert refused(with_column(0, lengths(20, 30, 25, 41))) == Reason.BAD_TOKENS
    assert refused(with_column(0, lengths(0, 50, 25, 40))) == Reason.BAD_TOKENS
    assert refused(with_column(0, lengths(20, 30, 25, 40)), replace(DEFAULT_LIMITS, tokens_per_completion=39)) == Reason.BAD_TOKENS
    assert decode_group(with_column(0, lengths(30, 20, 25, 40))).completions[0].tokens.shape == (30,)


def test_an_unknown_finish_reason_is_refused() -> None:
    assert refused(with_column(1, bytes([0, 1, 2, 0]))) == Reason.BAD_SCHEMA


def test_an_id_beyond_int32_is_refused() -> None:
    body = encode_group(
        sample_group(vocab=200_000, completions=(Completion(np.array([70_000, 1]), np.zeros(2, np.float32), Finish.LENGTH),) * 2)
    )
    assert refused(with_column(3, b"\xff" * 8, body)) == Reason.BAD_TOKENS


# -- bombs


def test_a_column_that_claims_or_holds_more_than_the_counts_imply_is_refused_without_allocating_it() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 * 1024 * 1024))
    body = encode_group(sample_group((20_000, 20_000)))
    tracemalloc.start()
    assert refused(with_column(2, bomb, body)) == Reason.BAD_ENCODING
    unsized = zstandard.ZstdCompressor(level=19, write_content_size=False).compress(bytes(1024 * 1024))
    assert refused(with_column(2, unsized, body)) == Reason.BAD_ENCODING
    # The frame's content size rewritten to what is expected: it still cannot unpack to more.
    forged = bytearray(zstandard.ZstdCompressor(level=19).compress(bytes(100_000)))
    at = bytes(forged).index((100_000).to_bytes(4, "little"))
    forged[at : at + 4] = (80_000).to_bytes(4, "little")
    assert refused(with_column(2, bytes(forged), body)) == Reason.BAD_ENCODING
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


def test_a_column_with_a_second_frame_or_a_tail_is_refused() -> None:
    body = encode_group(sample_group((20_000, 20_000)))
    frame = zstandard.ZstdCompressor(level=3).compress(bytes(80_000))
    assert decode_group(with_column(2, frame, body)).completions[0].tokens.max() == 0
    assert refused(with_column(2, frame + frame, body)) == Reason.BAD_ENCODING
    assert refused(with_column(2, frame + b"\0", body)) == Reason.BAD_ENCODING
    assert refused(with_column(2, frame[:-1], body)) == Reason.BAD_ENCODING


def test_declared_counts_are_judged_before_anything_is_unpacked() -> None:
    fields, columns = take_apart(encode_group(sample_group()))
    fields[TOKENS] = DEFAULT_LIMITS.tokens + 1
    fields[COMPLETIONS] = fields[11] = 64
    with pytest.raises(Rejected, match=r"too_large: tokens is 524289, limit 524288"):
        decode_header(put_together(fields, columns))


# -- fuzzing


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_never_do_more_than_be_refused(raw: bytes) -> None:
    for body in (raw, bytes([BODY_VERSION]) + raw, bytes([BODY_VERSION]) + min(len(raw), 255).to_bytes(2, "little") + raw):
        with pytest.raises(Rejected):
            decode_group(body)


VALID = [encode_group(sample_group()), encode_group(sample_group((200, 300), vocab=200_000), exact=True)]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 3))
def test_a_mutated_body_is_refused_or_a_group_within_limits(body: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    mutated = bytearray(body)
    for place, value in edits:
        mutated[place % len(mutated)] = value
    try:
        group = decode_group(bytes(mutated[: len(mutated) - cut]))
    except Rejected:
        return
    assert 2 <= len(group.completions) <= DEFAULT_LIMITS.completions
    assert group.tokens <= DEFAULT_LIMITS.tokens
    assert all(len(c.tokens) == len(c.logprobs) >= 1 and c.tokens.min() >= 0 for c in group.completions)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(0, 18), JSON, min_size=1, max_size=3))
def test_any_msgpack_in_any_header_field_is_refused_or_read(changes: dict[int, Any]) -> None:
    fields, columns = take_apart(VALID[0])
    for place, value in changes.items():
        fields[place] = value
    with suppress(Rejected):
        assert isinstance(decode_group(put_together(fields, columns)), Group)


lengths_of_groups = st.lists(st.integers(1, 60), min_size=2, max_size=8)


@settings(max_examples=60, deadline=None)
@given(lengths_of_groups, st.sampled_from([5, 256, VOCAB, 2**18]), st.booleans(), st.integers(0, 2**63 - 1))
def test_any_group_survives_the_round_trip(lengths: list[int], vocab: int, exact: bool, sequence: int) -> None:
    group = sample_group(lengths, seed=sequence % 97, vocab=vocab, sequence=sequence)
    body = encode_group(group, exact)
    decoded = decode_group(body)
    assert encode_group(decoded, exact) == body
    assert same_content(decode_group(encode_group(decoded, exact=True)), decoded)
    if exact:
        assert same_content(decoded, group)
