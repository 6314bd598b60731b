"""The published test vectors and the specification's example say what the codec does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swarm_protocols.codec import decode_group, digest, encode_group
from swarm_protocols.limits import DEFAULT_LIMITS
from swarm_protocols.messages import decode_message
from swarm_protocols.reject import Rejected

PROTOCOLS = Path(__file__).parents[2] / "protocols"


def load(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((PROTOCOLS / "vectors" / f"{name}.json").read_text(encoding="utf-8"))
    return vectors


@pytest.mark.parametrize("vector", load("groups"), ids=lambda vector: vector["name"])
def test_a_body_decodes_to_the_group_beside_it(vector: dict[str, Any]) -> None:
    body, expected = bytes.fromhex(vector["body"]), vector["group"]
    group = decode_group(body)
    assert digest(body).hex() == vector["digest"]
    assert vars(group.problem) == expected["problem"]
    assert vars(group.policy) == expected["policy"]
    assert (group.prompt_hash.hex(), group.created_at, group.sequence) == tuple(
        expected[name] for name in ("prompt_hash", "created_at", "sequence")
    )
    assert len(group.completions) == len(expected["completions"])
    for completion, wanted in zip(group.completions, expected["completions"], strict=True):
        assert completion.tokens.tolist() == wanted["tokens"]
        assert completion.logprobs.tobytes() == np.array([float.fromhex(value) for value in wanted["logprobs"]], np.float32).tobytes()
        assert completion.finish.name.lower() == wanted["finish"]
    again = decode_group(encode_group(group, vector["exact"]))
    assert [c.tokens.tolist() for c in again.completions] == [wanted["tokens"] for wanted in expected["completions"]]


def test_the_smallest_body_encodes_to_the_very_bytes() -> None:
    # No column of it is compressed, so its bytes do not depend on the version of zstd.
    body = bytes.fromhex(load("groups")[0]["body"])
    assert encode_group(decode_group(body)) == body


@pytest.mark.parametrize("vector", load("messages"), ids=lambda vector: vector["kind"])
def test_a_message_decodes_to_the_fields_beside_it(vector: dict[str, Any]) -> None:
    message = decode_message(bytes.fromhex(vector["message"]))
    assert type(message).__name__ == vector["kind"]
    fields = {name: value.hex() if isinstance(value, bytes) else value for name, value in vars(message).items()}
    assert json.loads(json.dumps(fields)) == vector["fields"]


@pytest.mark.parametrize("vector", load("refused"), ids=lambda vector: vector["name"])
def test_a_bad_body_is_refused_for_the_reason_beside_it(vector: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as caught:
        decode_group(bytes.fromhex(vector["body"]))
    assert caught.value.reason == vector["reason"]


def test_the_specifications_example_is_the_first_vector() -> None:
    text = (PROTOCOLS / "SPEC.md").read_text(encoding="utf-8")
    table = text[text.index("## Example") :]
    rows = re.findall(r"^\| (\d+) \| `([0-9a-f ]+)` \|", table, flags=re.MULTILINE)
    body = bytes.fromhex(load("groups")[0]["body"])
    assert bytes.fromhex("".join(row for _, row in rows)) == body
    starts = np.cumsum([0, *(len(bytes.fromhex(row)) for _, row in rows)])
    assert [int(start) for start, _ in rows] == starts[:-1].tolist()


def test_the_specification_names_the_limits_that_are_kept() -> None:
    text = (PROTOCOLS / "SPEC.md").read_text(encoding="utf-8")
    limits = DEFAULT_LIMITS
    for sentence in (
        f"| `group` | body (bytes, at most {limits.inline_bytes:,}) |",
        f"A body above {limits.inline_bytes:,} bytes is announced",
        f"at most {limits.tokens:,} |",
    ):
        assert sentence in text, sentence
