"""Why a group was refused: stable names that counters, logs and documentation share."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One word a check; `docs/admission.md` says for each what causes it and what the sender should do."""

    TOO_LARGE = "too_large"
    BAD_ENCODING = "bad_encoding"
    BAD_SCHEMA = "bad_schema"
    UNSUPPORTED_VERSION = "unsupported_version"
    OVER_QUOTA = "over_quota"
    REPLAY = "replay"
    DUPLICATE = "duplicate"
    STALE = "stale"
    UNKNOWN_TASK = "unknown_task"
    PROMPT_MISMATCH = "prompt_mismatch"
    NOT_ASSIGNED = "not_assigned"
    BAD_TOKENS = "bad_tokens"
    BAD_LOGPROBS = "bad_logprobs"
    COPIED = "copied"
    IMPLAUSIBLE = "implausible"


class Rejected(Exception):
    """A message from a peer was refused. `reason` is counted; `detail` names the value and the limit."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
