"""One node of the directory: its record stored and refreshed, others' records read, other directories joined again and again.

It always starts alone and joins afterwards: hivemind refuses to start when every initial peer is dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Callable, Sequence

from hivemind.dht.node import DHTNode
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from swarm_node.network.addresses import Address, AddressError, free_addresses, parse_address, parse_with_peer
from swarm_node.network.children.config import ChildConfig
from swarm_node.network.directory.records import EXPIRY_S, REFRESH_S, SHARDS, Entry, OwnerValidator, shard_key, shard_of, unpack_entry

DAEMON_KEY_FILE = "directory.key"
"""The identity once more, in the form that the daemon reads."""
EAGER_S = 2.0
"""Pause between two looks while nobody has been found."""
JOIN_PAUSE_S = 1.0
"""First pause before a directory is asked again; doubles up to the options' longest."""
START_TIMEOUT_S = 60.0
STALE_S = 5.0
"""An announcement that changed is stored no sooner than this after the last one."""

log = logging.getLogger(__name__)

# What hivemind raises when a peer does not answer, or answers nonsense. Anything else ends the process, which is then started anew.
PEER_ERRORS = (P2PDaemonError, ControlFailure, OSError, ValueError, KeyError, asyncio.TimeoutError)


class Validator(OwnerValidator, RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Registers the checks with hivemind."""


class Directory:
    """One directory node and what the parent knows of it."""

    def __init__(self, config: ChildConfig, send: Callable[..., None]) -> None:
        """`send` takes a kind and fields: a frame to the parent."""
        self._config = config
        self._send = send
        self._peer_id = config.identity.peer_id
        self._keys = [shard_key(config.swarm, shard) for shard in range(SHARDS)]
        self._node: DHTNode = None
        self._addresses: list[str] = []
        self._notices: list[str] = []
        self._entry = Entry(self._peer_id, (), "", 0)
        self._changed = asyncio.Event()
        self._found: set[str] = set()
        self._waiting = {address: f"joining {address}" for address in config.options.directory_peers}

    def announce(self, addresses: Sequence[str], policy: str, step: int) -> None:
        """What this node's record is to say."""
        entry = Entry(self._peer_id, tuple(addresses), policy, step)
        if entry != self._entry:
            self._entry = entry
            self._changed.set()

    async def run(self) -> None:
        """Start and serve for ever. Raises when the daemon does not start."""
        options = self._config.options
        listen, notices = free_addresses([options.directory_address]) if not options.directory_listen else ([options.directory_address], ())
        self._notices = [f"directory: {sentence}" for sentence in notices]
        self._node = await DHTNode.create(
            host_maddrs=[address.transport for address in listen],
            no_listen=not listen,
            announce_maddrs=[parse_address(text).transport for text in self._config.options.directory_announce] or None,
            identity_path=self._write_key(),
            check_if_identity_free=False,
            record_validator=Validator(self._config.identity, get_dht_time),
            startup_timeout=START_TIMEOUT_S,
            auto_nat=False,
            nat_port_map=False,
            use_relay=False,
        )
        self._addresses = await self._dialable()
        self._report()
        async with asyncio.TaskGroup() as tasks:
            for text in self._config.options.directory_peers:
                tasks.create_task(self._join(parse_with_peer(text)))
            tasks.create_task(self._store_for_ever())
            tasks.create_task(self._look_for_ever())

    async def shutdown(self) -> None:
        """End the daemon."""
        if self._node is not None:
            await self._node.shutdown()

    async def _join(self, address: Address) -> None:
        """Ping another directory until it is in the routing table, and again whenever it dropped out of it."""
        longest = self._config.options.redial_max_s
        pause = JOIN_PAUSE_S
        while True:
            reason = await self._try_to_join(address)
            if reason:
                self._waiting[str(address)] = f"the directory at {address} did not answer ({reason})"
            else:
                self._waiting.pop(str(address), None)
            self._report()
            await asyncio.sleep((pause if reason else REFRESH_S) * random.uniform(0.75, 1.25))
            pause = min(2 * pause, longest) if reason else JOIN_PAUSE_S

    async def _try_to_join(self, address: Address) -> str:
        peer = PeerID.from_base58(address.peer)
        if self._node.protocol.routing_table.get(peer_id=peer) is not None:
            return ""
        try:
            client = self._node.p2p._client  # noqa: SLF001 -- hivemind dials only peers that it found by itself
            await asyncio.wait_for(client.connect(peer, [Multiaddr(address.transport)]), 10)
            node_id = await asyncio.wait_for(self._node.protocol.call_ping(peer), 10)
        except PEER_ERRORS as error:
            return f"{error}" or type(error).__name__
        return "" if node_id is not None else "no answer to a ping"

    async def _store_for_ever(self) -> None:
        while True:
            if self._entry.addresses:
                self._changed.clear()
                key = self._keys[shard_of(self._peer_id)]
                try:
                    await self._node.store(key, self._entry.pack(), get_dht_time() + EXPIRY_S, subkey=self._peer_id)
                except PEER_ERRORS as error:
                    log.warning("the record could not be stored: %s", error)
                await asyncio.sleep(STALE_S)
            try:
                await asyncio.wait_for(self._changed.wait(), REFRESH_S - STALE_S)
            except TimeoutError:
                continue

    async def _look_for_ever(self) -> None:
        while True:
            found = await self._look()
            if found:
                self._send("found", sorted(found))
            self._found = found
            self._report()
            await asyncio.sleep((REFRESH_S if found else EAGER_S) * random.uniform(0.75, 1.25))

    async def _look(self) -> set[str]:
        try:
            results = await self._node.get_many(self._keys, sufficient_expiration_time=math.inf)
        except PEER_ERRORS as error:
            log.warning("the directory could not be read: %s", error)
            return set()
        found: set[str] = set()
        for result in results.values():
            records = result.value if result is not None and isinstance(result.value, dict) else {}
            for peer, record in records.items():
                entry = unpack_entry(peer, record.value)
                if entry is not None and peer != self._peer_id:
                    found.update(entry.addresses)
        return found

    async def _dialable(self) -> list[str]:
        """The daemon's addresses that others can use: loopback only when there is nothing else."""
        visible = []
        for multiaddr in await self._node.get_visible_maddrs(latest=True):
            try:
                visible.append(parse_with_peer(str(multiaddr)))
            except AddressError:
                continue
        return [str(address) for address in [a for a in visible if not a.is_loopback] or visible]

    def _report(self) -> None:
        trouble = "" if self._found else "; ".join(self._waiting.values())
        self._send("report", {"addresses": self._addresses, "notices": self._notices, "trouble": trouble, "found": len(self._found)})

    def _write_key(self) -> str:
        path = self._config.home / DAEMON_KEY_FILE
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self._config.identity.to_daemon_key())
        return str(path)
