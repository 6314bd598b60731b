"""Ctrl-C, SIGTERM and a closed terminal as one exception, raised where it is safe.

A rollout on a slow machine lasts longer than the ten seconds in which a node must be gone, so the signal interrupts it. What must not
be torn (the optimiser step and the bookkeeping that belongs to it) runs between `hold` and `release`, where the signal waits.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Stopped(BaseException):
    """The user asked the node to stop. Not an `Exception`, so that no handler on the way mistakes it for an error."""


class Interrupt:
    """Installs the signal handlers of one process; use as a context manager, in the main thread."""

    def __init__(self) -> None:
        self.requested = False
        self._held = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to survive the terminal
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From here on a signal waits for `release`."""
        self._held = True

    def release(self) -> None:
        """Raise `Stopped` if a signal came in the meantime."""
        self._held = False
        if self.requested:
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A second signal while stopping is ignored: the checkpoint is being written, and it takes seconds.
        if self.requested:
            return
        self.requested = True
        if not self._held:
            raise Stopped
