"""The configuration: where values come from, and how errors read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from swarm_node.cli.config import render_config
from swarm_node.config import Config, ConfigError, Loaded, Setting, entries, find_line, load_config, make_config, parse_setting, save_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def error_of(file: Path, text: str, *settings: Setting) -> str:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, settings)
    return str(caught.value)


def test_command_line_wins_over_file_wins_over_default(file: Path) -> None:
    file.write_text('swarm = "ours"\n\n[rollout]\ntemperature = 0.5\nprompts_per_step = 2\n')
    loaded = load_config(file, [Setting("rollout.temperature", 0.75, "--set")])
    assert (loaded.config.swarm, loaded.config.rollout.temperature, loaded.config.rollout.prompts_per_step) == ("ours", 0.75, 2)
    sources = {entry.key: entry.source for entry in entries(loaded)}
    assert sources["swarm"] == f"{file}, line 1"
    assert sources["rollout.prompts_per_step"] == f"{file}, line 5"
    assert sources["rollout.temperature"] == "--set on the command line"
    assert sources["rollout.max_new_tokens"] == "default"


def test_the_home_folders_config_is_read_when_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\nseed = 7\n")
    loaded = load_config(settings=[Setting("run.home", tmp_path, "--home")])
    assert loaded.config.run.seed == 7
    assert loaded.config.home == tmp_path


def test_the_default_home_is_named_after_the_swarm_and_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_config(settings=[Setting("swarm", "ours", "--swarm")]).config.home == tmp_path / ".swarm-node" / "ours"


def test_every_option_says_what_it_means() -> None:
    assert [entry.key for entry in entries(Loaded(Config(), {})) if not entry.meaning] == []


def test_a_value_outside_its_limits_is_named_with_line_key_value_and_limit(file: Path) -> None:
    message = error_of(file, "# a comment\n[rollout]\n\ntemperature = 9\n")
    assert message.startswith(f"{file}, line 4: rollout.temperature = 9: should be less than or equal to 4")
    assert "Sampling temperature" in message


def test_all_problems_of_a_file_are_told_at_once(file: Path) -> None:
    message = error_of(file, '[rollout]\ntemperature = 9\n[run]\nsteps = 0\nminutes = "long"\n')
    assert [line.split(": ")[0] for line in message.splitlines()] == [f"{file}, line {line}" for line in (2, 4, 5)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('swarm = "a"\n[rollout\n', 2),
        ("[rollout]\ntemperature = = 1\n", 2),
        ('[run]\nseed = 1\n\nhome = "unfinished', 4),
        ("[run]\nseed = 1\nseed = 2\n", 3),
    ],
)
def test_broken_toml_is_named_with_its_line(file: Path, text: str, line: int) -> None:
    assert error_of(file, text).startswith(f"{file}, line {line}: not TOML: ")


def test_bytes_that_are_no_text_are_named_with_their_line(file: Path) -> None:
    file.write_bytes(b"[run]\nseed = 1 # \xff\n")
    with pytest.raises(ConfigError, match=r"line 2: byte 0xff is not UTF-8"):
        load_config(file)


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rollout]\ntemprature = 1\n", "line 2: unknown option rollout.temprature; did you mean rollout.temperature?"),
        ("[rollout]\ngroup_size = 4\n", "line 2: unknown option rollout.group_size; did you mean control.group_size?"),
        ("[rolout]\ntemperature = 1\n", "line 1: unknown option rolout; did you mean rollout?"),
        ("rollout.temprature = 1\n", "line 1: unknown option rollout.temprature; did you mean rollout.temperature?"),
        ("[task]\nzzz = 1\n", "line 2: unknown option task.zzz; known here: name, seed"),
    ],
)
def test_an_unknown_key_brings_the_nearest_one_to_mind(file: Path, text: str, expected: str) -> None:
    assert error_of(file, text) == f"{file}, {expected}"


def test_a_value_where_a_table_belongs_is_refused_in_words(file: Path) -> None:
    assert "line 1: rollout is a table: write [rollout]" in error_of(file, "rollout = 3\n")
    assert "`rollout` is a value and not a table" in error_of(file, "rollout = 3\n", parse_setting("rollout.temperature=1"))


def test_a_rooms_own_rule_keeps_its_words_and_gets_a_line(file: Path) -> None:
    assert error_of(file, "[control]\ncandidates = [8, 4]\n").startswith(f"{file}, line 1: [control]: ")
    assert error_of(file, '[network]\nheartbeat_s = 1\npeers = ["nonsense"]\n').startswith(
        f"{file}, line 3: network.peers: 'nonsense' is not"
    )


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_group_of_less_than_two_is_refused_wherever_it_is_written(file: Path, size: int) -> None:
    assert f"line 2: control.group_size = {size}: should be greater than or equal to 2" in error_of(
        file, f"[control]\ngroup_size = {size}\n"
    )
    assert error_of(file, "", Setting("control.group_size", size, "--group-size")).startswith(
        f"--group-size: control.group_size = {size}: "
    )
    assert "control.candidates = " in error_of(file, f"[control]\ncandidates = [{size}, 8]\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run.seed=3", 3),
        ("rollout.temperature = 0.5", 0.5),
        ("model.lora=true", True),
        ("control.candidates=[2, 4]", [2, 4]),
        ("model.name=tiny-s", "tiny-s"),
        ('model.name="tiny-s"', "tiny-s"),
        ("task.name=gsm8k:/data/a=b", "gsm8k:/data/a=b"),
        ("run.steps=none", None),
    ],
)
def test_settings_are_read_as_toml_else_as_text(text: str, value: object) -> None:
    setting = parse_setting(text)
    assert (setting.key, setting.value) == (text.partition("=")[0].strip(), value)


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        parse_setting("rollout.temperature")


def test_none_takes_back_what_the_file_set(file: Path) -> None:
    file.write_text("[run]\nsteps = 5\n")
    assert load_config(file, [parse_setting("run.steps=none")]).config.run.steps is None


def test_what_config_show_prints_is_a_file_that_gives_the_same_configuration(file: Path) -> None:
    settings = [
        parse_setting("control.candidates=[2, 4]"),
        parse_setting("learning.kl_threshold=inf"),
        Setting("run.home", Path('/a "b"'), "--home"),
    ]
    loaded = load_config(file_of(file, 'swarm = "ours"\n'), settings)
    text = render_config(loaded)
    file.write_text(text, encoding="utf-8")
    assert load_config(file).config == loaded.config
    assert tomllib.loads(text)["control"]["candidates"] == [2, 4]
    assert "(--home on the command line)" in text


def file_of(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def test_a_saved_configuration_holds_what_differs_and_nothing_of_one_start_only(file: Path) -> None:
    settings = [parse_setting(text) for text in ("model.name=tiny-s", "run.steps=3", "run.minutes=2", "run.seed=4", "swarm=ours")]
    config = load_config(file_of(file, ""), settings).config
    file.unlink()
    save_config(file, config)
    assert tomllib.loads(file.read_text()) == {"swarm": "ours", "model": {"name": "tiny-s"}, "run": {"seed": 4}}
    save_config(file, Config())
    assert tomllib.loads(file.read_text())["swarm"] == "ours", "a file that exists is the user's"


def test_a_saved_configuration_names_the_same_files_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of the model, the task and the schedule; what only looks like a path, or is called like a folder that is there, stays."""
    start = tmp_path / "start"
    for folder in ("llama", "tiny-s", "auto"):
        (start / "sub" / folder).mkdir(parents=True)
        (start / folder).mkdir()
    (start / "own.json").write_text("{}")
    monkeypatch.chdir(start)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {
        "model.name": ["./llama", "sub/../llama", "~/start/llama", "tiny-s", "auto", "owner/name", "./nowhere"],
        "task.name": ["gsm8k:some.jsonl", "gsm8k:~/some.jsonl", "gsm8k", "chain-sum:3", "reasoning-gym:chain_sum?max_terms=3"],
        "sparsity.schedule": ["own.json", "qwen3-1.7b@0.86", "dense", "auto"],
    }
    expected = {
        "model.name": [f"{start}/llama", f"{start}/sub/../llama", f"{start}/llama", "tiny-s", "auto", "owner/name", "./nowhere"],
        "task.name": [f"gsm8k:{start}/some.jsonl", f"gsm8k:{tmp_path}/some.jsonl", *given["task.name"][2:]],
        "sparsity.schedule": [f"{start}/own.json", *given["sparsity.schedule"][1:]],
    }
    saved = tmp_path / "saved.toml"
    for key, values in given.items():
        table, _, name = key.partition(".")
        for value, wanted in zip(values, expected[key], strict=True):
            saved.unlink(missing_ok=True)
            monkeypatch.chdir(start)
            save_config(saved, load_config(settings=[Setting(key, value, "--set")]).config)
            monkeypatch.chdir("/")
            read = load_config(saved).config.model_dump()
            assert read[table][name] == wanted


