"""A group as bytes: one msgpack header, then columns for all completions together. `protocols/SPEC.md` describes every byte.

    version (1 byte) | header length (2 bytes, little-endian) | header (msgpack array) | columns

Decoding never trusts a size: every declared count is held against `Limits` before anything of that size exists, and a column
decompresses to exactly the size that the counts imply, or not at all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from swarm_protocols.group import Completion, Finish, Group, PolicyTag, ProblemRef
from swarm_protocols.limits import DEFAULT_LIMITS, Limits
from swarm_protocols.packing import Fields, pack, unpack
from swarm_protocols.reject import Reason, Rejected

BODY_VERSION = 1
PRELUDE_BYTES = 3
_LEVEL = 15
_WINDOW_BYTES = 8 * 1024 * 1024
_HASH_BYTES = 32
_FINGERPRINT_BYTES = 8


@dataclass(frozen=True)
class Header:
    """Everything that a body declares before its columns."""

    problem: ProblemRef
    prompt_hash: bytes
    policy: PolicyTag
    created_at: float
    sequence: int
    completions: int
    tokens: int
    token_width: int
    """Bytes of a token id: 2 or 4."""
    logprob_width: int
    """Bytes of a log-prob: 2 (float16) or 4 (float32)."""
    stored: tuple[int, ...]
    """Bytes of each column as it travels."""
    size: int
    """Bytes before the first column."""

    @property
    def plain(self) -> tuple[int, ...]:
        """Bytes of each column when unpacked: lengths, finish reasons, halves of token ids, byte planes of log-probs."""
        halves, planes = self.token_width // 2, self.logprob_width
        return (2 * self.completions, self.completions, *([2 * self.tokens] * halves), *([self.tokens] * planes))


def digest(body: bytes) -> bytes:
    """SHA-256 of a body: its name in announcements and pulls, 32 bytes."""
    return hashlib.sha256(body).digest()


def encode_group(group: Group, exact: bool = False, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The group's body. With `exact` log-probs travel as float32, otherwise as float16 (0.4 % of a ratio at most, above -8).

    Raises:
        ValueError: the group is malformed or would break a limit that receivers hold it to; the message names both.
    """
    for number, completion in enumerate(group.completions):
        if not 1 <= len(completion.tokens) == len(completion.logprobs):
            raise ValueError(f"completion {number} has {len(completion.tokens)} tokens and {len(completion.logprobs)} log-probs")
        if len(completion) > limits.tokens_per_completion:
            raise ValueError(f"completion {number} has {len(completion)} tokens, limit {limits.tokens_per_completion}")
    if not group.completions:
        raise ValueError("the group has no completions")
    tokens = np.concatenate([np.asarray(completion.tokens) for completion in group.completions])
    logprobs = np.concatenate([np.asarray(completion.logprobs, dtype=np.float32) for completion in group.completions])
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise ValueError(f"token ids span {tokens.min()}..{tokens.max()}, allowed 0..{2**31 - 1}")
    if not np.isfinite(logprobs).all() or np.abs(logprobs).max() > float(np.finfo(np.float16).max):
        raise ValueError("log-probs must be finite and above -65504")
    token_width = 2 if tokens.max() < 2**16 else 4
    lengths = np.array([len(completion) for completion in group.completions], dtype="<u2")
    columns = [
        lengths.tobytes(),
        bytes(int(completion.finish) for completion in group.completions),
        # Completions of one prompt share phrases: 16-bit ids stay together, so that whole phrases are found again. Log-probs repeat
        # nothing but their high bytes. Measured on rollouts of SmolLM2-135M: 1.07 + 1.81 bytes a token; the other way 1.22 + 1.96.
        *_split(tokens.astype(f"<u{token_width}"), 2),
        *_split(logprobs.astype("<f4" if exact else "<f2"), 1),
    ]
    stored = [_shrink(column) for column in columns]
    header = pack(
        [
            group.problem.task,
            group.problem.seed,
            group.problem.index,
            group.prompt_hash,
            group.policy.model,
            bytes.fromhex(group.policy.fingerprint),
            group.policy.step,
            group.policy.engine,
            group.policy.dtype,
            group.policy.sparse_budget,
            float(group.policy.temperature),
            group.policy.group_size,
            float(group.created_at),
            group.sequence,
            len(group.completions),
            len(tokens),
            token_width,
            4 if exact else 2,
            [len(column) for column in stored],
        ]
    )
    body = b"".join([bytes([BODY_VERSION]), len(header).to_bytes(2, "little"), header, *stored])
    try:
        decode_header(body, limits)
    except Rejected as rejected:
        raise ValueError(f"peers would refuse this group: {rejected}") from None
    return body


