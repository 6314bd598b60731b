"""The node's identity: an Ed25519 key from a 32-byte seed in `identity.key`, and the peer id that follows from it.

The file holds the seed as 64 hexadecimal digits. It is written once, with mode 0600, and never overwritten: whoever loses
it becomes another peer. The peer id is computed here without libp2p, which takes a second to import and cannot share a
process with hivemind.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import base58
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE = "identity.key"
"""Name of the key file in the home folder."""
SEED_BYTES = 32

# libp2p's protobuf PublicKey {type: Ed25519, data: 32 bytes}, as the identity multihash (code 0, length 36).
_PEER_ID_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_PEER_ID_CHARACTERS = 52
# libp2p's protobuf PrivateKey {type: Ed25519, data: 64 bytes}; data is the seed followed by the public key.
_PRIVATE_KEY_PREFIX = bytes([0x08, 0x01, 0x12, 0x40])

log = logging.getLogger(__name__)


class IdentityError(ValueError):
    """The identity file is missing, unreadable, or would be overwritten; the message says what to do."""


@dataclass(frozen=True)
class Identity:
    """A key pair; two identities are equal when their seeds are."""

    seed: bytes = field(repr=False)
    """32 secret bytes."""

    def __post_init__(self) -> None:
        if len(self.seed) != SEED_BYTES:
            raise IdentityError(f"an identity's seed has {SEED_BYTES} bytes, not {len(self.seed)}")

    @cached_property
    def public_key(self) -> bytes:
        """The raw Ed25519 public key, 32 bytes."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw()

    @cached_property
    def peer_id(self) -> str:
        """The libp2p peer id in base58, `12D3KooW...`."""
        return base58.b58encode(_PEER_ID_PREFIX + self.public_key).decode()

    def to_daemon_key(self) -> bytes:
        """The private key as go-libp2p writes it: the key file of the directory's daemon, which so gets the same peer id."""
        return _PRIVATE_KEY_PREFIX + self.seed + self.public_key


def decode_peer_id(peer_id: str) -> bytes:
    """The multihash that a peer id spells in base58.

    Raises:
        ValueError: it has a character that base58 has not, a blank around it, or more characters than a peer id. The latter are not
            decoded: that takes time in the square of their number.
    """
    if len(peer_id) > _PEER_ID_CHARACTERS:
        raise ValueError(f"{peer_id[:_PEER_ID_CHARACTERS]!r}... has {len(peer_id)} characters, a peer id at most {_PEER_ID_CHARACTERS}")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise ValueError(f"{peer_id!r} is not base58: {error}") from None
    if base58.b58encode(raw).decode() != peer_id:  # the library takes bytes, and blanks at the end
        raise ValueError(f"{peer_id!r} is not base58")
    return raw


def public_key_of(peer_id: str) -> bytes:
    """The raw Ed25519 public key inside a peer id. Raises ValueError when the peer id holds none."""
    raw = decode_peer_id(peer_id)
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError(f"{peer_id!r} is not the peer id of an Ed25519 key (12D3KooW...)")
    return raw[len(_PEER_ID_PREFIX) :]


def load_or_create(home: Path) -> Identity:
    """The identity of the home folder, made on first use. Raises IdentityError when the file cannot be used."""
    path = home / KEY_FILE
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        try:
            _write_new(path, secrets.token_bytes(SEED_BYTES))
        except FileExistsError:  # another process was faster: its key is this folder's key
            log.debug("%s appeared while it was being made", path)
    return load(path)


def load(path: Path) -> Identity:
    """Read a key file. Repairs permissions that let others read it, with a warning. Raises IdentityError."""
    try:
        text = path.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        raise IdentityError(f"{path} does not exist: `swarm-node join` makes one, `swarm-node identity restore` brings one back") from None
    except (OSError, UnicodeDecodeError) as error:
        raise IdentityError(f"{path} cannot be read ({error}): make it readable for this user, or restore it from a backup") from None
    try:
        seed = bytes.fromhex(text)
    except ValueError:
        seed = b""
    if len(seed) != SEED_BYTES:
        raise IdentityError(
            f"{path} is not an identity: it should hold {2 * SEED_BYTES} hexadecimal digits. "
            "Restore it from a backup, or move it away to become a new peer"
        )
    if mode & 0o077:
        try:
            path.chmod(0o600)
        except OSError as error:
            raise IdentityError(f"{path} can be read by others (mode {mode:04o}) and cannot be repaired ({error}): chmod 600 it") from None
        log.warning("%s could be read by others (mode %04o); its mode is 0600 now", path, mode)
    return Identity(seed)


def backup(home: Path, destination: Path) -> Path:
    """Copy the home folder's identity to a file (or into a folder), mode 0600; returns the file. Raises IdentityError."""
    identity = load(home / KEY_FILE)
    target = destination / f"{identity.peer_id}.key" if destination.is_dir() else destination
    try:
        _write_new(target, identity.seed)
    except FileExistsError:
        raise IdentityError(f"{target} exists and is not overwritten: choose another name") from None
    except OSError as error:
        raise IdentityError(f"{target} cannot be written: {error}") from None
    return target


def restore(home: Path, source: Path) -> Identity:
    """Bring a backed-up identity into a home folder that has none. Raises IdentityError instead of overwriting one."""
    identity = load(source)
    path = home / KEY_FILE
    home.mkdir(parents=True, exist_ok=True)
    try:
        _write_new(path, identity.seed)
    except FileExistsError:
        if load(path) == identity:
            return identity
        raise IdentityError(
            f"{path} holds another identity ({load(path).peer_id}) and is not overwritten: back it up with `swarm-node identity backup`, "
            "move it away, then restore again"
        ) from None
    except OSError as error:
        raise IdentityError(f"{path} cannot be written: {error}") from None
    return identity


def _write_new(path: Path, seed: bytes) -> None:
    """Write a key file whole or not at all. Raises FileExistsError when there is one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(seed.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, refuses to replace
    finally:
        temporary.unlink()
