"""What nodes tell each other of their peers, and what a node remembers of them."""

from __future__ import annotations

import struct
from pathlib import Path

import msgpack
import pytest
import trio

from swarm_node.network.identity import Identity
from swarm_node.network.libp2p.exchange import MAX_BYTES, MAX_TOLD, ask, tell
from swarm_node.network.libp2p.peers_file import MAX_PEERS, read_peers, write_peers
from swarm_node.network.libp2p.pull import PullError


class Pipe:
    """A stream that holds what was written, or what a test puts in."""

    def __init__(self, held: bytes = b"") -> None:
        self.held = held
        self.read_bytes = 0

    async def read(self, n: int | None = None) -> bytes:
        part = self.held[self.read_bytes :][:n]
        self.read_bytes += len(part)
        return part

    async def write(self, data: bytes) -> None:
        self.held += data

    async def close(self) -> None: ...


def address(number: int) -> str:
    return f"/ip4/192.0.2.7/tcp/{31000 + number}/p2p/{Identity(bytes([number % 256]) * 32).peer_id}"


def asked(packed: bytes, length: int | None = None) -> list[str]:
    pipe = Pipe(struct.pack(">I", len(packed) if length is None else length) + packed)
    return trio.run(ask, pipe, 1.0)


def test_addresses_come_as_they_were_told_and_not_too_many() -> None:
    pipe = Pipe()
    trio.run(tell, pipe, map(address, range(MAX_TOLD + 8)), 1.0)
    assert trio.run(ask, pipe, 1.0) == [address(number) for number in range(MAX_TOLD)]


def test_who_tells_more_than_is_allowed_or_what_is_no_address_is_not_believed() -> None:
    told = [address(number) for number in range(MAX_TOLD + 8)]
    assert asked(msgpack.packb(told)) == told[:MAX_TOLD]
    assert asked(msgpack.packb([7, None, "/ip4/192.0.2.7/tcp/1", told[0]])) == told[:1]
    for nonsense, why in ((b"\xc1", "not msgpack"), (msgpack.packb(told[0]), "is a str"), (msgpack.packb({}), "is a dict")):
        with pytest.raises(PullError, match=why):
            asked(nonsense)


def test_a_list_that_says_it_is_long_is_not_waited_for() -> None:
    pipe = Pipe(struct.pack(">I", MAX_BYTES + 1) + bytes(MAX_BYTES + 1))
    with pytest.raises(PullError, match=f"{MAX_BYTES + 1} bytes exceeds {MAX_BYTES}"):
        trio.run(ask, pipe, 1.0)
    assert pipe.read_bytes == 4


def test_of_too_many_peers_the_ones_met_last_are_remembered(tmp_path: Path) -> None:
    write_peers(tmp_path, {str(number): [address(number)] for number in range(MAX_PEERS + 3)})
    assert [str(found) for found in read_peers(tmp_path)] == [address(number) for number in range(3, MAX_PEERS + 3)]


def test_a_peers_file_that_is_damaged_costs_what_is_damaged_in_it(tmp_path: Path) -> None:
    assert read_peers(tmp_path) == []
    write_peers(tmp_path, {"one": ["nonsense", address(1)]})
    assert [str(found) for found in read_peers(tmp_path)] == [address(1)]
    for damaged in ("{", "[1]", '{"one": 1}'):
        (tmp_path / "peers.json").write_text(damaged)
        assert read_peers(tmp_path) == []