def decode_header(body: bytes, limits: Limits = DEFAULT_LIMITS) -> Header:
    """Read and check everything but the columns' content: cheap, and enough for quotas, replay and assignment.

    Raises:
        Rejected: `too_large`, `bad_encoding`, `unsupported_version` or `bad_schema`.
    """
    if len(body) > limits.body_bytes:
        raise Rejected(Reason.TOO_LARGE, f"body has {len(body)} bytes, limit {limits.body_bytes}")
    if len(body) < PRELUDE_BYTES:
        raise Rejected(Reason.BAD_ENCODING, f"body has {len(body)} bytes, at least {PRELUDE_BYTES} expected")
    if body[0] != BODY_VERSION:
        raise Rejected(Reason.UNSUPPORTED_VERSION, f"body version {body[0]}, this node reads {BODY_VERSION}")
    header_bytes = int.from_bytes(body[1:PRELUDE_BYTES], "little")
    if header_bytes > limits.header_bytes:
        raise Rejected(Reason.TOO_LARGE, f"header has {header_bytes} bytes, limit {limits.header_bytes}")
    size = PRELUDE_BYTES + header_bytes
    if size > len(body):
        raise Rejected(Reason.BAD_ENCODING, f"header of {header_bytes} bytes in a body of {len(body)}")
    header = _read_header(unpack(bytes(body[PRELUDE_BYTES:size]), max_array=32), size, limits)
    if size + sum(header.stored) != len(body):
        raise Rejected(Reason.BAD_ENCODING, f"columns declare {sum(header.stored)} bytes, {len(body) - size} follow the header")
    for number, (stored, plain) in enumerate(zip(header.stored, header.plain, strict=True)):
        if stored > plain:
            raise Rejected(Reason.BAD_ENCODING, f"column {number} travels as {stored} bytes for {plain}")
    return header


