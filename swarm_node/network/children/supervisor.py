"""Child processes that may die at any time: started in an interpreter of their own, watched, restarted, counted.

A child is `python -m MODULE FD`: it inherits one end of a socket pair and nothing else, so it holds no socket of this process and
shares none of its imports. When the parent dies the child reads the end of the socket and leaves; when the child dies its whole
process group goes with it, so that no daemon of its own stays behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from swarm_node.logs import QUIET
from swarm_node.network.children.frames import Frame, FrameError, pack_frame, read_frame

log = logging.getLogger(__name__)

STDERR_LINES = 20
"""Last lines of a child's stderr that are kept and shown when it dies."""


class Child:
    """One supervised process. Every method may be called from any thread; none blocks but `close`."""

    def __init__(
        self,
        name: str,
        module: str,
        on_frame: Callable[[Frame], None],
        opening: Callable[[], Sequence[bytes]],
        *,
        queue_bytes: int = 64 * 1024 * 1024,
        backoff_s: float = 0.5,
        backoff_max_s: float = 60.0,
        healthy_s: float = 30.0,
    ) -> None:
        """
        Args:
            name: how messages call the process.
            module: what `python -m` runs; it gets a file descriptor number as its only argument.
            on_frame: called in the reader thread with every frame of the child; must be quick and must not raise.
            opening: frames that every new process gets first: its configuration and its state.
            queue_bytes: frames that wait for the child at most; the oldest are dropped and counted.
            backoff_s: pause before the first restart; doubles with each one, with jitter.
            backoff_max_s: the longest pause.
            healthy_s: a process that lived this long starts the back-off anew.
        """
        self.name = name
        self.restarts = 0
        self.dropped = 0
        """Frames to the child that were dropped because it did not read them."""
        self.last_words: tuple[str, ...] = ()
        """The last lines of stderr of the process that died last."""
        self._module = module
        self._on_frame = on_frame
        self._opening = opening
        self._queue_bytes = queue_bytes
        self._backoff = (backoff_s, backoff_max_s, healthy_s)
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._restart_at = 0.0
        self._thread = threading.Thread(target=self._supervise, name=f"{name}-supervisor", daemon=True)

    def start(self) -> None:
        """Start the process and keep it running until `close`."""
        self._thread.start()

    def send(self, kind: str, *fields: Any) -> None:
        """Queue a frame for the process; frames sent while it is down wait, as long as there is room."""
        frame = pack_frame(kind, *fields)
        with self._wake:
            self._outgoing.append(frame)
            self._outgoing_bytes += len(frame)
            while self._outgoing_bytes > self._queue_bytes and len(self._outgoing) > 1:
                self._outgoing_bytes -= len(self._outgoing.popleft())
                self.dropped += 1
            self._wake.notify_all()

    @property
    def pid(self) -> int | None:
        """The running process, or None while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def trouble(self) -> str:
        """What is wrong now, in words, or empty."""
        if self.pid is not None or self._closing.is_set():
            return ""
        if self._process is None and not self.last_words:
            return f"the {self.name} process is starting"
        wait = self._restart_at - time.monotonic()
        return f"{self.name} process restarting" + (f" in {wait:.0f} s" if wait >= 1 else "") + self._reason()

    def close(self, timeout_s: float = 3.0) -> None:
        """Ask the process to stop, and end it and its process group when it takes longer than `timeout_s`. Idempotent."""
        self.send("stop")
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread.ident is None:
            return
        deadline = time.monotonic() + timeout_s
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            _end_group(process)
        self._thread.join(max(1.0, deadline - time.monotonic()))

    def _reason(self) -> str:
        """The last line that says something: the traceback of a group of errors ends with a frame around it."""
        told = [line.lstrip(" |+-") for line in self.last_words if any(map(str.isalnum, line))]
        return f" ({told[-1]})" if told else ""

    def _supervise(self) -> None:
        pause, longest, healthy = self._backoff
        while not self._closing.is_set():
            born = time.monotonic()
            self._run_once()
            if self._closing.is_set():
                return
            pause = self._backoff[0] if time.monotonic() - born >= healthy else pause
            wait = pause * random.uniform(0.75, 1.25)
            self._restart_at = time.monotonic() + wait
            log.warning("the %s process ended%s; it starts again in %.1f s", self.name, self._reason(), wait)
            for line in self.last_words:
                QUIET.warning("%s | %s", self.name, line)
            self._closing.wait(wait)
            pause = min(2 * pause, longest)
            self.restarts += not self._closing.is_set()

    def _run_once(self) -> None:
        """Start the process, serve it until it ends, and leave nothing of it behind."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", self._module, str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal reaches only the parent, which then ends its children in order
                env=_child_environment(),
            )
        except OSError as error:
            self.last_words = (f"cannot be started: {error}",)
            ours.close()
            return
        finally:
            theirs.close()
        self._process = process
        opening = list(self._opening())
        writer = threading.Thread(target=self._write, args=(ours, process, opening), name=f"{self.name}-writer", daemon=True)
        reader = threading.Thread(target=self._read, args=(ours,), name=f"{self.name}-reader", daemon=True)
        listener = threading.Thread(target=self._listen, args=(process,), name=f"{self.name}-stderr", daemon=True)
        for thread in (writer, reader, listener):
            thread.start()
        process.wait()
        _end_group(process)
        with self._wake:
            self._wake.notify_all()
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        for thread in (reader, writer, listener):
            thread.join(5)
        ours.close()

    def _write(self, connection: socket.socket, process: subprocess.Popen[bytes], opening: Sequence[bytes]) -> None:
        try:
            for frame in opening:
                connection.sendall(frame)
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._outgoing or process.poll() is not None)
                    if not self._outgoing:
                        return
                    frame = self._outgoing.popleft()
                    self._outgoing_bytes -= len(frame)
                connection.sendall(frame)
        except OSError:
            log.debug("the %s process no longer reads", self.name)

    def _read(self, connection: socket.socket) -> None:
        try:
            while (frame := read_frame(connection)) is not None:
                self._on_frame(frame)
        except FrameError as error:
            log.error("the %s process sent nonsense and is ended: %s", self.name, error)
            if self._process is not None:
                _end_group(self._process)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        lines: deque[str] = deque(maxlen=STDERR_LINES)
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw[:2000].decode(errors="replace").rstrip()
            lines.append(line)
            QUIET.debug("%s | %s", self.name, line)
        process.stdout.close()
        self.last_words = tuple(lines)


def _child_environment() -> dict[str, str]:
    """One thread per numeric library: a child computes nothing, and the learner needs the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and of everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
