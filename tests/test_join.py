"""`swarm-node join` as a user runs it: processes, signals, a home folder."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from libp2p.abc import IHost
from libp2p.utils.varint import encode_varint_prefixed

from swarm_node.observe.metrics import read_metrics
from tests.support.hostile_peer import attack, send
from tests.support.waiting import HANG_S, await_condition

SMALL = [
    *("--set", "rollout.prompts_per_step=2", "--set", "rollout.max_new_tokens=48", "--group-size", "4"),
    *("--set", "learning.learning_rate=3e-4", "--set", "network.directory=false", "--listen", "/ip4/127.0.0.1/tcp/0"),
]
COMMAND = (sys.executable, "-m", "swarm_node.cli.app", "join", "--model", "tiny-s")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def join(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--home", str(home), *SMALL, *options]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False)


class Running:
    """A node that runs beside the test. It writes to a file, because one that writes into a full pipe that nobody reads stands still."""

    def __init__(self, home: Path, *options: str, before: tuple[str, ...] = ()) -> None:
        self.output = home.with_name(f"{home.name}.output")
        command = [*before, *COMMAND, "--home", str(home), *SMALL, *options]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def until(self, pattern: str) -> re.Match[str]:
        """The first match in what the node says, as soon as it is there; fails when the node ends without it."""

        def found_or_ended() -> bool:
            return re.search(pattern, self.said, re.MULTILINE) is not None or self.process.poll() is not None

        await_condition(found_or_ended, f"the node says {pattern}")
        found = re.search(pattern, self.said, re.MULTILINE)
        assert found, f"nothing matched {pattern!r} in:\n{self.said}"
        return found

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ask it to leave; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(HANG_S)


def steps_written(home: Path) -> list[int]:
    return [row.step for row in read_metrics(home / "metrics.jsonl").steps]


def logged(home: Path) -> str:
    path = home / "node.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def foreign_used(home: Path) -> int:
    metrics = home / "metrics.jsonl"
    return sum(row.foreign_groups_used for row in read_metrics(metrics).steps) if metrics.exists() else 0


def test_a_node_without_peers_ends_well_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = join(tmp_path, "--steps", "3")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "others join with: swarm-node join --swarm main --peer /ip4/127.0.0.1/tcp/" in first.stdout
    identity = (tmp_path / "identity.key").read_bytes()
    second = join(tmp_path, "--steps", "6")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed at step 3" in second.stdout
    assert (tmp_path / "identity.key").read_bytes() == identity
    assert steps_written(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "step-00000006" / "manifest.json").exists()


def test_ctrl_c_leaves_a_checkpoint_and_no_process_behind(tmp_path: Path) -> None:
    node = Running(tmp_path / "home")
    node.until(r"^step 2 ")
    children = psutil.Process(node.process.pid).children(recursive=True)
    assert node.stop() == 0, node.said
    done = steps_written(tmp_path / "home")[-1]
    assert (tmp_path / "home" / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    assert children
    assert not any(child.is_running() for child in children)


def test_a_closed_terminal_stops_a_node_like_ctrl_c_and_nohup_keeps_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which the node inherits: these tests may run under nohup themselves
    try:
        node = Running(tmp_path / "terminal")
    finally:
        signal.signal(signal.SIGHUP, before)
    node.until(r"^step 1 ")
    assert node.stop(signal.SIGHUP) == 0, node.said
    done = steps_written(tmp_path / "terminal")[-1]
    assert (tmp_path / "terminal" / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()

    kept = Running(tmp_path / "nohup", "--steps", "6", before=("nohup",))
    kept.until(r"^step 1 ")
    assert kept.stop(signal.SIGHUP) == 0, kept.said
    assert steps_written(tmp_path / "nohup") == [1, 2, 3, 4, 5, 6]


def test_a_node_whose_output_nobody_reads_any_more_trains_on_and_saves(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = [*COMMAND, "--home", str(tmp_path), *SMALL, "--steps", "3"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, text=True) as node:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        _, errors = node.communicate(timeout=HANG_S)
    assert node.returncode == 0, errors
    assert errors.count("standard output is lost") == 1
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert steps_written(tmp_path) == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").exists()
    assert "step 3 · reward" in (tmp_path / "node.log").read_text(encoding="utf-8")


def test_steps_that_could_not_be_saved_end_with_an_error(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from swarm_node import lifecycle\n"
        "from swarm_node.checkpoint import DiskFull\n"
        "def refuse(folder, checkpoint, keep=2):\n"
        "    raise DiskFull(2_000_000, 1_000, folder)\n"
        "lifecycle.save_checkpoint = refuse\n"
        "from swarm_node.cli.app import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script, "join", "--model", "tiny-s", "--home", str(tmp_path), *SMALL, "--steps", "2"]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "no checkpoint of step 2: a checkpoint needs 2.0 MB" in result.stdout
    assert "Traceback" not in result.stderr
    assert steps_written(tmp_path) == [1, 2]


def test_a_node_whose_output_nobody_reads_stops_when_it_is_told_to(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)  # full after a few lines
    command = [*COMMAND, "--home", str(tmp_path), *SMALL]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=writing, stderr=writing)
    os.close(writing)
    try:
        await_condition(lambda: "nobody reads standard output" in logged(tmp_path) and steps_written(tmp_path)[-1:] > [12], "it trains on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
    finally:
        os.close(reading)
    done = steps_written(tmp_path)[-1]
    assert (tmp_path / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()


def test_a_second_node_in_the_same_home_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    node = Running(home)
    try:
        node.until(r"^step 1 ")
        before = {path.name for path in home.iterdir()}
        second = join(home)
        assert second.returncode == 2
        assert f"in use by process {node.process.pid}" in second.stderr
        assert before <= {path.name for path in home.iterdir()}
    finally:
        node.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no-such-model"], r"no-such-model"),
        (["--peer", "/ip4/300.1.1.1/tcp/1"], r"300\.1\.1\.1"),
        (["--group-size", "1"], r"group_size.*2"),
        (["--task", "chain-sum:99"], r"no level 99"),
        (["--set", "rollout.temprature=1"], r"did you mean rollout\.temperature"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path: Path, options: list[str], message: str) -> None:
    home = tmp_path / "home"
    result = join(home, *options)
    assert result.returncode == 2
    assert re.search(message, result.stderr)
    assert "Traceback" not in result.stderr
    assert not home.exists()


def test_a_disk_without_room_for_a_checkpoint_is_said_before_anything_is_written(tmp_path: Path) -> None:
    script = (
        "import shutil, collections, sys\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        "shutil.disk_usage = lambda path: usage(10**9, 10**9 - 1000, 1000)\n"
        "sys.argv = ['swarm-node', 'join', '--model', 'tiny-s', '--home', sys.argv[1]]\n"
        "from swarm_node.cli.app import main\n"
        "main()\n"
    )
    home = tmp_path / "home"
    result = subprocess.run(
        [sys.executable, "-c", script, str(home)], env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert re.search(r"a checkpoint needs .* MB .* are free", result.stderr)
    assert not home.exists()


def status_of(home: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "swarm_node.cli.app", "status", "--home", str(home), "--json"]
    facts: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True).stdout)
    return facts


def test_two_nodes_meet_by_address_and_learn_from_each_other(tmp_path: Path) -> None:
    homes = (tmp_path / "ada", tmp_path / "ben")
    ada = Running(homes[0])
    try:
        ben = Running(homes[1], "--peer", ada.until(r"others join with.*--peer (\S+)")[1])
        try:
            await_condition(lambda: all(foreign_used(home) > 0 for home in homes), "both have learned from the other")
            # The status is a second old at most, and the first foreign group may be younger.
            await_condition(lambda: status_of(homes[0])["peers"] == 1, "the status counts the peer")
            assert status_of(homes[0])["running"]
        finally:
            assert ben.stop() == 0, ben.said
        alone_since = steps_written(homes[0])[-1]
        await_condition(lambda: steps_written(homes[0])[-1] >= alone_since + 2, "the other trains on alone")
    finally:
        assert ada.stop() == 0, ada.said


def test_a_peer_that_sends_garbage_stops_neither_the_training_nor_the_other_peers(tmp_path: Path) -> None:
    homes = (tmp_path / "ada", tmp_path / "ben")
    ada = Running(homes[0])
    try:
        address = ada.until(r"others join with.*--peer (\S+)")[1]
        ben = Running(homes[1], "--peer", address)
        try:
            await_condition(lambda: foreign_used(homes[0]) > 0, "the first has learned from the second")
            children = psutil.Process(ada.process.pid).children()
            network = [child for child in children if "libp2p.process" in " ".join(child.cmdline())]

            async def behave(host: IHost, peer: Any) -> None:
                garbage = [secrets.token_bytes(300), b"\xff" * 64, encode_varint_prefixed(secrets.token_bytes(100)), b""]
                await send(host, peer, *garbage, patience_s=1.0)
                await send(host, peer, b"\x00" * 40, protocol="/swarm-node/group/1.0.0", patience_s=1.0)

            attack(address, behave)
            steps, used = steps_written(homes[0])[-1], [foreign_used(home) for home in homes]
            await_condition(lambda: steps_written(homes[0])[-1] >= steps + 3, "training goes on")
            await_condition(
                lambda: all(foreign_used(home) > before for home, before in zip(homes, used, strict=True)), "both learn from each other"
            )
            assert [child.is_running() for child in network] == [True]
            assert ada.process.poll() is None
        finally:
            ben.stop()
    finally:
        ada.stop()


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_always_resumes_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(1)
    reached = 0
    for _ in range(10):
        node = Running(tmp_path / "home", "--set", "run.checkpoint_every=1")
        node.until(r"^step \d+ ")
        resumed = re.search(r"resumed at step (\d+)", node.said)
        assert (int(resumed[1]) if resumed else 0) >= reached
        time.sleep(moments.uniform(0, 1.5))  # the random moment itself
        node.process.kill()
        node.process.wait(HANG_S)
        whole = [path for path in (tmp_path / "home" / "checkpoints").glob("step-*") if (path / "manifest.json").exists()]
        reached = max((int(path.name.removeprefix("step-")) for path in whole), default=0)
    assert reached >= 10
    final = join(tmp_path / "home", "--steps", str(reached + 1))
    assert final.returncode == 0, final.stdout + final.stderr
    steps = steps_written(tmp_path / "home")
    assert steps == list(range(1, reached + 2))
