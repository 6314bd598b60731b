"""The command line: help, exit codes, and what bad input costs (nothing)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from swarm_node.cli import app as cli
from swarm_node.cli.join import SPINS
from swarm_node.cli.output import print_json
from swarm_node.config import Config
from swarm_node.home import Home
from swarm_node.network.identity import load_or_create
from swarm_node.observe import report
from swarm_node.observe.metrics import MetricsWriter, StepRow
from tests.support.waiting import HANG_S


@dataclass(frozen=True)
class Result:
    """What a command came to."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `swarm-node ARGUMENTS` in this process, with a home folder and working directory of its own."""
    (tmp_path / "user").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path / "work")

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["swarm-node", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return Result(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def written(tmp_path: Path) -> list[Path]:
    """Everything below the user's home folder and the working directory."""
    return sorted(path for folder in ("user", "work") for path in (tmp_path / folder).rglob("*"))


def commands() -> Iterator[tuple[str, ...]]:
    def walk(command: object, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        children = getattr(command, "commands", None)
        if not children:
            yield names
        for name, child in (children or {}).items():
            yield from walk(child, (*names, name))

    return walk(typer.main.get_command(cli.app), ())


# -- help -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", commands(), ids=" ".join)
def test_every_command_has_help_with_an_example_of_itself(run: Run, names: tuple[str, ...]) -> None:
    result = run(*names, "--help")
    assert result.code == 0
    assert f"Example: swarm-node {' '.join(names)}" in " ".join(result.out.split())


def test_the_commands_are_those_that_are_promised() -> None:
    promised = {"join", "eval", "report", "status"}
    promised |= {
        "model list",
        "model pull",
        "model info",
        "config show",
        "config check",
        "identity show",
        "identity backup",
        "identity restore",
    }
    assert promised <= {" ".join(names) for names in commands()}


@pytest.mark.parametrize("arguments", [["--help"], ["join", "--help"], ["model", "list"], ["config", "show"]])
def test_nothing_slow_is_imported_where_it_is_not_needed(arguments: list[str]) -> None:
    code = f"""
import sys
from swarm_node.cli.app import main
sys.argv = ["swarm-node", *{arguments!r}]
try:
    main()
finally:
    print(sorted({{"torch", "transformers", "libp2p", "hivemind", "plotly"}} & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == "[]\n"
    assert result.stdout


# -- exit codes -----------------------------------------------------------------------------------------------------------------------


def test_no_command_shows_help_and_a_wrong_one_is_bad_input(run: Run) -> None:
    assert "Commands" in run().out
    assert run("jion").code == 2
    assert run("join", "--setps", "3").code == 2


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with one step of metrics."""
    folder = tmp_path / "home"
    folder.mkdir()
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.write(StepRow(step=1, time=1.0, groups_sent=4))
    writer.close()
    return folder


def test_a_value_error_of_somebody_else_is_no_bad_input(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folders: object) -> None:
        raise ValueError("not one of ours")

    monkeypatch.setattr(report, "read_runs", fail)
    result = run("report", home)
    assert result.code == 70
    assert "internal error: ValueError: not one of ours" in result.err
    assert "Traceback" not in result.err


def test_ctrl_c_ends_with_130(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folders: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "read_runs", interrupt)
    assert run("report", home).code == 130


# -- bad input: one paragraph, exit code 2, nothing written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--group-size", "1"], "--group-size: control.group_size = 1: should be greater than or equal to 2"),
        (["--peer", "/ip4/192.0.2.7/udp/1"], "--peer: network.peers: '/ip4/192.0.2.7/udp/1' is not an address that can be used: only TCP"),
        (["--peer", "somewhere"], "'somewhere' is not an address"),
        (
            ["--directory", "/ip4/192.0.2.7/tcp/1"],
            "--directory: network.directory_peers: '/ip4/192.0.2.7/tcp/1' does not end in /p2p/PEER-ID",
        ),
        (["--listen", "0.0.0.0:1"], "--listen: network.listen: '0.0.0.0:1' is not an address"),
        (["--listen", "/dns4/ada/tcp/5"], "'/dns4/ada/tcp/5' is a name: give the address of this machine to listen on"),
        (["--steps", "0"], "--steps: run.steps = 0: should be greater than or equal to 1"),
        (["--minutes", "-1"], "--minutes: run.minutes = -1.0: should be greater than 0"),
        (["--swarm", "../up"], "--swarm: swarm = "),
        (["--set", "rollout.temprature=1"], "--set: unknown option rollout.temprature; did you mean rollout.temperature?"),
        (["--set", "rollout.temperature"], "write section.key=value"),
        (["--config", "missing.toml"], "missing.toml: cannot be read: No such file"),
        (["--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["--task", "no-such-task"], "unknown task 'no-such-task'"),
    ],
)
def test_bad_input_to_join_costs_nothing(run: Run, tmp_path: Path, arguments: list[str], expected: str) -> None:
    result = run("join", *arguments)
    assert result.code == 2
    assert expected in result.err
    assert "Traceback" not in result.err
    assert written(tmp_path) == []


def test_a_node_s_threads_wait_for_each_other_as_long_as_it_says_or_its_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert run("join", "--set", "nothing=1").code == 2
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert run("join", "--set", "nothing=1").code == 2
    assert os.environ["GOMP_SPINCOUNT"] == SPINS
    monkeypatch.delenv("GOMP_SPINCOUNT")


def test_an_unreadable_config_is_named_with_its_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[run]\nseed = 1\nhome = "unfinished\n')
    for arguments in (["join", "--config"], ["config", "show", "--config"], ["config", "check"]):
        result = run(*arguments, file)
        assert result.code == 2
        assert f"{file}, line 3: not TOML" in result.err
    assert written(tmp_path) == []


def test_a_home_in_use_is_named_with_the_pid_of_its_process(run: Run, tmp_path: Path) -> None:
    hold = "import sys, pathlib; from swarm_node.home import Home; h = Home.open(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "home")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout
    other.stdout.readline()
    try:
        before = sorted((tmp_path / "home").rglob("*"))
        result = run("join", "--home", tmp_path / "home")
        assert result.code == 2
        assert f"in use by process {other.pid}" in result.err
        assert sorted((tmp_path / "home").rglob("*")) == before
    finally:
        other.communicate(b"\n")
    assert written(tmp_path) == []


# -- what commands print --------------------------------------------------------------------------------------------------------------


def test_config_show_prints_where_every_value_came_from(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[rollout]\ntemperature = 0.5\n")
    shown = {entry["key"]: entry for entry in json.loads(run("config", "show", "--config", file, "--set", "run.seed=4", "--json").out)}
    assert (shown["rollout.temperature"]["value"], shown["rollout.temperature"]["source"]) == (0.5, f"{file}, line 2")
    assert (shown["run.seed"]["value"], shown["run.seed"]["source"]) == (4, "--set on the command line")
    assert shown["control.delta"]["source"] == "default"
    assert shown["control.delta"]["meaning"]
    text = run("config", "show", "--config", file).out
    (tmp_path / "again.toml").write_text(text)
    assert run("config", "check", tmp_path / "again.toml").code == 0


def test_join_puts_every_option_where_it_belongs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm_node import lifecycle

    seen: list[Config] = []

    def remember(config: Config, *, profile: bool) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(lifecycle, "run", remember)
    peers = [f"{where}/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB" for where in ("/ip4/192.0.2.7/tcp/1", "/dns4/ada/tcp/2")]
    result = run(
        *("join", "--model", "tiny-s", "--lora", "--task", "chain-sum:2", "--swarm", "ours", "--peer", peers[0], "--peer", peers[1]),
        *("--listen", "/ip4/127.0.0.1/tcp/0", "--steps", 3, "--minutes", 2, "--group-size", 6, "--seed", 9, "--home", tmp_path / "h"),
        *("--set", "rollout.prompts_per_step=2", "--set", "control.candidates=[2, 4]"),
    )
    assert (result.err, result.code) == ("", 0)
    (config,) = seen
    assert (config.model.name, config.model.lora, config.task.name, config.swarm) == ("tiny-s", True, "chain-sum:2", "ours")
    assert (config.network.peers, config.network.listen) == (tuple(peers), ("/ip4/127.0.0.1/tcp/0",))
    assert (config.run.steps, config.run.minutes, config.run.seed, config.home) == (3, 2.0, 9, tmp_path / "h")
    assert (config.control.group_size, config.control.candidates, config.rollout.prompts_per_step) == (6, (2, 4), 2)


def test_full_takes_back_the_files_lora(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarm_node import lifecycle

    seen: list[bool] = []

    def remember(config: Config, *, profile: bool) -> int:
        seen.append(config.model.lora)
        return 0

    monkeypatch.setattr(lifecycle, "run", remember)
    (tmp_path / "c.toml").write_text("[model]\nlora = true\n")
    run("join", "--config", tmp_path / "c.toml")
    run("join", "--config", tmp_path / "c.toml", "--full")
    assert seen == [True, False]


def test_identity_is_shown_backed_up_and_restored_but_never_overwritten(run: Run, tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    peer = load_or_create(home).peer_id
    assert json.loads(run("identity", "show", "--home", home, "--json").out)["peer_id"] == peer
    shown = run("identity", "show", "--home", home)
    assert peer in shown.out
    assert (home / "identity.key").read_text().strip() not in shown.out
    assert run("identity", "backup", tmp_path / "saved.key", "--home", home).code == 0
    assert run("identity", "backup", tmp_path / "saved.key", "--home", home).code == 2
    assert peer in run("identity", "restore", tmp_path / "saved.key", "--home", other).out
    stranger = load_or_create(tmp_path / "stranger").peer_id
    refused = run("identity", "restore", tmp_path / "saved.key", "--home", tmp_path / "stranger")
    assert refused.code == 2
    assert stranger in refused.err
    assert run("identity", "show").code == 2


def test_models_are_listed_and_described(run: Run) -> None:
    listed = {model["name"]: model for model in json.loads(run("model", "list", "--json").out)}
    assert {"tiny-s", "tiny-m", "tiny-m-words", "smollm2-135m"} <= listed.keys()
    assert all(name in run("model", "list").out for name in listed)
    assert json.loads(run("model", "info", "smollm2-135m", "--json").out)["license"] == "Apache-2.0"
    assert "licence" in run("model", "info", "tiny-s").out
    for command in ("info", "pull"):
        unknown = run("model", command, "gpt-9")
        assert unknown.code == 2
        assert "unknown model 'gpt-9'. Known names: auto, tiny-s" in unknown.err


def test_numbers_that_json_lacks_are_null_or_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"not measured": math.nan, "ratios": [math.inf, -math.inf, 0.5], 3: (1, Path("a"))})
    assert json.loads(capsys.readouterr().out) == {"not measured": None, "ratios": ["inf", "-inf", 0.5], "3": [1, "a"]}


def test_report_writes_the_file_that_it_names(run: Run, home: Path, tmp_path: Path) -> None:
    shown = json.loads(run("report", home, "--out", tmp_path / "r.html", "--json").out)
    assert (shown["report"], shown["nodes"][0]["groups_sent"]) == (str(tmp_path / "r.html"), 4)
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert run("report", tmp_path / "nothing").code == 2


def test_status_says_whether_the_node_runs_and_what_counters_mean(run: Run, tmp_path: Path) -> None:
    assert run("status", "--home", tmp_path).code == 2
    facts = {
        "state": "learning",
        "since": 1.0,
        "waiting_for": "",
        "step": 3,
        "groups_received": 5,
        "rejections": {"stale": 2},
        "addresses": [],
    }
    (tmp_path / "status.json").write_text(json.dumps(facts))
    gone = run("status", "--home", tmp_path)
    assert gone.code == 1
    assert "not running; it was learning" in gone.out
    with Home.open(tmp_path):
        shown = run("status", "--home", tmp_path)
        assert shown.code == 0
        assert "5  (arrived from peers, before any check)" in shown.out
        assert "stale 2" in shown.out
        assert json.loads(run("status", "--home", tmp_path, "--json").out) == {"running": True, **facts}


def test_eval_needs_something_to_evaluate(run: Run, tmp_path: Path) -> None:
    assert "name a model with --model" in run("eval").err
    assert run("eval", "--home", tmp_path / "nothing").code == 2
    assert run("eval", "--model", "tiny-s", "--problems", "0").code == 2
    assert run("eval", "--model", "tiny-s", "--split", "train").code == 2
    assert written(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('task.name = "chain-sum:99"', "no level 99"),
        ('task.name = "juggling"', "unknown task 'juggling'"),
        ('task.name = "gsm8k:/no/such/folder"', "/no/such/folder"),
        ('model.name = "gpt-9"', "unknown model 'gpt-9'"),
        ('model.name = "/no/such/folder"', "/no/such/folder"),
        ('sparsity.schedule = "qwen9"', "no schedule 'qwen9'"),
    ],
)
def test_config_check_finds_what_join_would_refuse(run: Run, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "c.toml").write_text(line + "\n")
    result = run("config", "check", tmp_path / "c.toml")
    assert result.code == 2
    assert message in result.err
    assert run("config", "show", "--config", tmp_path / "c.toml").code == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b"null", b"[" * 100_000])
def test_a_damaged_status_is_named(run: Run, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "status.json").write_bytes(damage)
    result = run("status", "--home", tmp_path)
    assert result.code == 1
    assert "not running; it was unknown" in result.out
    assert f"{tmp_path / 'status.json'} is damaged" in result.out
    with Home.open(tmp_path):
        shown = run("status", "--home", tmp_path, "--json")
        assert (shown.code, json.loads(shown.out)["running"]) == (0, True)


def test_config_check_names_every_problem_with_its_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\nname = "gpt-9"\n\n[task]\nname = "juggling"\n')
    result = run("config", "check", file)
    assert result.code == 2
    lines = result.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"swarm-node: {file}, line 5: task.name: unknown task 'juggling'")
    assert lines[1].startswith(f"{file}, line 2: model.name: unknown model 'gpt-9'")


