"""Child processes: frames cross whole, whoever dies is started again, nobody stays behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm_node.logs import QUIET
from swarm_node.network.children.frames import MAX_FRAME, Frame, FrameError, frame_length, pack_frame, read_frame, unpack_frame
from swarm_node.network.children.supervisor import Child
from tests.support.waiting import await_condition

ECHO = """
import subprocess, sys, socket
from swarm_node.network.children.child import adopt_parent
from swarm_node.network.children.frames import pack_frame, read_frame
connection = adopt_parent()
print("printed, not sent")
grandchild = subprocess.Popen(["sleep", "600"])
connection.sendall(pack_frame("grandchild", grandchild.pid))
while (frame := read_frame(connection)) is not None and frame[0] != "stop":
    if frame[0] == "crash":
        raise RuntimeError("the reason why")
    if frame[0] == "crash together":
        raise ExceptionGroup("at once", [RuntimeError("the reason why")])
    if frame[0] == "nonsense":
        connection.sendall(b"\\xff" * 100)
    if frame[0] != "deaf":
        connection.sendall(pack_frame("echo", *frame))
    else:
        import time; time.sleep(600)
"""


@contextmanager
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_frame: Callable[[Frame], None], **options: Any) -> Iterator[Child]:
    (tmp_path / "echoing_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    supervised = Child("echo", "echoing_child", on_frame, lambda: [pack_frame("hello", 1)], backoff_s=0.05, **options)
    supervised.start()
    try:
        yield supervised
    finally:
        supervised.close(timeout_s=1.0)


def test_frames_go_both_ways_and_the_opening_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Frame] = []
    body = bytes(range(256)) * 10_000
    with child(tmp_path, monkeypatch, frames.append) as supervised:
        supervised.send("body", body, ["a", {"b": 1.5}])
        await_condition(lambda: len(frames) >= 3, "both echoes")
    assert frames[1:] == [["echo", "hello", 1], ["echo", "body", body, ["a", {"b": 1.5}]]]


@pytest.mark.parametrize("crash", ["crash", "crash together"])
def test_a_crash_is_shown_and_the_process_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, crash: str
) -> None:
    frames: list[Frame] = []
    with child(tmp_path, monkeypatch, frames.append) as supervised:
        await_condition(lambda: ["echo", "hello", 1] in frames, "the first life")
        first = supervised.pid
        supervised.send(crash)
        await_condition(lambda: frames.count(["echo", "hello", 1]) == 2, "the second life gets its opening")
        assert supervised.restarts == 1
        assert supervised.pid != first
        assert any(line.endswith("RuntimeError: the reason why") for line in supervised.last_words)
        assert "the echo process ended (RuntimeError: the reason why); it starts again" in caplog.text
        told = [record for record in caplog.records if record.getMessage().startswith("echo | ")]
        assert len(told) == len(supervised.last_words)
        assert all(record.name.startswith(QUIET.name) for record in told), "a terminal is shown no traceback"
        assert supervised.trouble == ""


def test_whatever_a_child_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Frame] = []
    with child(tmp_path, monkeypatch, frames.append) as supervised:
        await_condition(lambda: ["echo", "hello", 1] in frames, "the first life")
        assert supervised.pid is not None
        os.kill(supervised.pid, signal.SIGKILL)
        await_condition(lambda: frames.count(["echo", "hello", 1]) == 2, "the second life")
        grandchildren = [frame[1] for frame in frames if frame[0] == "grandchild"]
        await_condition(lambda: not _alive(grandchildren[0]), "the first grandchild ended")
        assert _alive(grandchildren[1])
    await_condition(lambda: not _alive(grandchildren[1]), "the second grandchild ended")


def test_a_child_that_sends_nonsense_is_ended_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Frame] = []
    with child(tmp_path, monkeypatch, frames.append) as supervised:
        supervised.send("nonsense")
        await_condition(lambda: frames.count(["echo", "hello", 1]) == 2, "the second life")
        assert supervised.restarts == 1


def test_a_child_that_does_not_read_costs_bounded_memory_and_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Frame] = []
    with child(tmp_path, monkeypatch, frames.append, queue_bytes=1_000_000) as supervised:
        await_condition(lambda: ["echo", "hello", 1] in frames, "it runs")
        supervised.send("deaf")
        for _ in range(200):
            supervised.send("body", bytes(100_000))
        assert supervised.dropped >= 150
        deaf = supervised.pid
        assert deaf is not None
        supervised.close(timeout_s=0.5)
        await_condition(lambda: not _alive(deaf), "it ended")


def test_what_a_child_has_read_makes_room_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Frame] = []

    def is_echoed(number: int) -> bool:
        return any(frame[1:3] == ["body", number] for frame in frames)

    with child(tmp_path, monkeypatch, frames.append, queue_bytes=300_000) as supervised:
        for number in range(8):
            supervised.send("body", number, bytes(100_000))
            await_condition(partial(is_echoed, number), f"body {number} is echoed")
        for _ in range(2):  # together below the bound
            supervised.send("body", 8, bytes(100_000))
        assert supervised.dropped == 0


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    supervised = Child("missing", "swarm_node.no_such_module", lambda frame: None, list, backoff_s=30)
    supervised.start()
    try:
        await_condition(lambda: "no_such_module" in supervised.trouble, "the trouble says what is missing")
        assert "restarting in" in supervised.trouble
    finally:
        supervised.close(timeout_s=0.5)


class Pauses(threading.Event):
    """Set after five waits, which take no time and are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        if len(self.seconds) == 5:
            self.set()
        return self.is_set()


@pytest.mark.parametrize(("healthy_s", "pauses"), [(float("inf"), [0.5, 1.0, 2.0, 3.0, 3.0]), (0.0, [0.5] * 5)])
def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_healthy_life(
    monkeypatch: pytest.MonkeyPatch, healthy_s: float, pauses: list[float]
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    supervised = Child("idle", "swarm_node.no_such_module", lambda frame: None, list, backoff_s=0.5, backoff_max_s=3, healthy_s=healthy_s)
    monkeypatch.setattr(supervised, "_run_once", lambda: None)
    closing = Pauses()
    monkeypatch.setattr(supervised, "_closing", closing)
    supervised._supervise()
    assert closing.seconds == pauses
    assert supervised.restarts == 4


def test_closing_before_starting_is_allowed() -> None:
    Child("idle", "swarm_node.no_such_module", lambda frame: None, list).close()


def test_a_frame_is_bounded_and_checked() -> None:
    assert unpack_frame(pack_frame("kind", b"x", None)[4:]) == ["kind", b"x", None]
    with pytest.raises(FrameError, match="exceeds"):
        frame_length(b"\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="exceeds"):
        pack_frame("kind", bytes(MAX_FRAME))
    for nonsense in (b"", b"\xc1", b"\x90", b"\x91\x01", b"\x01\x02", b"\xd9"):
        with pytest.raises(FrameError):
            unpack_frame(nonsense)


def test_a_frame_arrives_whole_in_pieces_and_not_at_all_when_the_sender_dies() -> None:
    ours, theirs = socket.socketpair()
    packed = pack_frame("kind", bytes(300_000))

    def dribble() -> None:
        for start in range(0, len(packed), 4097):
            theirs.sendall(packed[start : start + 4097])
        theirs.sendall(packed[:100])
        theirs.close()

    sender = threading.Thread(target=dribble)
    sender.start()
    assert read_frame(ours) == ["kind", bytes(300_000)]
    assert read_frame(ours) is None
    sender.join()
    ours.close()
    assert read_frame(ours) is None


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
