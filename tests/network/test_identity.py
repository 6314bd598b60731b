"""The identity file: made once, never overwritten, the same peer id as libp2p's."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import base58
import pytest

from swarm_node.network.identity import (
    KEY_FILE,
    Identity,
    IdentityError,
    backup,
    decode_peer_id,
    load,
    load_or_create,
    public_key_of,
    restore,
)
from tests.support.waiting import HANG_S

SEED = bytes(range(32))
# Computed once with libp2p: ID.from_pubkey(create_new_key_pair(bytes(range(32))).public_key).
PEER_ID = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_peer_id_is_libp2ps() -> None:
    program = """
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from swarm_node.network.identity import Identity
for seed in (bytes(range(32)), bytes(32), b"\\xff" * 32):
    identity = Identity(seed)
    pair = create_new_key_pair(seed)
    assert identity.peer_id == str(ID.from_pubkey(pair.public_key)), seed
print(Identity(bytes(range(32))).peer_id)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == Identity(SEED).peer_id


def test_the_peer_id_holds_the_public_key() -> None:
    identity = Identity(SEED)
    assert identity.peer_id == PEER_ID
    assert public_key_of(identity.peer_id) == identity.public_key
    with pytest.raises(ValueError, match="not the peer id"):
        public_key_of("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")
    with pytest.raises(ValueError, match="not base58"):
        public_key_of("12D3KooW0")


def test_a_peer_id_has_one_spelling_and_what_is_too_long_is_not_decoded() -> None:
    assert decode_peer_id(PEER_ID) == bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20]) + Identity(SEED).public_key
    assert decode_peer_id("12g") == b"\0a"  # a leading 1 is a zero byte
    for other in (PEER_ID + "\n", PEER_ID + " ", " " + PEER_ID, PEER_ID[:-1] + "l", PEER_ID[:-1] + "ß"):
        with pytest.raises(ValueError, match=r"not base58|at most 52"):
            decode_peer_id(other)
    with pytest.raises(ValueError, match="not base58"):
        decode_peer_id(PEER_ID.encode())  # type: ignore[arg-type]  # msgpack tells bytes from text, base58 does not
    largest = base58.b58encode(bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20]) + b"\xff" * 32).decode()
    assert len(decode_peer_id(largest)) == 38
    with pytest.raises(ValueError, match="has 10000000 characters, a peer id at most 52"):
        decode_peer_id("z" * 10_000_000)  # would take hours


def test_a_home_folder_keeps_its_identity(tmp_path: Path) -> None:
    home = tmp_path / "fresh" / "home"
    first = load_or_create(home)
    assert mode_of(home / KEY_FILE) == 0o600
    assert load_or_create(home) == first
    assert [path.name for path in home.iterdir()] == [KEY_FILE]  # nothing temporary is left
    assert load_or_create(tmp_path / "other") != first


def test_the_seed_never_shows_in_a_representation() -> None:
    assert SEED.hex() not in repr(Identity(SEED))
    assert repr(SEED) not in repr(Identity(SEED))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_key_that_others_can_read_is_repaired_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int) -> None:
    identity = load_or_create(tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    assert load_or_create(tmp_path) == identity
    assert mode_of(tmp_path / KEY_FILE) == 0o600
    assert f"{mode:04o}" in caplog.text


@pytest.mark.parametrize("content", ["", "ab" * 31, "zz" * 32, "ab" * 32 + "00"])
def test_a_damaged_key_is_named_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / KEY_FILE
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=KEY_FILE):
        load_or_create(tmp_path)
    assert path.read_text() == content


def test_backup_and_restore_give_the_same_peer(tmp_path: Path) -> None:
    home, copies = tmp_path / "home", tmp_path / "copies"
    copies.mkdir()
    identity = load_or_create(home)
    copy = backup(home, copies)
    assert copy.parent == copies
    assert mode_of(copy) == 0o600
    assert restore(tmp_path / "new", copy) == identity
    assert load(tmp_path / "new" / KEY_FILE).peer_id == identity.peer_id
    assert restore(tmp_path / "new", copy) == identity  # the same one again is no conflict


def test_neither_backup_nor_restore_overwrites(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    load_or_create(one)
    kept = load_or_create(two)
    copy = backup(one, tmp_path / "copy.key")
    with pytest.raises(IdentityError, match="another name"):
        backup(two, copy)
    with pytest.raises(IdentityError, match="move it away"):
        restore(two, copy)
    assert load_or_create(two) == kept


def test_a_missing_key_says_where_keys_come_from(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="identity restore"):
        backup(tmp_path, tmp_path / "copy.key")
