"""Checkpoints are whole or not there: round trips to the bit, damage, leftovers, no room, and SIGKILL in the middle of saving."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swarm_node import checkpoint as module
from swarm_node.checkpoint import Checkpoint, DiskFull, check_room, load_latest, read_latest, save_checkpoint


def make(step: int, size: int = 100) -> Checkpoint:
    """A checkpoint whose every part follows from its step."""
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(
        step=step,
        weights={"a.weight": torch.randn(size, generator=generator), "b": torch.randn(3, 5, generator=generator).to(torch.bfloat16)},
        optimiser={"a.weight/exp_avg": torch.randn(size, generator=generator), "a.weight/step": torch.tensor(float(step))},
        state={"cursor": step * 3, "lambda": 0.1 + step, "random": [2**63 + step, "words"], "nested": {"none": None, "yes": True}},
        bodies=[b"", bytes([step % 256]) * 1000, os.urandom(0) + b"\x00\xff"],
    )


def assert_same(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert found.step == expected.step
    assert found.state == expected.state
    assert found.bodies == expected.bodies
    for part, other in ((found.weights, expected.weights), (found.optimiser, expected.optimiser)):
        assert part.keys() == other.keys()
        for name, tensor in other.items():
            assert part[name].dtype == tensor.dtype
            assert torch.equal(part[name], tensor)


def test_a_checkpoint_comes_back_to_the_bit(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", make(1200))
    assert path == tmp_path / "checkpoints" / "step-00001200"
    assert_same(load_latest(tmp_path / "checkpoints"), make(1200))


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "absent") is None
    assert load_latest(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11, 100_000_000):
        save_checkpoint(tmp_path, make(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000011", "step-100000000"]
    assert_same(load_latest(tmp_path), make(100_000_000))
    with pytest.raises(ValueError, match="keep is 0"):
        save_checkpoint(tmp_path, make(12), keep=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(5))
    newer = make(5)
    newer.state["cursor"] = "replaced"
    save_checkpoint(tmp_path, newer)
    assert_same(load_latest(tmp_path), newer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimiser.safetensors", "state.json", "bodies.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "one bit", "empty"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str) -> None:
    save_checkpoint(tmp_path, make(1))
    newest = save_checkpoint(tmp_path, make(2)) / name
    data = newest.read_bytes()
    if damage == "missing":
        newest.unlink()
    elif damage == "cut short":
        newest.write_bytes(data[:-1])
    elif damage == "one bit":
        middle = len(data) // 2
        newest.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        newest.write_bytes(b"")
    assert_same(load_latest(tmp_path), make(1))
    assert "step-00000002 is damaged" in caplog.text


def test_a_checkpoint_of_another_format_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1))
    monkeypatch.setattr(module, "_FORMAT", 99)
    save_checkpoint(tmp_path, make(2))
    monkeypatch.undo()
    assert_same(load_latest(tmp_path), make(1))


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(3))
    for leftover in (".writing-step-00000004", ".removing-step-00000001"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "weights.safetensors").write_bytes(b"half")
    assert_same(load_latest(tmp_path), make(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_reading_another_process_s_checkpoints_touches_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(3))
    (tmp_path / ".writing-step-00000004").mkdir()
    assert_same(read_latest(tmp_path), make(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".writing-step-00000004", "step-00000003"]


def test_a_checkpoint_that_stepped_aside_is_put_back(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make(3))
    (tmp_path / "step-00000003").rename(tmp_path / ".aside-step-00000003")
    assert_same(load_latest(tmp_path), make(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_without_room_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    with pytest.raises(DiskFull, match=r"needs 9\.\d MB in .* and 1\.5 MB are free.*--home") as caught:
        save_checkpoint(tmp_path, make(2, size=1_000_000))
    assert isinstance(caught.value, ValueError)
    assert caught.value.free == 1_500_000
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_room_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "not" / "yet", free // 2)
    with pytest.raises(DiskFull):
        check_room(tmp_path / "not" / "yet", free * 2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_writing_is_reported_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1))

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(DiskFull):
        save_checkpoint(tmp_path, make(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_same(load_latest(tmp_path), make(1))


def save_for_ever(folder: Path, report: int) -> None:
    """Save step after step, each twice so that replacing is killed too, and write one byte to `report` after each."""
    for count in range(10**6):
        save_checkpoint(folder, make(count // 2, size=20_000))
        os.write(report, b".")


def test_killed_at_any_moment_the_last_complete_one_is_loaded(tmp_path: Path) -> None:
    moments = random.Random(0)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(folder, sending)
            finally:
                os._exit(1)
        os.close(sending)
        saved = len(os.read(receiving, 1))
        time.sleep(moments.random() * 0.1)  # the random moment itself, not a wait for something
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(receiving, 4096):
            saved += len(more)
        os.close(receiving)
        assert saved > 0
        found = load_latest(folder)
        assert found is not None
        assert (saved - 1) // 2 <= found.step <= saved // 2
        assert_same(found, make(found.step, size=20_000))
        assert all(path.name.startswith("step-") for path in folder.iterdir())
