"""The configuration: one schema, composed of the rooms' option tables; defaults < file < command line.

A file is TOML: the swarm's name, then one table a room. Every value remembers where it came from, and every error names the file, the
line, the key, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from swarm_node.control.options import SagcOptions
from swarm_node.home import default_home
from swarm_node.learning.options import DistillOptions, LearningOptions, PoolOptions
from swarm_node.network.admission.options import AdmissionOptions
from swarm_node.network.options import NetworkOptions
from swarm_node.options import Options, constant, is_constant
from swarm_node.policy.options import ModelOptions
from swarm_node.rollout.options import RolloutOptions, SparsityOptions
from swarm_node.tasks.options import TaskOptions

log = logging.getLogger(__name__)

DEFAULT = "default"
RUN_ONLY = frozenset({"run.steps", "run.minutes", "run.home"})
"""Belongs to one start of a node, not to the node: never saved into its home."""


class RunOptions(Options):
    """`[run]`: how long the node runs, and when it saves and evaluates."""

    steps: int | None = Field(None, ge=1)
    """Stop when the policy has taken this many steps in all, resumed ones included; not set: no limit."""
    minutes: float | None = Field(None, gt=0)
    """Stop after this many minutes of this start; not set: no limit."""
    checkpoint_every: int = Field(50, ge=1)
    """Steps between checkpoints. There is always one when the node stops."""
    checkpoint_minutes: float = Field(10.0, gt=0)
    """Minutes after which a checkpoint is due, however few steps there were."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on the held-out split; there is one before the first step and one at the end as well. 0: none at all."""
    eval_problems: int = Field(64, ge=1, le=100_000)
    """Problems of an evaluation."""
    eval_samples: int = Field(4, ge=1, le=4096)
    """Completions sampled for each of them."""
    eval_temperature: float = constant(1.0, ge=0.05, le=4)
    """Sampling temperature of evaluations."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything this node draws: rollout noise, control, the pool. Same seed, same run."""
    home: Path | None = None
    """Home folder; not set: `~/.swarm-node/<swarm>`."""


class Config(Options):
    """Everything that a node can be told."""

    swarm: str = Field("main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the swarm: letters, digits, `.`, `_` and `-`. Nodes meet when swarm, task and tokenizer are the same."""
    model: ModelOptions = ModelOptions()
    task: TaskOptions = TaskOptions()
    rollout: RolloutOptions = RolloutOptions()
    sparsity: SparsityOptions = SparsityOptions()
    control: SagcOptions = SagcOptions()
    learning: LearningOptions = LearningOptions()
    distill: DistillOptions = DistillOptions()
    pool: PoolOptions = PoolOptions()
    network: NetworkOptions = NetworkOptions()
    admission: AdmissionOptions = AdmissionOptions()
    run: RunOptions = RunOptions()

    @property
    def home(self) -> Path:
        """The node's home folder, absolute."""
        return (self.run.home or default_home(self.swarm)).expanduser().absolute()


class ConfigError(ValueError):
    """The configuration cannot be used. The message names the place, the key, the value and what is allowed, one problem a line."""


@dataclass(frozen=True)
class Setting:
    """One value from the command line."""

    key: str
    """Dotted, for example `rollout.temperature`."""
    value: Any
    option: str
    """How the user gave it, for messages: `--set` or `--model`."""


@dataclass(frozen=True)
class Loaded:
    """A configuration and where its values came from."""

    config: Config
    sources: Mapping[str, str]
    """Dotted key -> `FILE, line N` or the option; keys that are missing here have their default."""


@dataclass(frozen=True)
class Entry:
    """One option, as `config show` prints it."""

    key: str
    value: Any
    meaning: str
    source: str


def parse_setting(text: str) -> Setting:
    """`section.key=value` of `--set`. The value is read as TOML (`3`, `0.5`, `true`, `[4, 8]`), else taken as text; `none` unsets.

    Raises:
        ConfigError: there is no `=`.
    """
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text}: write section.key=value, for example --set rollout.temperature=0.9")
    try:
        value = None if raw == "none" else tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    return Setting(key, value, "--set")


def load_config(file: Path | None = None, settings: Sequence[Setting] = ()) -> Loaded:
    """Defaults, overlaid with `file`, overlaid with `settings` (later ones win).

    Without `file`, `config.toml` of the home folder is read where there is one.

    Raises:
        ConfigError: a file that cannot be read or parsed, an unknown key, a value outside its limits.
    """
    if file is None:
        beside = _home_config(settings)
        file = beside if beside.is_file() else None
    text = _read(file) if file else ""
    values = _parse(text, file) if file else {}
    for key in [key for key in _keys(values) if _is_constant(key)]:
        log.warning("%s, line %d: %s is no option any more and is ignored", file, find_line(text, key), key)
        _drop(values, key)
    for setting in settings:
        if _is_constant(setting.key):
            raise ConfigError(f"{setting.option} {setting.key}: this is a constant, and no option")
    sources = {key: f"{file}, line {find_line(text, key)}" for key in _keys(values)}
    for setting in settings:
        _assign(values, setting)
        sources = {key: source for key, source in sources.items() if not key.startswith(f"{setting.key}.")}
        sources[setting.key] = f"{setting.option} on the command line"
    try:
        return Loaded(Config.model_validate(values), sources)
    except ValidationError as error:
        options = {setting.key: setting.option for setting in settings}
        problems = dict.fromkeys(_problem(item, options, text, file) for item in error.errors())
        raise ConfigError("\n".join(problems)) from None


