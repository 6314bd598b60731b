"""The real network, seen from the main process: queues and counters here, libp2p and hivemind in processes of their own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.children.config import ChildConfig
from swarm_node.network.children.frames import Frame, pack_frame
from swarm_node.network.children.supervisor import Child
from swarm_node.network.gossip import NetworkReport, Received
from swarm_node.network.identity import Identity, load_or_create
from swarm_node.network.inbox import Inbox
from swarm_node.network.libp2p.config import MeshConfig
from swarm_node.network.options import NetworkOptions

NETWORK_MODULE = "swarm_node.network.libp2p.process"
DIRECTORY_MODULE = "swarm_node.network.directory.process"

_TOTALS = ("published", "received", "pulled", "pull_failures", "dropped")
_COUNTERS = ("rejections", "ignored", "confined")


class Libp2pGossip:
    """`Gossip` over libp2p. Every method returns at once and none raises because of the network, whatever state it is in."""

    def __init__(self, identity: Identity, options: NetworkOptions, home: Path, swarm: str, rules: AdmissionRules) -> None:
        """See `start`; the processes run only after `open`."""
        self.peer_id = identity.peer_id
        self._config = MeshConfig(identity=identity, swarm=swarm, options=options, home=home, rules=rules)
        self._lock = threading.Lock()
        self._inbox = Inbox(options.inbox_bodies, options.inbox_bytes)
        self._state: Mapping[str, Any] = {}
        self._totals = Totals()
        self._directory_state: Mapping[str, Any] = {}
        self._found: tuple[str, ...] = ()
        self._step, self._policy = 0, ""
        self._announced: tuple[str, ...] = ()
        self._closed = False
        self._network = Child("network", NETWORK_MODULE, self._on_network, self._open_network)
        self._directory: Child | None = None
        if options.directory:
            self._directory = Child("directory", DIRECTORY_MODULE, self._on_directory, self._open_directory, backoff_s=2.0)
            self._directory_config = ChildConfig(identity=identity, swarm=swarm, options=options, home=home)

    @classmethod
    def start(
        cls, options: NetworkOptions, home: Path, swarm: str, rules: AdmissionRules, *, identity: Identity | None = None
    ) -> Libp2pGossip:
        """Join a swarm; returns at once, while sockets open and peers are dialled.

        Args:
            options: who to talk to.
            home: the node's home folder; holds the identity and the remembered peers.
            swarm: what `swarm_id` computed.
            rules: the cheap half of admission.
            identity: that of the home folder when not given.

        Raises:
            IdentityError: the home folder's identity cannot be used.
        """
        gossip = cls(identity or load_or_create(home), options, home, swarm, rules)
        gossip.open()
        return gossip

    def open(self) -> None:
        """Start the processes."""
        self._network.start()
        if self._directory is not None:
            self._directory.start()

    def publish(self, body: bytes) -> None:
        """Send an encoded group to every peer, best effort."""
        if not self._closed:
            self._network.send("publish", body)

    def drain(self) -> list[Received]:
        """Everything that arrived since the last call, oldest first."""
        return self._inbox.drain()

    def progress(self, step: int, policy: str) -> None:
        """Tell peers and the directory which step the node is at."""
        if self._closed or (step, policy) == (self._step, self._policy):
            return
        self._step, self._policy = step, policy
        self._network.send("progress", step, policy)
        self._announce()

    def report(self) -> NetworkReport:
        """Counters and state."""
        with self._lock:
            state, directory = self._state, self._directory_state
            totals = self._totals.current()
        alive = self._network.pid is not None
        return NetworkReport(
            peers=len(state.get("peers", ())) if alive else 0,
            addresses=tuple(state.get("addresses", ())),
            published=totals["published"],
            received=totals["received"],
            dropped=totals["dropped"] + self._inbox.dropped + self._network.dropped,
            restarts=self._network.restarts + (self._directory.restarts if self._directory else 0),
            rejections=totals["rejections"],
            trouble=self._trouble(state, directory),
            directory_addresses=tuple(directory.get("addresses", ())),
            peer_ids=tuple(state.get("peers", ())) if alive else (),
            ignored=totals["ignored"],
            confined=totals["confined"],
            notices=(*state.get("notices", ()), *directory.get("notices", ())),
        )

    def close(self) -> None:
        """Leave the swarm and free processes and sockets; idempotent, takes some seconds at most."""
        if self._closed:
            return
        self._closed = True
        children = [child for child in (self._network, self._directory) if child is not None]
        threads = [threading.Thread(target=child.close) for child in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by name, for `status`."""
        children = (self._network, self._directory)
        return {child.name: child.pid for child in children if child is not None}

    def _trouble(self, state: Mapping[str, Any], directory: Mapping[str, Any]) -> str:
        if self._closed:
            return ""
        network = self._network.trouble or ("" if state else "the network process is opening its sockets")
        if network:
            return network
        words = [str(state["trouble"])] if state["trouble"] else []
        if self._directory is not None and not state["peers"]:
            words += [text for text in (self._directory.trouble, str(directory.get("trouble", ""))) if text]
        return "; ".join(words)

    # -- frames of the network process, in its reader thread

    def _open_network(self) -> list[bytes]:
        with self._lock:
            self._totals.begin()
            self._state = {}
            known = self._found
        config = self._config.model_copy(update={"known": known}).model_dump()
        return [pack_frame("start", config), pack_frame("progress", self._step, self._policy)]

    def _on_network(self, frame: Frame) -> None:
        match frame:
            case ["received", sender, body]:
                self._inbox.put(Received(sender, body))
            case ["report", state]:
                with self._lock:
                    self._state = state
                    self._totals.update(state)
                if tuple(state["addresses"]) != self._announced:
                    self._announced = tuple(state["addresses"])
                    self._announce()

    # -- frames of the directory process, in its reader thread

    def _open_directory(self) -> list[bytes]:
        return [pack_frame("start", self._directory_config.model_dump()), self._announcement()]

    def _announcement(self) -> bytes:
        return pack_frame("announce", list(self._announced), self._policy, self._step)

    def _announce(self) -> None:
        if self._directory is not None:
            self._directory.send("announce", list(self._announced), self._policy, self._step)

    def _on_directory(self, frame: Frame) -> None:
        match frame:
            case ["found", addresses]:
                self._take_found(addresses)
            case ["report", state]:
                with self._lock:
                    self._directory_state = state

    def _take_found(self, addresses: Iterable[str]) -> None:
        with self._lock:
            self._found = tuple(addresses)
        self._network.send("dial", list(self._found))


class Totals:
    """Counters that go on over restarts of the process that counts."""

    def __init__(self) -> None:
        self._before: dict[str, int] = Counter()
        self._before_by: dict[str, Counter[str]] = {name: Counter() for name in _COUNTERS}
        self._now: Mapping[str, Any] = {}

    def begin(self) -> None:
        """A new process counts from zero."""
        for name in _TOTALS:
            self._before[name] += self._now.get(name, 0)
        for name in _COUNTERS:
            self._before_by[name].update(self._now.get(name, {}))
        self._now = {}

    def update(self, state: Mapping[str, Any]) -> None:
        """The running process's counters."""
        self._now = state

    def current(self) -> dict[str, Any]:
        """Sums over all processes so far."""
        sums: dict[str, Any] = {name: self._before[name] + self._now.get(name, 0) for name in _TOTALS}
        for name in _COUNTERS:
            sums[name] = dict(self._before_by[name] + Counter(self._now.get(name, {})))
        return sums
