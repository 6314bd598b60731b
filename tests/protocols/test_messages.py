"""Gossip messages: what travels, and what older and newer nodes make of each other."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_protocols.limits import DEFAULT_LIMITS
from swarm_protocols.messages import (
    PROTOCOL_MINOR,
    Announcement,
    GroupMessage,
    Hello,
    Ignored,
    Message,
    decode_message,
    encode_message,
)
from swarm_protocols.reject import Reason, Rejected

DIGEST = bytes(range(32))
MESSAGES: list[Message] = [
    GroupMessage(b"body"),
    Announcement(DIGEST, 300_000, 8, 90_000, "tiny-s at step 3"),
    Hello(7, "tiny-s", ("chain-sum:2", "gsm8k")),
    Hello(0, ""),
]


def refused(raw: bytes) -> Reason:
    with pytest.raises(Rejected) as caught:
        decode_message(raw)
    return caught.value.reason


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_a_message_is_an_array_that_starts_with_minor_and_kind() -> None:
    assert encode_message(GroupMessage(b"ab")).hex() == "9300a567726f7570c4026162"
    assert [msgpack.unpackb(encode_message(message))[:2] for message in MESSAGES[:3]] == [[0, "group"], [0, "announce"], [0, "hello"]]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([PROTOCOL_MINOR, "weather", {"wind": 3}, [1] * 1000], "unknown_kind"),
        ([PROTOCOL_MINOR + 1, "group", b"body", {"new": True}], "newer_minor"),
        ([PROTOCOL_MINOR + 9, "weather", msgpack.ExtType(5, b"x")], "newer_minor"),
    ],
)
def test_what_this_node_is_too_old_for_is_ignored_without_fault(fields: list[Any], why: str) -> None:
    assert decode_message(msgpack.packb(fields)) == Ignored(why)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([0], Reason.BAD_SCHEMA),
        ([-1, "group", b""], Reason.BAD_SCHEMA),
        (["0", "group", b""], Reason.BAD_SCHEMA),
        ([False, "group", b""], Reason.BAD_SCHEMA),
        ([0, 7, b""], Reason.BAD_SCHEMA),
        ([0, "group"], Reason.BAD_SCHEMA),
        ([0, "group", "text"], Reason.BAD_SCHEMA),
        ([0, "group", b"", 1], Reason.BAD_SCHEMA),
        ([0, "group", bytes(DEFAULT_LIMITS.inline_bytes + 1)], Reason.TOO_LARGE),
        ([0, "group", bytes(DEFAULT_LIMITS.message_bytes + 1)], Reason.TOO_LARGE),
        ([0, "announce", DIGEST[:31], 10, 2, 5, ""], Reason.BAD_SCHEMA),
        ([0, "announce", DIGEST, 0, 2, 5, ""], Reason.BAD_SCHEMA),
        ([0, "announce", DIGEST, 2**40, 2, 5, ""], Reason.TOO_LARGE),
        ([0, "announce", DIGEST, 10, 1, 5, ""], Reason.BAD_SCHEMA),
        ([0, "announce", DIGEST, 10, 65, 5, ""], Reason.TOO_LARGE),
        ([0, "announce", DIGEST, 10, 2, 2**40, ""], Reason.TOO_LARGE),
        ([0, "announce", DIGEST, 10, 2, 5, "x" * 257], Reason.TOO_LARGE),
        ([0, "hello", 1, "a\nb", []], Reason.BAD_SCHEMA),
        ([0, "hello", 1, "", ["a"] * 17], Reason.TOO_LARGE),
        ([0, "hello", 1, "", [["a"]]], Reason.BAD_SCHEMA),
        ([0, "hello", 1.5, "", []], Reason.BAD_SCHEMA),
    ],
)
def test_wrong_types_and_sizes_are_refused(fields: list[Any], reason: Reason) -> None:
    assert refused(msgpack.packb(fields)) == reason


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x93\x00",
        msgpack.packb({"kind": "group"}),
        b"\xdd\xff\xff\xff\xff\x00\xa5group",
        b"\x91" * 2000,
        encode_message(MESSAGES[0]) + b"\0",
        b"\x93\x00\xd9\x05group\xc4\x04body",
    ],
)
def test_what_is_not_one_canonical_array_is_refused(raw: bytes) -> None:
    assert refused(raw) in {Reason.BAD_ENCODING, Reason.BAD_SCHEMA}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([encode_message(message) for message in MESSAGES]),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 255)), max_size=4),
    st.binary(max_size=40),
)
def test_no_bytes_do_more_than_be_refused(raw: bytes, edits: list[tuple[int, int]], noise: bytes) -> None:
    mutated = bytearray(raw)
    for place, value in edits:
        mutated[place % len(mutated)] = value
    for candidate in (bytes(mutated), noise):
        try:
            message = decode_message(candidate)
        except Rejected:
            continue
        assert isinstance(message, Ignored) or encode_message(message) == candidate
