"""Write the test vectors beside this file: `python protocols/vectors/make.py`.

Bodies differ between versions of zstd where a column is compressed, so vectors are made once and kept: run this only when the format
changes. Log-probs are written as hexadecimal floats, which are exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from swarm_protocols.codec import decode_group, digest, encode_group
from swarm_protocols.group import Completion, Finish, Group, PolicyTag, ProblemRef, hash_prompt
from swarm_protocols.messages import Announcement, GroupMessage, Hello, Ignored, Message, decode_message, encode_message
from swarm_protocols.reject import Rejected

HERE = Path(__file__).parent
PROMPT = np.array([1, 17, 300, 5], dtype=np.int32)


def make_group(completions: list[tuple[list[int], list[float], Finish]], **policy: Any) -> Group:
    """A group of (ids, log-probs, finish) completions with fixed header fields; `policy` overrides those of its tag."""
    tag = {"model": "tiny-s", "fingerprint": "0123456789abcdef", "step": 12, "engine": "reference", "dtype": "float32", "sparse_budget": 0}
    return Group(
        problem=ProblemRef("chain-sum:2", 7, 1234),
        prompt_hash=hash_prompt(PROMPT),
        policy=PolicyTag(**{**tag, "temperature": 1.0, "group_size": len(completions), **policy}),
        created_at=1_790_000_000.25,
        sequence=1_790_000_000_000_000_000,
        completions=tuple(
            Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), finish) for tokens, logprobs, finish in completions
        ),
    )


def long_group(ids: int, size: int) -> Group:
    """Ids and log-probs by plain arithmetic, so that any language can make them again."""
    completions = []
    for number in range(size):
        length = 120 + number
        tokens = [(number + place * place) % ids for place in range(length)]
        logprobs = [-((7 * place + number) % 40) / 64 for place in range(length)]
        completions.append((tokens, logprobs, Finish.LENGTH))
    return make_group(completions, model="some model", sparse_budget=29, temperature=0.75)


def describe(group: Group) -> dict[str, Any]:
    """A group as JSON: bytes in hexadecimal, log-probs as hexadecimal floats."""
    return {
        "problem": vars(group.problem),
        "prompt_hash": group.prompt_hash.hex(),
        "policy": vars(group.policy),
        "created_at": group.created_at,
        "sequence": group.sequence,
        "completions": [
            {"tokens": c.tokens.tolist(), "logprobs": [float(value).hex() for value in c.logprobs], "finish": c.finish.name.lower()}
            for c in group.completions
        ],
    }


def group_vector(name: str, group: Group, exact: bool = False) -> dict[str, Any]:
    """A body, its digest, and the group that a reader must get out of it: with float16 log-probs unless `exact`."""
    body = encode_group(group, exact)
    return {"name": name, "exact": exact, "digest": digest(body).hex(), "body": body.hex(), "group": describe(decode_group(body))}


def message_vector(message: Message) -> dict[str, Any]:
    """A message and its fields, bytes in hexadecimal."""
    fields = {name: value.hex() if isinstance(value, bytes) else value for name, value in vars(message).items()}
    return {"message": encode_message(message).hex(), "kind": type(message).__name__, "fields": fields}


def ignored_vector(fields: list[Any]) -> dict[str, Any]:
    """A message that a reader must take for well-formed and ignore."""
    raw = msgpack.packb(fields)
    ignored = decode_message(raw)
    assert isinstance(ignored, Ignored)
    return {"message": raw.hex(), "kind": "Ignored", "fields": vars(ignored)}


def refused_vector(name: str, body: bytes) -> dict[str, Any]:
    """A body and the reason that a reader must refuse it for. Raises AssertionError when it is not refused."""
    try:
        decode_group(body)
    except Rejected as rejected:
        return {"name": name, "body": body.hex(), "reason": rejected.reason.value}
    raise AssertionError(f"{name} is not refused")


def main() -> None:
    """Write groups.json, messages.json and refused.json."""
    smallest = make_group([([5, 2], [-0.5, -0.25], Finish.STOP), ([7], [-1.0], Finish.LENGTH)])
    body = encode_group(smallest)
    wide = make_group([([70_000, 2], [-0.1, -1e-7], Finish.STOP), ([2**31 - 1, 65_536, 3], [-8.3, -0.0, -30.0], Finish.LENGTH)])
    vectors = {
        "groups": [
            group_vector("smallest: no column is compressed", smallest),
            group_vector("compressed columns, 16-bit ids, float16", long_group(1000, 4)),
            group_vector("compressed columns, 32-bit ids, float32", long_group(100_000, 3), exact=True),
            group_vector("ids beyond 16 bits, float32", wide, exact=True),
        ],
        "messages": [
            message_vector(GroupMessage(b"body")),
            message_vector(Announcement(bytes(range(32)), 300_000, 8, 90_000, "tiny-s at step 3")),
            message_vector(Hello(7, "tiny-s", ("chain-sum:2", "gsm8k"))),
            ignored_vector([0, "weather", {"wind": 3}]),
            ignored_vector([1, "group", b"", None]),
        ],
        "refused": [
            refused_vector("empty", b""),
            refused_vector("another body version", b"\x02" + body[1:]),
            refused_vector("last byte missing", body[:-1]),
            refused_vector("a byte too many", body + b"\0"),
            refused_vector("header longer than the limit", body[:1] + b"\x01\x04" + body[3:]),
            refused_vector("a number longer than needed", lengthen(body)),
            refused_vector("temperature 0", body.replace(msgpack.packb(1.0), msgpack.packb(0.0))),
            refused_vector("lengths that do not add up", body.replace(b"\x02\x00\x01\x00\x00\x01", b"\x02\x00\x02\x00\x00\x01")),
            refused_vector("an unknown finish reason", body.replace(b"\x02\x00\x01\x00\x00\x01", b"\x02\x00\x01\x00\x00\x02")),
        ],
    }
    for name, items in vectors.items():
        (HERE / f"{name}.json").write_text(json.dumps(items, indent=1) + "\n", encoding="utf-8")


def lengthen(body: bytes) -> bytes:
    """The problem seed 7 in two bytes instead of one."""
    size = int.from_bytes(body[1:3], "little")
    return body[:1] + (size + 1).to_bytes(2, "little") + body[3:].replace(b"chain-sum:2\x07", b"chain-sum:2\xcc\x07")


if __name__ == "__main__":
    main()
