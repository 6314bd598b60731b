"""Waiting for events. No test looks at a clock; the limit only ends a hang, and is long enough for the slowest machine."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 600.0
"""Nothing here takes so long that does not hang."""


def await_condition(condition: Callable[[], object], what: str) -> None:
    """Return as soon as the condition holds; fail, naming it, when it seems that it never will."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"hangs, waiting until {what}"
        time.sleep(0.02)
