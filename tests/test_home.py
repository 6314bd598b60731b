"""The home folder: one process at a time, nothing left behind by a refusal or a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm_node.home import Home, HomeError, HomeInUse, holder

HOLD = """
import sys
from pathlib import Path
from swarm_node.home import Home
home = Home.open(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the home folder until it is killed or the block ends."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "open\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_home_is_made_private_and_holds_its_pid(tmp_path: Path) -> None:
    with Home.open(tmp_path / "a" / "b") as home:
        assert home.path == tmp_path / "a" / "b"
        assert home.path.stat().st_mode & 0o777 == 0o700
        assert (home.path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_home_in_use_is_refused_with_the_pid_and_nothing_is_written(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        before = contents(tmp_path)
        with pytest.raises(HomeInUse, match=rf"in use by process {other.pid}; stop that node, or .* --home"):
            Home.open(tmp_path)
        assert contents(tmp_path) == before
        assert holder(tmp_path) == other.pid


def test_the_same_process_cannot_open_a_home_twice(tmp_path: Path) -> None:
    with Home.open(tmp_path), pytest.raises(HomeInUse, match=str(os.getpid())):
        Home.open(tmp_path)


def test_a_killed_holder_leaves_the_home_free(tmp_path: Path) -> None:
    with other_process(tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert holder(tmp_path) is None
        with Home.open(tmp_path) as home:
            assert (home.path / "lock").read_text() == f"{os.getpid()}\n"


def test_closing_frees_the_home_and_is_idempotent(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    home.close()
    home.close()
    assert holder(tmp_path) is None
    with Home.open(tmp_path):
        pass


def test_a_home_that_was_never_used_disappears_with_the_folders_made_for_it(tmp_path: Path) -> None:
    Home.open(tmp_path / "a" / "b").close()
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_was_used_or_was_there_before_stays(tmp_path: Path) -> None:
    with Home.open(tmp_path / "used") as home:
        home.metrics.write_text("{}\n")
    (tmp_path / "before").mkdir()
    Home.open(tmp_path / "before").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "used"]
    assert (tmp_path / "used" / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError, match=r"file/home cannot be used: .*--home"):
        Home.open(tmp_path / "file" / "home")


def test_a_new_home_on_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(HomeError, match=r"b cannot be used: No space left on device; .*--home"):
        Home.open(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_home_is_nobodys_where_there_is_none(tmp_path: Path) -> None:
    assert holder(tmp_path / "nowhere") is None
    (tmp_path / "file").write_text("")
    assert holder(tmp_path / "file") is None


@pytest.mark.parametrize("garbage", [b"\xff\x00", "²".encode(), b"9" * 5000, b"-1", b""])
def test_a_lock_that_holds_no_pid_is_a_lock_all_the_same(tmp_path: Path, garbage: bytes) -> None:
    with other_process(tmp_path):
        (tmp_path / "lock").write_bytes(garbage)
        assert holder(tmp_path) == 0
        with pytest.raises(HomeInUse, match="in use by another process"):
            Home.open(tmp_path)


def test_a_folder_that_is_gone_at_the_end_is_no_error(tmp_path: Path) -> None:
    with Home.open(tmp_path / "a" / "home") as home:
        shutil.rmtree(tmp_path / "a")
    assert not home.path.exists()


def test_what_the_disk_refuses_names_the_file(tmp_path: Path) -> None:
    with Home.open(tmp_path) as home:
        home.metrics.mkdir()
        with pytest.raises(HomeError, match=r"metrics\.jsonl cannot be written: Is a directory; .*--home"), home.writing():
            home.metrics.write_text("")


def test_a_lock_file_that_was_replaced_meanwhile_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its holder leaves and removes it, and a third process takes the home."""
    flock = fcntl.flock
    third: list[int] = []

    def late(lock: int, how: int) -> None:
        if not third:
            (tmp_path / "lock").unlink()
            third.append(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
            flock(third[0], fcntl.LOCK_EX)
        flock(lock, how)

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(HomeInUse):
        Home.open(tmp_path)
    os.close(third[0])
    Home.open(tmp_path).close()
