"""Gossip messages: msgpack arrays whose first item is the protocol's minor version and whose second is the kind.

Majors never meet: they are part of the swarm id and so of the topic. A newer minor or an unknown kind is something that this node
is too old for, which is nobody's fault: it is ignored and counted, not rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from swarm_protocols.limits import DEFAULT_LIMITS, Limits
from swarm_protocols.packing import pack, unpack
from swarm_protocols.reject import Reason, Rejected

PROTOCOL_MAJOR = 1
"""Part of the topic and of the swarm id: nodes of different majors are in different swarms."""
PROTOCOL_MINOR = 0
"""First item of every message: grows with every addition that older nodes may ignore."""


@dataclass(frozen=True)
class GroupMessage:
    """A group whose body fits into the message."""

    body: bytes


@dataclass(frozen=True)
class Announcement:
    """A group too large for gossip: who wants it pulls it by digest, knowing its size beforehand."""

    digest: bytes
    """SHA-256 of the body, 32 bytes."""
    size: int
    """Bytes of the body."""
    completions: int
    tokens: int
    policy: str
    """The sender's policy in a few words, for display."""


@dataclass(frozen=True)
class Hello:
    """What a node is and wants; sent on joining and from time to time."""

    step: int
    policy: str
    wants: tuple[str, ...] = ()
    """Names of the tasks whose groups it can use."""


@dataclass(frozen=True)
class Ignored:
    """A well-formed message that this node is too old for."""

    why: str
    """Stable and bounded, so that it may name a counter: `newer_minor` or `unknown_kind`."""


Message = GroupMessage | Announcement | Hello

_KINDS: dict[type[Message], str] = {GroupMessage: "group", Announcement: "announce", Hello: "hello"}


def encode_message(message: Message) -> bytes:
    """The message's bytes, in canonical msgpack."""
    head = [PROTOCOL_MINOR, _KINDS[type(message)]]
    match message:
        case GroupMessage(body):
            return pack([*head, body])
        case Announcement(digest, size, completions, tokens, policy):
            return pack([*head, digest, size, completions, tokens, policy])
        case Hello(step, policy, wants):
            return pack([*head, step, policy, list(wants)])


def decode_message(raw: bytes, limits: Limits = DEFAULT_LIMITS) -> Message | Ignored:
    """Read a message without trusting any of it. A body inside is not looked into.

    Raises:
        Rejected: `too_large`, `bad_encoding` or `bad_schema`.
    """
    if len(raw) > limits.message_bytes:
        raise Rejected(Reason.TOO_LARGE, f"message has {len(raw)} bytes, limit {limits.message_bytes}")
    minor, kind = _read_head(raw)
    if minor > PROTOCOL_MINOR:
        return Ignored("newer_minor")
    if kind not in _KINDS.values():
        return Ignored("unknown_kind")
    fields = unpack(raw, max_array=64)
    fields.natural("minor version")
    fields.text("kind", max_bytes=limits.text_bytes)
    message: Message
    match kind:
        case "group":
            message = GroupMessage(body=fields.binary("body", max_bytes=limits.inline_bytes))
        case "announce":
            message = Announcement(
                digest=fields.binary("digest", size=32),
                size=fields.natural("size", low=1, high=limits.body_bytes, over=Reason.TOO_LARGE),
                completions=fields.natural("completions", low=limits.completions_min, high=limits.completions, over=Reason.TOO_LARGE),
                tokens=fields.natural("tokens", low=1, high=limits.tokens, over=Reason.TOO_LARGE),
                policy=fields.text("policy", max_bytes=limits.summary_bytes),
            )
        case _:
            step = fields.natural("step")
            policy = fields.text("policy", max_bytes=limits.summary_bytes)
            wants = fields.array("wants", max_items=limits.wants)
            message = Hello(
                step=step, policy=policy, wants=tuple(wants.text("wanted task", max_bytes=limits.text_bytes) for _ in range(len(wants)))
            )
    fields.end()
    return message


def _read_head(raw: bytes) -> tuple[int, str]:
    """Minor version and kind, whatever follows: newer messages may hold types and lengths that this node does not know."""
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=len(raw) or 1, max_str_len=64, max_bin_len=0, max_array_len=0, max_map_len=0)
    unpacker.feed(raw)
    try:
        items = unpacker.read_array_header()
        if items < 2:
            raise Rejected(Reason.BAD_SCHEMA, f"{items} fields, at least 2 expected")
        minor, kind = unpacker.unpack(), unpacker.unpack()
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.OutOfData) as error:
        raise Rejected(Reason.BAD_ENCODING, f"no msgpack array: {type(error).__name__}") from None
    if type(minor) is not int or minor < 0 or type(kind) is not str:
        raise Rejected(Reason.BAD_SCHEMA, f"minor version {minor!r}, kind {kind!r}"[:128])
    return minor, kind