def test_a_task_file_may_lie_deep(tmp_path: Path) -> None:
    deep = f"gsm8k:/{'/'.join(['folder'] * 100)}/some.jsonl"
    save_config(tmp_path / "saved.toml", load_config(settings=[Setting("task.name", deep, "--task")]).config)
    assert load_config(tmp_path / "saved.toml").config.task.name == deep


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("swarm", 1),
        ("rollout.temperature", 4),
        ("rollout.missing", 3),
        ("run.seed", 6),
        ("run", 5),
        ("nowhere.at.all", 1),
        ("pool.max_groups", 8),
    ],
)
def test_lines_are_found_below_tables_dotted_keys_and_quotes(key: str, line: int) -> None:
    text = 'swarm = "a"\n# temperature = 3\n[ rollout ] # sampled\n"temperature" = 1\n[run]\nseed = 1\n[pool]\nmax_groups=3\n'
    assert find_line(text, key) == line
    assert find_line("rollout.temperature = 3\nrollout.max_batch = 1\n", "rollout.max_batch") == 2


def test_constants_are_no_options_and_an_old_file_that_sets_one_still_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[network]\nping_s = 3.0\nmax_peers = 7\n[learning]\nbeta1 = 0.5\n")
    loaded = load_config(file)
    assert (loaded.config.network.ping_s, loaded.config.network.max_peers, loaded.config.learning.beta1) == (10.0, 7, 0.9)
    assert caplog.messages == [
        f"{file}, line 2: network.ping_s is no option any more and is ignored",
        f"{file}, line 5: learning.beta1 is no option any more and is ignored",
    ]
    with pytest.raises(ConfigError, match=r"--set network\.ping_s: this is a constant"):
        load_config(settings=[parse_setting("network.ping_s=3.0")])
    with pytest.raises(ConfigError, match=r"unknown option network\.pings") as caught:
        load_config(settings=[parse_setting("network.pings=3.0")])
    assert "ping_s" not in str(caught.value)
    assert "network.ping_s" not in {entry.key for entry in entries(load_config())}
    saved = tmp_path / "saved.toml"
    save_config(saved, make_config({"network": {"ping_s": 3.0, "max_peers": 7}}))
    assert tomllib.loads(saved.read_text()) == {"network": {"max_peers": 7}}


def test_there_are_few_enough_options_to_read() -> None:
    assert len(list(entries(load_config()))) <= 80
