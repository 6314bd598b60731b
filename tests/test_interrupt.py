"""Signals as one exception: at once where it is safe, later where something must not be torn, once in all."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from swarm_node.interrupt import Interrupt, Stopped

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_at_once(number: signal.Signals) -> None:
    with pytest.raises(Stopped), Interrupt():
        signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_held_a_signal_waits_for_the_release(number: signal.Signals) -> None:
    with Interrupt() as interrupt:
        interrupt.hold()
        signal.raise_signal(number)
        with pytest.raises(Stopped):
            interrupt.release()


def test_without_a_signal_a_release_goes_on_and_the_next_signal_stops_at_once() -> None:
    with Interrupt() as interrupt:
        interrupt.hold()
        interrupt.release()
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the second one, while the checkpoint is written


def test_nohup_keeps_a_node_and_what_was_before_comes_back() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert not interrupt.requested
    assert [signal.getsignal(number) for number in SIGNALS] == before