def test_a_status_of_another_version_or_with_impossible_values_is_shown_as_it_is(run: Run, tmp_path: Path) -> None:
    facts = '{"state": ["x"], "since": 1e999, "updated": "noon", "waiting_for": {}, "peers": NaN, "new": {"a": [1]}, "step": 1%s}'
    (tmp_path / "status.json").write_text(facts % ("0" * 4000))
    with Home.open(tmp_path):
        shown = run("status", "--home", tmp_path)
        assert shown.code == 0
        assert "updated  ? ago" in shown.out
        assert "new      a [1]" in shown.out
        assert json.loads(run("status", "--home", tmp_path, "--json").out)["peers"] is None


def test_a_report_passes_over_what_it_cannot_read_and_says_so(run: Run, home: Path, tmp_path: Path) -> None:
    with (home / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"kind":"step","step":"two","time":1}\n{"kind":"step","st')
    result = run("report", home, "--out", tmp_path / "r.html", "--json")
    assert json.loads(result.out)["nodes"][0]["steps"] == 1
    assert "lines that cannot be read are passed over: 3, the first is line 2" in result.err


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "show", "--json"], ["model", "list"]])
def test_output_on_a_full_disk_is_named_and_no_fault_of_ours(arguments: list[str], buffered: str) -> None:
    command = [sys.executable, "-m", "swarm_node.cli.app", *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False,
            env=os.environ | {"PYTHONUNBUFFERED": buffered},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "swarm-node: standard output cannot be written: No space left on device\n")


