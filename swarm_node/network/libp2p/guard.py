"""A peer's bytes may raise anything inside libp2p; the guard confines it to that peer and counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType

Listener = Callable[[str, str], None]


class PeerGuard:
    """Shared by everything that handles bytes of peers in this process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Where -> errors that were confined."""
        self.latest = ""
        """The latest one, in words."""
        self.on_error: Listener = lambda where, peer: None
        """Called with where and whose bytes raised; the peer is empty when nobody can tell."""
        self.is_breakage: Callable[[BaseException], bool] = lambda error: False
        """Whether an error says that a connection ended, which is nobody's fault: confined as well, but not counted."""

    def watch(self, where: str, peer: str = "") -> Watch:
        """A context in which an error ends the context and nothing else."""
        return Watch(self, where, peer)

    def confine(self, error: BaseException, where: str, peer: str) -> BaseException | None:
        """Count an error; what is left of it must be raised: a cancellation, an interrupt, or the exit of the process."""
        confined: BaseException | None
        rest: BaseException | None
        if isinstance(error, BaseExceptionGroup):
            confined, rest = error.split(Exception)
        else:
            confined = error if isinstance(error, Exception) else None
            rest = None if confined is not None else error
        if confined is not None and not self._is_breakage(confined):
            self.counts[where] += 1
            self.latest = f"{where}: {_describe(confined)}"
            self.on_error(where, peer)
        return rest

    def _is_breakage(self, error: BaseException) -> bool:
        if isinstance(error, BaseExceptionGroup):
            return all(self._is_breakage(part) for part in error.exceptions)
        return self.is_breakage(error)


class Watch:
    """Swallows what its body raises, cancellation excepted."""

    def __init__(self, guard: PeerGuard, where: str, peer: str) -> None:
        self._guard = guard
        self._where = where
        self._peer = peer
        self.failed = False

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            return False
        rest = self._guard.confine(error, self._where, self._peer)
        self.failed = rest is not error
        if rest is None:
            return True
        if rest is not error:
            raise rest
        return False


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:300]