def make_config(values: Mapping[str, Any]) -> Config:
    """A configuration from tables, without any file.

    Raises:
        ConfigError: an unknown key, or a value outside its limits.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_problem(item, {}, "", None) for item in error.errors()))) from None


def entries(loaded: Loaded) -> Iterator[Entry]:
    """Every option of every table, in the order of the schema."""

    def walk(options: Options, prefix: str) -> Iterator[Entry]:
        for name, field in type(options).model_fields.items():
            value, key = getattr(options, name), prefix + name
            if is_constant(field):
                continue
            if isinstance(value, Options):
                yield from walk(value, f"{key}.")
            else:
                yield Entry(key, value, " ".join((field.description or "").split()), loaded.sources.get(key, DEFAULT))

    # TOML has no way back from a table to the top, so plain values come first.
    return iter(sorted(walk(loaded.config, ""), key=lambda entry: "." in entry.key))


def save_config(path: Path, config: Config) -> None:
    """Write what differs from the defaults as TOML, so that the next start needs no options. An existing file is the user's and stays.

    What concerns one start only (`run.steps`, `run.minutes`, `run.home`) is left out.
    """
    if path.exists():
        return
    values = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    for key in list(_keys(values)):
        if key in RUN_ONLY or _is_constant(key):
            _drop(values, key)
    path.write_text(tomli_w.dumps({key: value for key, value in values.items() if value != {}}), encoding="utf-8")


def find_line(text: str, key: str) -> int:
    """The line (from 1) that sets the dotted `key` in a TOML text, or the line of the closest table or value around it."""
    best, best_depth, table = 1, 0, ""
    wanted = key.split(".")
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+([^\]#]+)\]", line):
            table = _plain_key(header[1])
            found = table
        elif assignment := re.match(r"\s*([\w\"'.\- ]+?)\s*=", line):
            found = ".".join(filter(None, (table, _plain_key(assignment[1]))))
        else:
            continue
        parts = found.split(".")
        if parts == wanted[: len(parts)] and len(parts) > best_depth:
            best, best_depth = number, len(parts)
    return best


def _home_config(settings: Sequence[Setting]) -> Path:
    """`config.toml` of the home folder that the command line names."""
    given = {setting.key: setting.value for setting in settings}
    home = given.get("run.home")
    return (Path(home).expanduser() if home else default_home(str(given.get("swarm", Config().swarm)))) / "config.toml"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}, line {line}: byte {error.object[error.start]:#04x} is not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; give another file with --config") from None


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", str(error))
        line = int(place[1]) if place and place[1] else max(1, len(text.splitlines()))
        shown = text.splitlines()[line - 1].strip() if text.strip() else ""
        reason = re.sub(r"\s*\(at .*\)$", "", str(error))
        raise ConfigError(f"{file}, line {line}: not TOML: {reason}: {shown}") from None


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _assign(values: dict[str, Any], setting: Setting) -> None:
    table = values
    *tables, name = setting.key.split(".")
    for part in tables:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{setting.option} {setting.key}: `{part}` is a value and not a table")
        table = inner
    table[name] = setting.value


def _drop(values: dict[str, Any], key: str) -> None:
    *tables, name = key.split(".")
    for part in tables:
        values = values[part]
    del values[name]


def _is_constant(key: str) -> bool:
    _, field, depth = _field(key.split("."))
    return field is not None and depth == key.count(".") + 1 and is_constant(field)


def _problem(error: Any, options: Mapping[str, str], text: str, file: Path | None) -> str:
    """One line for one of pydantic's errors."""
    path = [str(part) for part in error["loc"]]
    table, field, depth = _field(path)
    unknown = error["type"] == "extra_forbidden"
    key = ".".join(path if unknown else path[:depth])
    place = options.get(key) or (f"{file}, line {find_line(text, key)}" if file else "command line")
    if unknown:
        return f"{place}: unknown option {key}{_suggest(path[-1], table, '.'.join(path[:-1]))}"
    reason = re.sub(r"^Value error, ", "", error["msg"])
    reason = re.sub(r"^Input should", "should", reason)
    if error["type"] == "model_type":
        return f"{place}: {key} is a table: write [{key}], and its options below it"
    if not field or isinstance(field.default, Options):  # a rule about several options, which it names itself
        return f"{place}: [{key}]: {reason}"
    value = json.dumps(error["input"], default=str, ensure_ascii=False)
    if error["type"] == "value_error":  # a room's own check: it says all there is to say
        return f"{place}: {key}: {reason}"
    return f"{place}: {key} = {value}: {reason} ({_first_sentence(field)})"


def _first_sentence(field: FieldInfo) -> str:
    return re.split(r"(?<=\.)\s", " ".join((field.description or "").split()), maxsplit=1)[0]


def _field(path: Iterable[str]) -> tuple[type[Options], FieldInfo | None, int]:
    """The innermost table on an error's path, the field it names there, and how much of the path that took."""
    table: type[Options] = Config
    depth = 0
    for part in path:
        field = table.model_fields.get(part)
        if field is None:
            return table, None, depth
        depth += 1
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Options)):
            return table, field, depth
        table = field.annotation
    return table, None, depth


def _suggest(name: str, table: type[Options], prefix: str) -> str:
    """What the user may have meant: the nearest name in this table, or the same name in another one."""
    here = [name for name, field in table.model_fields.items() if not is_constant(field)]
    if near := difflib.get_close_matches(name, here, n=1):
        return f"; did you mean {'.'.join(filter(None, (prefix, near[0])))}?"
    for key in _keys(Config().model_dump()):
        if key.rpartition(".")[2] == name and not _is_constant(key):
            return f"; did you mean {key}?"
    return f"; known here: {', '.join(here)}"


def _plain_key(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