def test_a_reader_that_has_seen_enough_hears_nothing_more() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "swarm_node.cli.app", "config", "show"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_json_is_whole_where_the_terminal_knows_ascii_alone(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"waiting_for": "λ·\\ud800"}')
    command = [sys.executable, "-m", "swarm_node.cli.app", "status", "--home", str(tmp_path), "--json"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=environment)
    assert json.loads(done.stdout) == {"running": False, "waiting_for": "λ·\ud800"}


INTERNAL = """
import sys
from swarm_node import home
def broken(path):
    error = KeyError("a bug")
    error.add_note("learning for 3 s at step 12")
    raise error
home.holder = broken
from swarm_node.cli.app import main
sys.argv = ["swarm-node", "status", "--home", sys.argv[1]]
main()
"""


def test_an_error_that_nobody_foresaw_says_what_to_send_and_hides_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", INTERNAL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    assert "internal error: KeyError: 'a bug'" in done.stderr
    assert f"command   swarm-node status --home {tmp_path}" in done.stderr
    (log,) = tmp_path.glob("swarm-node-error-*.log")
    assert f"log       {log}" in done.stderr
    assert "in broken)" in done.stderr
    assert "state     learning for 3 s at step 12" in done.stderr
    assert "KeyError: 'a bug'" in log.read_text()
    assert "Traceback" in log.read_text()


