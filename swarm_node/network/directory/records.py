"""The directory's records: small, signed by the peer that they are about, short-lived. Knows hivemind's validator interface only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarm_node.network.addresses import ADDRESSES_OF_ONE_PEER, AddressError, parse_with_peer
from swarm_node.network.identity import Identity, public_key_of

EXPIRY_S = 60.0
REFRESH_S = 20.0
MAX_RECORD = 1024
"""Bytes of a record with its signature. All records of a shard travel in one answer, and 50 KB kill a directory."""
SHARDS = 16
"""Keys over which a swarm's records are spread."""
MAX_POLICY = 128
_SIGNATURE_BYTES = 64
_SKEW_S = 60.0


class DhtRecord(Protocol):
    """What hivemind gives a validator."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


@dataclass(frozen=True)
class Entry:
    """One node of the swarm, as it describes itself."""

    peer: str
    addresses: tuple[str, ...]
    """Multiaddrs with the peer id, dialable by libp2p."""
    policy: str
    step: int

    def pack(self) -> bytes:
        """The record's value: what does not fit is left out."""
        packed: bytes = msgpack.packb([list(self.addresses[:ADDRESSES_OF_ONE_PEER]), self.policy[:MAX_POLICY], self.step])
        return packed


def unpack_entry(peer: str, value: Any) -> Entry | None:
    """Read a record of a peer; None when it is not one, or names addresses of somebody else."""
    try:
        addresses, policy, step = msgpack.unpackb(value)
        parsed = [parse_with_peer(address) for address in addresses[:ADDRESSES_OF_ONE_PEER]]
    except (ValueError, TypeError, AttributeError, AddressError, msgpack.UnpackException):
        return None
    if not isinstance(policy, str) or not isinstance(step, int) or any(address.peer != peer for address in parsed):
        return None
    return Entry(peer, tuple(map(str, parsed)), policy, step)


def shard_key(swarm: str, shard: int) -> str:
    """The directory's key of one shard of a swarm."""
    return f"swarm-node/{swarm}/{shard}"


def shard_of(peer: str) -> int:
    """The shard in which a peer's record lies."""
    return sum(public_key_of(peer)) % SHARDS


class OwnerValidator:
    """A record belongs to the peer that its subkey names and carries that peer's Ed25519 signature; everything else is refused.

    Has the methods of hivemind's `RecordValidatorBase`, and is registered as one in the directory process.
    """

    def __init__(self, identity: Identity, clock: Any = time.time) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(identity.seed)
        self._subkey = msgpack.packb(identity.peer_id)
        self._clock = clock

    def validate(self, record: DhtRecord) -> bool:
        """Whether the record may be stored here, or believed when another node returns it."""
        if len(record.value) > MAX_RECORD or record.expiration_time > self._clock() + EXPIRY_S + _SKEW_S:
            return False
        try:
            owner = Ed25519PublicKey.from_public_bytes(public_key_of(msgpack.unpackb(record.subkey)))
            owner.verify(record.value[-_SIGNATURE_BYTES:], self._signed(record, record.value[:-_SIGNATURE_BYTES]))
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException, InvalidSignature):
            return False
        return True

    def sign_value(self, record: DhtRecord) -> bytes:
        """The value with its signature; a record about somebody else stays unsigned, and so is worth nothing."""
        if record.subkey != self._subkey:
            return record.value
        return record.value + self._key.sign(self._signed(record, record.value))

    def strip_value(self, record: DhtRecord) -> bytes:
        """The value without its signature."""
        return record.value[:-_SIGNATURE_BYTES]

    @property
    def priority(self) -> int:
        """Hivemind's default: it signs and judges in the order in which validators were registered."""
        return 0

    def merge_with(self, other: object) -> bool:
        """Never: every validator judges by itself."""
        return False

    def _signed(self, record: DhtRecord, value: bytes) -> bytes:
        fields: Sequence[Any] = [b"swarm-node record", record.key, record.subkey, value, record.expiration_time]
        packed: bytes = msgpack.packb(fields)
        return packed
