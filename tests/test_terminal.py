"""A node's output may be closed, full, or of another encoding: lines then go to the log alone, and nothing raises."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_node import logs
from swarm_node.logs import LogError, log_file, log_to_console, log_to_file
from swarm_node.terminal import Terminal
from tests.support.waiting import HANG_S

PROGRAM = """
import sys
from pathlib import Path
from swarm_node.logs import log_to_console, log_to_file
from swarm_node.terminal import Terminal
log_to_console()
log_to_file(Path(sys.argv[1]))
say = Terminal()
for line in ("one", "two λ·±", "three"):
    say(line)
sys.stderr.write(f"lost {say.lost}\\n")
"""


def speak(home: Path, output: int, **environment: str) -> tuple[int, list[str]]:
    """Exit code and standard error of a process that says three lines to `output`."""
    command = [sys.executable, "-c", PROGRAM, str(home)]
    done = subprocess.run(
        command, stdout=output, stderr=subprocess.PIPE, env=os.environ | environment, text=True, timeout=HANG_S, check=False
    )
    return done.returncode, done.stderr.splitlines()


def logged(home: Path) -> list[str]:
    return [line.partition("said: ")[2] for line in (home / "node.log").read_text("utf-8").splitlines() if "said: " in line]


def test_a_closed_pipe_loses_nothing_but_itself(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code, errors = speak(tmp_path, writing)
    os.close(writing)
    assert code == 0
    assert errors == [
        "standard output is lost ([Errno 32] Broken pipe): the node goes on and says the rest in its log",
        "lost True",
    ]
    assert logged(tmp_path) == ["one", "two λ·±", "three"]


def test_a_pipe_that_nobody_reads_stops_nothing_and_is_used_again_when_somebody_does(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    code, errors = speak(tmp_path, writing)
    assert code == 0
    assert errors == ["nobody reads standard output: until somebody does, lines go to the log alone", "lost False"]
    assert logged(tmp_path) == ["one", "two λ·±", "three"]
    with os.fdopen(reading, "rb") as file:
        assert file.read(filled) == b"x" * filled
        code, errors = speak(tmp_path, writing)
        os.close(writing)
        assert (code, errors) == (0, ["lost False"])
        assert file.read().decode() == "one\ntwo λ·±\nthree\n"


def test_a_full_disk_behind_the_output_is_said_once(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, errors = speak(tmp_path, full.fileno())
    assert code == 0
    assert len(errors) == 2
    assert "No space left on device" in errors[0]
    assert logged(tmp_path) == ["one", "two λ·±", "three"]


def test_a_terminal_that_knows_no_greek_gets_question_marks(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        code, errors = speak(tmp_path, out.fileno(), PYTHONIOENCODING="ascii")
    assert (code, errors) == (0, ["lost False"])
    assert (tmp_path / "out").read_text("ascii") == "one\ntwo ???\nthree\n"


@pytest.fixture
def fresh_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Handlers and levels as before."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv("SWARM_NODE_LOG", "")
    root = logging.getLogger()
    before = (root.handlers[:], logs.OURS.level, logging.raiseExceptions)
    root.handlers = []
    yield root
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers, logging.raiseExceptions = before[0], before[2]
    logs.OURS.setLevel(before[1])


def test_the_console_shows_warnings_and_the_file_what_is_of_note(
    tmp_path: Path, fresh_logging: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_NODE_LOG", raising=False)
    log_to_console()
    assert log_file() is None
    log_to_file(tmp_path)
    assert log_file() == tmp_path / "node.log"
    log = logging.getLogger("swarm_node.somewhere")
    log.debug("detail")
    log.info("note")
    log.warning("trouble")
    assert capsys.readouterr().err == "trouble\n"
    text = (tmp_path / "node.log").read_text()
    assert "INFO swarm_node.somewhere: note" in text
    assert "WARNING swarm_node.somewhere: trouble" in text
    assert "detail" not in text


def test_the_variable_sets_the_level_and_a_wrong_one_is_named(
    fresh_logging: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE_LOG", "Debug")
    log_to_console()
    logging.getLogger("swarm_node.somewhere").debug("detail")
    assert capsys.readouterr().err == "detail\n"
    monkeypatch.setenv("SWARM_NODE_LOG", "loud")
    with pytest.raises(LogError, match="SWARM_NODE_LOG=loud: choose debug, info, warning, error"):
        log_to_console()


def test_what_the_terminal_has_seen_and_tracebacks_are_for_the_file_unless_everything_is_shown(
    tmp_path: Path, fresh_logging: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_NODE_LOG", "info")
    log_to_console()
    log_to_file(tmp_path)
    Terminal()("step 1")
    thread = threading.Thread(target=lambda: 1 // 0, name="reader")
    thread.start()
    thread.join()
    shown = capsys.readouterr()
    assert shown.out == "step 1\n"
    assert shown.err.splitlines() == ["the thread reader ended: ZeroDivisionError: integer division or modulo by zero"]
    assert "Traceback" in (tmp_path / "node.log").read_text()
    log_to_console("debug")
    Terminal()("step 2")
    assert capsys.readouterr().err == "step 2\n"


@pytest.mark.parametrize("redirections", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_s_number_goes_to_no_file(tmp_path: Path, redirections: str) -> None:
    program = (
        "import os, pathlib, sys\nfrom swarm_node.terminal import open_streams\nopen_streams()\n"
        "with open(sys.argv[1], 'w') as file:\n  print(1)\n  print(2, file=sys.stderr)\n  os.write(1, b'3')\n  os.write(2, b'4')\n"
        "  file.write('mine')\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" "$2" {redirections}', sys.executable, program, str(tmp_path / "file")],
        capture_output=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "mine"


def test_log_files_have_a_bounded_size(tmp_path: Path, fresh_logging: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    log_to_console("error")
    log_to_file(tmp_path)
    for number in range(300):
        logging.getLogger("swarm_node.somewhere").info("message %d", number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["node.log", "node.log.1", "node.log.2"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6000
    assert "message 299" in (tmp_path / "node.log").read_text()
