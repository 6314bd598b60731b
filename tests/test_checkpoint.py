"""Checkpoints are whole or not there: round trips to the bit, damage, leftovers, no room, and SIGKILL in the middle of saving."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from swarm_node import checkpoint as module
from swarm_node.checkpoint import Checkpoint, CheckpointError, DiskFull, check_room, load_latest, read_latest, save_checkpoint


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


def test_what_a_checkpoint_holds_is_on_the_disk_before_it_gets_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not flushed before the rename may be empty after a power cut, under a name that says it is whole."""
    fsync, rename, flushed = os.fsync, os.rename, set[int]()

    def note_fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def check_rename(source: Path, target: Path) -> None:
        paths = [Path(source), *Path(source).iterdir()]
        assert [path.name for path in paths if path.stat().st_ino not in flushed] == []
        assert len(paths) == 6
        flushed.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", check_rename)
    save_checkpoint(tmp_path, make(1))
    assert flushed == {tmp_path.stat().st_ino}


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000002", "step-00000001"]


def test_damaged_checkpoints_fill_no_place_and_the_one_just_written_stays(tmp_path: Path) -> None:
    for step in (2, 4):
        damaged = save_checkpoint(tmp_path, make(step))
        (damaged / "weights.safetensors").write_bytes(b"")
    for step in (1, 3):
        assert save_checkpoint(tmp_path, make(step), keep=2).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    assert_same(load_latest(tmp_path), make(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-00000004", "step-00000001", "step-00000002", "step-00000003"]


def test_the_one_just_written_stays_though_others_have_a_higher_step(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        save_checkpoint(tmp_path, make(step), keep=3)
    save_checkpoint(tmp_path, make(1), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000009"]
    assert_same(load_latest(tmp_path), make(9))
    save_checkpoint(tmp_path, make(10), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_only_the_newest_damaged_checkpoint_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 10_000_000_000, 4):
        (save_checkpoint(tmp_path, make(step)) / "state.json").unlink()
    assert load_latest(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["damaged-step-10000000000"]
    assert "damaged-step-00000002 is removed" in caplog.text


def test_what_does_not_belong_there_is_left_alone_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(tmp_path, make(3))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-old").mkdir()
    (tmp_path / ".writing-a-letter").write_text("mine too")
    (tmp_path / "step-00000009").write_text("a file with a checkpoint's name")
    assert_same(load_latest(tmp_path), make(3))
    save_checkpoint(tmp_path, make(9))
    save_checkpoint(tmp_path, make(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".writing-a-letter",
        "notes.txt",
        "step-00000009",
        "step-00000009.moved",
        "step-00000010",
        "step-old",
    ]
    assert (tmp_path / "step-00000009.moved").read_text() == "a file with a checkpoint's name"
    assert caplog.text.count("left alone: .writing-a-letter, notes.txt, step-00000009, step-old") == 1
    assert "in the way of one: it is step-00000009.moved now" in caplog.text


def test_contents_that_agree_with_their_manifest_and_make_no_sense_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1))
    for step, name, contents in ((2, "state.json", b"[]"), (3, "bodies.bin", b"abc"), (4, "weights.safetensors", b"no tensors")):
        damaged = save_checkpoint(tmp_path, make(step), keep=9)
        (damaged / name).write_bytes(contents)
        manifest = json.loads((damaged / "manifest.json").read_text())
        manifest[name] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
        (damaged / "manifest.json").write_text(json.dumps(manifest))
    assert_same(load_latest(tmp_path), make(1))


def test_a_checkpoint_of_another_format_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1))
    monkeypatch.setattr(module, "_FORMAT", 99)
    save_checkpoint(tmp_path, make(2))
    monkeypatch.undo()
    for step in (3, 4, 5):  # they fill no place, and whoever wrote them finds them again
        assert_same(load_latest(tmp_path), make({3: 1}.get(step, step - 1)))
        save_checkpoint(tmp_path, make(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_disk_that_does_not_answer_now_has_damaged_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make(step))

    def refuse(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "_sha256", refuse)
    assert load_latest(tmp_path) is None
    assert "step-00000001 cannot be read ([Errno 5] Input/output error) and is left alone" in caplog.text
    monkeypatch.undo()
    assert_same(load_latest(tmp_path), make(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


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


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """A disk that holds two checkpoints of `make(step, size=1_000_000)`, and two thirds of a third; what is removed there is free again."""
    size = 8_010_000  # two float32 tensors of a million, and the rest
    capacity = int(2.7 * size)

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=capacity - sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return size


def test_the_oldest_makes_room_for_a_third_but_the_newest_never_goes(tmp_path: Path, small_disk: int) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make(step, size=1_000_000))
    check_room(tmp_path, small_disk)
    assert len(list(tmp_path.iterdir())) == 2  # a start removes nothing yet
    save_checkpoint(tmp_path, make(3, size=1_000_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    with pytest.raises(DiskFull):
        check_room(tmp_path, 2 * small_disk)
    with pytest.raises(DiskFull):
        save_checkpoint(tmp_path, make(4, size=2_000_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_damaged_ones_make_room_before_sound_ones(tmp_path: Path, small_disk: int) -> None:
    save_checkpoint(tmp_path, make(1, size=1_000_000))
    (save_checkpoint(tmp_path, make(2, size=1_000_000)) / "state.json").unlink()
    assert_same(load_latest(tmp_path), make(1, size=1_000_000))
    save_checkpoint(tmp_path, make(3, size=1_000_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_quota_that_is_reached_while_writing_costs_the_oldest_and_never_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make(step))

    def limited(tensors: dict[str, torch.Tensor], path: Path) -> None:  # the disk itself says that there is room
        if len(list(tmp_path.glob("step-*"))) > 1:
            raise SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)")
        save_file(tensors, path)

    monkeypatch.setattr(module, "save_file", limited)
    save_checkpoint(tmp_path, make(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert "step-00000001 is removed to make room" in caplog.text


def test_a_file_that_is_larger_than_allowed_costs_no_other_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, make(step))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(DiskFull, match="File too large"):
            save_checkpoint(tmp_path, make(3, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert_same(load_latest(tmp_path), make(2))


def test_any_other_error_while_writing_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, make(1))

    def fail(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"of step 2 cannot be written to .*Input/output error") as caught:
        save_checkpoint(tmp_path, make(2))
    assert not isinstance(caught.value, DiskFull)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_folder_may_be_a_link_and_so_may_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    folder = tmp_path / "checkpoints"
    save_checkpoint(folder, make(1)).rename(tmp_path / "other disk")
    (folder / "step-00000001").symlink_to(tmp_path / "other disk")
    assert_same(load_latest(folder), make(1))
    for step in (2, 3):
        save_checkpoint(folder, make(step))
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["step-00000002", "step-00000003"]
    assert (tmp_path / "other disk" / "manifest.json").exists(), "of a link only the link goes"


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_folder_where_the_folder_should_be_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "checkpoints").write_text("")
    else:
        (tmp_path / "checkpoints").symlink_to(tmp_path / "nowhere")
    for use in (lambda path: check_room(path, 1), lambda path: save_checkpoint(path, make(1))):
        with pytest.raises(CheckpointError, match="checkpoints is not a folder"):
            use(tmp_path / "checkpoints")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_folder_of_another_user_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # these tests may run as root, whom no mode stops
    with pytest.raises(CheckpointError, match=rf"{tmp_path} cannot be written to by this user"):
        check_room(tmp_path / "checkpoints", 1)


def test_room_is_checked_where_the_folder_will_be(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "not" / "yet", free // 2)
    with pytest.raises(DiskFull):
        check_room(tmp_path / "not" / "yet", free * 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("as_text", [False, True], ids=["errno", "text"])
def test_a_disk_that_fills_up_while_writing_is_reported_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, as_text: bool
) -> None:
    save_checkpoint(tmp_path, make(1))

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})") if as_text else OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(DiskFull, match=os.strerror(number)):
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
