"""The directory: nodes that know nothing but each other's directory find each other; records are small, signed and short-lived."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import psutil
import pytest

from swarm_node.network.directory.records import EXPIRY_S, MAX_RECORD, SHARDS, Entry, OwnerValidator, shard_key, shard_of, unpack_entry
from swarm_node.network.identity import Identity, load_or_create
from swarm_node.network.live import Libp2pGossip
from tests.support.live_network import await_peers, exchange, node
from tests.support.waiting import await_condition

NOW = 1_000_000.0
ALICE, BOB = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))


def free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])


def await_directory(gossip: Libp2pGossip) -> tuple[str, ...]:
    await_condition(lambda: gossip.report().directory_addresses, "the directory listens")
    return gossip.report().directory_addresses


def test_nodes_that_know_only_a_directory_meet_though_it_was_dead_at_first(tmp_path: Path) -> None:
    identity, port = load_or_create(tmp_path / "alice"), free_port()
    directory = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    anywhere = "/ip4/127.0.0.1/tcp/0"
    with node(tmp_path / "bob", directory=True, directory_listen=anywhere, directory_peers=(directory,)) as bob:
        # hivemind itself refuses to start when every initial peer is dead
        await_directory(bob)
        await_condition(lambda: directory in bob.report().trouble, "the dead directory is named")
        assert bob.report().restarts == 0
        with node(tmp_path / "alice", directory=True, directory_listen=f"/ip4/127.0.0.1/tcp/{port}") as alice:
            assert await_directory(alice) == (directory,)  # one seed, one peer id, for both networks
            await_peers(alice, bob)
            await_peers(bob, alice)
            exchange(alice, bob)
            await_condition(lambda: bob.report().trouble == "", "no trouble is left")

            # the directory's death is nobody's business but its own
            killed = bob.pids["directory"]
            assert killed is not None
            daemon = psutil.Process(killed).children()
            os.kill(killed, signal.SIGKILL)
            await_condition(lambda: bob.report().restarts == 1, "the directory is started again")
            exchange(bob, alice)
            exchange(alice, bob)
            await_condition(lambda: not any(is_alive(process) for process in daemon), "the dead directory's daemon is gone")
            await_directory(bob)


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("packages", "torch"),
    [("('hivemind', 'hivemind.dht', 'hivemind.utils')", False), ("('hivemind', 'hivemind.no_such_package')", True)],
)
def test_the_directory_imports_no_libp2p_and_torch_only_where_hivemind_is_laid_out_otherwise(packages: str, torch: bool) -> None:
    program = f"""
import sys
from swarm_node.network.directory import imports
imports._PACKAGES = {packages}
imports.prepare_hivemind()
import swarm_node.network.directory.process, swarm_node.network.directory.node as node
print("torch" in sys.modules, "libp2p" in sys.modules, node.DHTNode.__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(torch), "False", "DHTNode"]


@dataclass
class Record:
    """As hivemind hands it to a validator."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def record_of(identity: Identity, value: bytes = b"value", expires_in: float = EXPIRY_S) -> Record:
    return Record(b"key", msgpack.packb(identity.peer_id), value, NOW + expires_in)


def signed_by(identity: Identity, record: Record) -> Record:
    return replace(record, value=OwnerValidator(identity).sign_value(record))


def is_valid(record: Record) -> bool:
    return OwnerValidator(BOB, clock=lambda: NOW).validate(record)


def test_a_record_is_believed_from_its_owner_only() -> None:
    record = signed_by(ALICE, record_of(ALICE))
    assert is_valid(record)
    assert OwnerValidator(BOB).strip_value(record) == b"value"
    assert not is_valid(record_of(ALICE))
    assert not is_valid(signed_by(BOB, record_of(ALICE)))
    for forged in (
        replace(record, key=b"other key"),
        replace(record, subkey=msgpack.packb(BOB.peer_id)),
        replace(record, value=b"valuf" + record.value[5:]),
        replace(record, expiration_time=record.expiration_time + 1),  # keeping a leaver alive is forgery too
        replace(record, subkey=b"\xc1"),
        replace(record, subkey=msgpack.packb(17)),
        replace(record, value=b""),
    ):
        assert not is_valid(forged), forged


def test_a_record_is_small_and_short_lived() -> None:
    assert not is_valid(signed_by(ALICE, record_of(ALICE, bytes(MAX_RECORD))))
    assert not is_valid(signed_by(ALICE, record_of(ALICE, expires_in=3600)))
    addresses = tuple(f"/dns4/{'long-name.' * 12}example/tcp/{port}/p2p/{ALICE.peer_id}" for port in range(31310, 31330))
    entry = Entry(ALICE.peer_id, addresses, "p" * 1000, 10**9)
    assert is_valid(signed_by(ALICE, record_of(ALICE, entry.pack())))


def test_an_entry_names_its_own_peer_and_nothing_else() -> None:
    address = f"/ip4/192.0.2.7/tcp/31310/p2p/{ALICE.peer_id}"
    entry = Entry(ALICE.peer_id, (address,), "tiny-s", 12)
    assert unpack_entry(ALICE.peer_id, entry.pack()) == entry
    assert unpack_entry(BOB.peer_id, entry.pack()) is None
    for nonsense in (
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([["/ip4/1.2.3.4/tcp/1"], "", 0]),
        msgpack.packb([[address], 3, 0]),
        "text",
        None,
    ):
        assert unpack_entry(ALICE.peer_id, nonsense) is None, nonsense


def test_records_are_spread_over_shards() -> None:
    identities = [Identity(bytes([seed]) * 32) for seed in range(200)]
    shards = [shard_of(identity.peer_id) for identity in identities]
    assert set(shards) == set(range(SHARDS))
    assert len({shard_key("a" * 32, shard) for shard in range(SHARDS)} | {shard_key("b" * 32, 0)}) == SHARDS + 1