def test_known_errors_are_a_sentence_also_where_nobody_reads_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarm_node.cli.app", "status", "--home", str(tmp_path)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stderr=full, stdout=full, timeout=HANG_S, check=False)
    assert done.returncode == 2


def test_eval_leaves_over_long_problems_out_and_says_how_many_and_why(run: Run) -> None:
    """tiny-s reads characters in a context of 2,048; one of two held-out questions has 3,500."""
    lines = [json.dumps({"question": question, "answer": "#### 2"}) for question in ("What is 1 + 1?", "word " * 700 + "What is 1 + 1?")]
    Path("train.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "#### 4"}')
    Path("test.jsonl").write_text("\n".join(lines))
    arguments = ("eval", "--model", "tiny-s", "--task", "gsm8k:.", "--problems", "6", "--samples", "1", "--max-new-tokens", "4")
    shown = run(*arguments)
    assert shown.code == 0
    (row,) = json.loads(run(*arguments, "--json").out)
    assert 0 < row["left_out"] < 6
    assert f"tiny-s: {row['left_out']} of 6 problems were left out, first: {row['left_out_why']}" in shown.out
    assert "max_new_tokens = 4 do not fit the context of 2048" in row["left_out_why"]
    assert row["per_problem"].count(None) == row["left_out"]

    Path("test.jsonl").write_text(lines[1])
    refused = run(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert "none of 6 problems of gsm8k@" in refused.err
    assert "choose another task or model, or fewer new tokens" in refused.err