def decode_group(body: bytes, limits: Limits = DEFAULT_LIMITS) -> Group:
    """The group in a body. Its values are what the sender wrote: whether they make sense is admission's question.

    Raises:
        Rejected: as `decode_header`, and `bad_tokens` for lengths or ids that no group has.
    """
    header = decode_header(body, limits)
    columns = []
    start = header.size
    for number, (stored, plain) in enumerate(zip(header.stored, header.plain, strict=True)):
        columns.append(_expand(body[start : start + stored], plain, number))
        start += stored
    lengths = np.frombuffer(columns[0], dtype="<u2").astype(np.int64)
    if lengths.min() < 1 or lengths.max() > limits.tokens_per_completion or lengths.sum() != header.tokens:
        raise Rejected(
            Reason.BAD_TOKENS,
            f"lengths {lengths.min()}..{lengths.max()} with sum {lengths.sum()}: expected 1..{limits.tokens_per_completion}"
            f" with sum {header.tokens}",
        )
    if max(columns[1]) > max(Finish):
        raise Rejected(Reason.BAD_SCHEMA, f"finish reason {max(columns[1])} is unknown")
    halves, planes = columns[2 : 2 + header.token_width // 2], columns[2 + header.token_width // 2 :]
    tokens = _join(halves, f"<u{header.token_width}", 2)
    if tokens.max() >= 2**31:
        raise Rejected(Reason.BAD_TOKENS, f"token id {tokens.max()}")
    tokens = tokens.astype(np.int32)
    with np.errstate(invalid="ignore"):  # a hostile NaN is admission's to refuse
        logprobs = _join(planes, f"<f{header.logprob_width}", 1).astype(np.float32)
    cuts = np.cumsum(lengths)[:-1]
    completions = tuple(
        Completion(tokens=ids, logprobs=values, finish=Finish(reason))
        for ids, values, reason in zip(np.split(tokens, cuts), np.split(logprobs, cuts), columns[1], strict=True)
    )
    return Group(
        problem=header.problem,
        prompt_hash=header.prompt_hash,
        policy=header.policy,
        created_at=header.created_at,
        sequence=header.sequence,
        completions=completions,
    )


def _read_header(fields: Fields, size: int, limits: Limits) -> Header:
    problem = ProblemRef(
        task=fields.text("task", max_bytes=limits.text_bytes), seed=fields.natural("problem seed"), index=fields.natural("problem index")
    )
    prompt_hash = fields.binary("prompt hash", size=_HASH_BYTES)
    policy = PolicyTag(
        model=fields.text("model", max_bytes=limits.text_bytes),
        fingerprint=fields.binary("fingerprint", size=_FINGERPRINT_BYTES).hex(),
        step=fields.natural("step"),
        engine=fields.text("engine", max_bytes=limits.text_bytes),
        dtype=fields.text("dtype", max_bytes=limits.text_bytes),
        sparse_budget=fields.natural("sparse budget"),
        temperature=fields.real("temperature"),
        group_size=fields.natural("group size", low=limits.completions_min, high=limits.completions, over=Reason.TOO_LARGE),
    )
    if not limits.temperature_min <= policy.temperature <= limits.temperature:
        allowed = f"{limits.temperature_min} to {limits.temperature}"
        raise Rejected(Reason.BAD_SCHEMA, f"temperature is {policy.temperature}, allowed {allowed}")
    created_at = fields.real("created at")
    sequence = fields.natural("sequence")
    completions = fields.natural("completions", low=limits.completions_min, high=policy.group_size)
    # One token a completion at least, and no more than a completion may have: the sum cannot lie outside.
    most = min(limits.tokens, completions * limits.tokens_per_completion)
    tokens = fields.natural("tokens", low=completions, high=most, over=Reason.TOO_LARGE)
    widths = token_width, logprob_width = fields.natural("token width"), fields.natural("log-prob width")
    if not set(widths) <= {2, 4}:
        raise Rejected(Reason.BAD_SCHEMA, f"widths of token ids and log-probs are {widths}, allowed 2 and 4")
    expected = 2 + token_width // 2 + logprob_width
    columns = fields.array("columns", max_items=expected)
    if len(columns) != expected:
        raise Rejected(Reason.BAD_SCHEMA, f"{len(columns)} columns, expected {expected}")
    stored = tuple(columns.natural(f"size of column {number}") for number in range(len(columns)))
    fields.end()
    return Header(problem, prompt_hash, policy, created_at, sequence, completions, tokens, *widths, stored, size)


def _split(values: NDArray[np.generic], part: int) -> list[bytes]:
    """A little-endian column cut into columns of `part` bytes an item, the least significant first."""
    parts = values.view(np.uint8).reshape(len(values), -1, part).transpose(1, 0, 2)
    return [column.tobytes() for column in parts]


def _join(columns: list[bytes], dtype: str, part: int) -> NDArray[np.generic]:
    parts = np.frombuffer(b"".join(columns), dtype=np.uint8).reshape(len(columns), -1, part).transpose(1, 0, 2)
    return np.ascontiguousarray(parts).reshape(-1).view(dtype)


def _shrink(column: bytes) -> bytes:
    """A zstd frame where that is shorter than the column itself, else the column: the receiver tells them apart by length."""
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False).compress(column)
    return frame if len(frame) < len(column) else column


def _expand(stored: bytes, plain: int, number: int) -> bytes:
    if len(stored) == plain:
        return stored
    try:
        declared = zstandard.get_frame_parameters(stored).content_size
        if declared != plain:
            raise Rejected(Reason.BAD_ENCODING, f"column {number} unpacks to {declared} bytes, expected {plain}")
        column = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompress(stored, max_output_size=plain, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Rejected(Reason.BAD_ENCODING, f"column {number}: {error}") from None
    if len(column) != plain:
        raise Rejected(Reason.BAD_ENCODING, f"column {number} unpacked to {len(column)} bytes, expected {plain}")
    return column
