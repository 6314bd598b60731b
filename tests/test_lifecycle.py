"""A node's life around the loop: what is saved when something ends it, what is said, and what is refused beforehand."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_node import lifecycle
from swarm_node.checkpoint import Checkpoint, read_latest, save_checkpoint
from swarm_node.cli.app import is_bad_input
from swarm_node.config import Config, make_config
from swarm_node.lifecycle import Life, checkpoint_bytes, run
from swarm_node.network import addresses
from swarm_node.network.addresses import ListenError
from swarm_node.network.gossip import NetworkReport, Nobody
from swarm_node.node import Node, ResumeError
from swarm_node.observe.metrics import MetricsWriter, StepRow, read_metrics
from swarm_node.observe.status import Status
from swarm_node.simulation import NodeSpec, Swarm

SMALL: dict[str, Any] = {
    "model": {"name": "tiny-s"},
    "rollout": {"prompts_per_step": 1, "max_new_tokens": 16},
    "control": {"group_size": 2},
    "network": {"directory": False},
}


class Quiet(Nobody):
    """A network without peers that has something to say about this machine."""

    pids: dict[str, int | None] = {}  # noqa: RUF012  # never changed

    def report(self) -> NetworkReport:
        return NetworkReport(addresses=("/memory/me",), notices=("port 31310 is taken",))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Callable[..., Config]:
    """The configuration of a node without processes: options of `[run]` by name."""
    monkeypatch.setattr(Life, "_open_network", lambda self, task: Quiet())
    monkeypatch.setattr(addresses, "PATIENCE_S", 0.0)
    return lambda **options: make_config(SMALL | {"run": {"home": str(tmp_path / "home"), "steps": 3} | options})


def saved_step(tmp_path: Path) -> int | None:
    found = read_latest(tmp_path / "home" / "checkpoints")
    return None if found is None else found.step


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: Exception) -> None:
    """Let the nth call of a method raise."""
    calls, sound = 0, getattr(owner, name)

    def method(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return sound(*given, **named)

    monkeypatch.setattr(owner, name, method)


def test_an_error_in_a_rollout_leaves_the_last_complete_step(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Node, "sample", 3, RuntimeError("a bug in an engine"))
    with pytest.raises(RuntimeError, match="a bug in an engine") as caught:
        run(config(), lambda line: None)
    assert saved_step(tmp_path) == 2
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"rolling-out for \d+ s at step 2", note)


@pytest.mark.parametrize(
    ("owner", "name", "complete"),
    [
        (Status, "enter", 2),  # the first thing that a step does
        (Node, "_row", 3),  # the last
        (Quiet, "progress", 3),
        (lifecycle, "step_line", 3),
        (MetricsWriter, "write", 3),
    ],
)
def test_an_error_outside_of_an_update_leaves_the_last_complete_step(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, complete: int
) -> None:
    step = Life._step

    def third_step_fails(life: Life) -> StepRow:
        if life.node.steps == 2:
            fail_at(monkeypatch, owner, name, 1, RuntimeError("a bug"))
        return step(life)

    monkeypatch.setattr(Life, "_step", third_step_fails)
    with pytest.raises(RuntimeError, match="a bug"):
        run(config(), lambda line: None)
    assert saved_step(tmp_path) == complete


def test_an_error_before_the_first_step_leaves_no_checkpoint(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Node, "sample", 1, RuntimeError("a bug in an engine"))
    with pytest.raises(RuntimeError, match="a bug in an engine"):
        run(config(), lambda line: None)
    assert not (tmp_path / "home" / "checkpoints").exists()


def test_a_node_that_is_stopped_before_its_first_step_has_nothing_to_save(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_stopped(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    monkeypatch.setattr(Node, "sample", be_stopped)
    said: list[str] = []
    assert run(config(), said.append) == 0
    assert said[-1] == "stopped"
    assert not (tmp_path / "home" / "checkpoints").exists()


def test_an_error_in_an_evaluation_leaves_the_step_before_it(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, Node, "evaluate", 2, RuntimeError("a bug in a verifier"))
    with pytest.raises(RuntimeError, match="a bug in a verifier"):
        run(config(eval_every=2), lambda line: None)
    assert saved_step(tmp_path) == 2


def test_an_error_in_the_middle_of_an_update_saves_nothing_torn(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    fail_at(monkeypatch, Node, "distill", 3, RuntimeError("between the weights and the books"))
    with pytest.raises(RuntimeError, match="between the weights"):
        run(config(), said.append)
    assert said[-1] == "no checkpoint of step 2: the update after step 2 was left half done"
    assert saved_step(tmp_path) is None


def test_weights_that_are_not_finite_are_not_saved(config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ruin(life: Life) -> None:
        if life.node.steps == 2:
            next(iter(life.policy.trainable().values())).data[0, 0] = torch.nan
            raise RuntimeError("the weights are gone")

    said: list[str] = []
    monkeypatch.setattr(Life, "_evaluate", ruin)
    with pytest.raises(RuntimeError, match="the weights are gone"):
        run(config(eval_every=1), said.append)
    assert re.fullmatch(r"no checkpoint of step 2: .*embed.* holds numbers that are not finite", said[-1])
    assert saved_step(tmp_path) is None


def test_a_disk_that_refuses_a_checkpoint_costs_the_checkpoint_and_not_the_run(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, lifecycle, "save_checkpoint", 1, OSError(errno.EIO, os.strerror(errno.EIO)))
    said: list[str] = []
    assert run(config(checkpoint_every=2), said.append) == 0
    assert any(line.startswith("no checkpoint of step 2:") and "Input/output error" in line for line in said)
    assert saved_step(tmp_path) == 3


def test_the_room_that_is_asked_for_is_what_a_checkpoint_takes(swarm: Callable[..., Swarm]) -> None:
    node = swarm([NodeSpec("ada")], seed=1)["ada"].node
    node.step()
    checkpoint = node.checkpoint()
    tensors = [*checkpoint.weights.values(), *checkpoint.optimiser.values()]
    assert checkpoint_bytes(node.policy) == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.01)


def test_what_the_network_says_of_this_machine_is_said_once_and_in_the_status(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    assert run(config(), said.append) == 0
    assert said.count("network: port 31310 is taken") == 1
    assert '"port 31310 is taken"' in (tmp_path / "home" / "status.json").read_text()


def test_a_profile_of_two_steps_is_written(config: Callable[..., Config], tmp_path: Path) -> None:
    said: list[str] = []
    assert run(config(steps=4), said.append, profile=True) == 0
    home = tmp_path / "home"
    assert [line for line in said if line.startswith("profile: ")] == [
        f"profile: {home / name}" for name in ("profile-functions.txt", "profile-operations.txt", "profile-trace.json.gz")
    ]
    assert "(sample)" in (home / "profile-functions.txt").read_text()
    assert "aten::" in (home / "profile-operations.txt").read_text()
    assert (home / "profile-trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert [row.step for row in read_metrics(home / "metrics.jsonl").steps] == [1, 2, 3, 4]


def test_an_address_that_was_asked_for_and_is_taken_is_an_error(config: Callable[..., Config], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = config().model_copy(update={"network": config().network.model_copy(update={"listen": (f"/ip4/127.0.0.1/tcp/{port}",)})})
        with pytest.raises(ListenError, match=rf"/tcp/{port}: process {os.getpid()} \(.+\) holds port {port}. Stop it"):
            run(wanted, lambda line: None)
    elsewhere = config().network.model_copy(update={"listen": ("/ip4/192.0.2.77/tcp/31310",)})
    with pytest.raises(ListenError, match=r"192\.0\.2\.77.*Give an address of this machine"):
        run(config().model_copy(update={"network": elsewhere}), lambda line: None)
    assert not (tmp_path / "home").exists()


def test_a_home_whose_every_file_is_on_a_full_disk_costs_the_files_and_not_the_run(
    config: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").mkdir()
    for name in ("metrics.jsonl", "status.tmp", "node.log"):
        (tmp_path / "home" / name).symlink_to("/dev/full")
    said: list[str] = []
    assert run(config(steps=4), said.append, profile=True) == 0
    assert saved_step(tmp_path) == 4
    assert "metrics are being lost: [Errno 28]" in caplog.text
    assert caplog.text.count("node.log cannot be written ([Errno 28]") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "identity.key"])
def test_a_folder_where_a_file_belongs_is_named(config: Callable[..., Config], tmp_path: Path, name: str) -> None:
    wanted = config()
    (tmp_path / "home" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"{name} cannot be (written|read)") as caught:
        run(wanted, lambda line: None)
    assert is_bad_input(caught.value)


def test_a_profile_that_got_no_turn_is_said(config: Callable[..., Config]) -> None:
    said: list[str] = []
    assert run(config(), said.append, profile=True) == 0
    assert "no whole profile: it takes 4 steps, and this start took 3" in said


def test_a_checkpoint_of_another_version_is_refused_by_name(config: Callable[..., Config], tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "home" / "checkpoints", Checkpoint(5, {}, {}, {"version": 1}))
    with pytest.raises(ResumeError, match="format 1, this version reads"):
        run(config(), lambda line: None)
    assert saved_step(tmp_path) == 5
