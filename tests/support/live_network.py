"""Real nodes on loopback for tests: started in a line, awaited by conditions, closed whatever happens."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from swarm_protocols.codec import encode_group
from swarm_protocols.group import Completion, Finish, Group, PolicyTag, ProblemRef

from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.gossip import Received
from swarm_node.network.identity import Identity
from swarm_node.network.live import Libp2pGossip
from swarm_node.network.options import NetworkOptions
from swarm_node.network.swarm_id import swarm_id
from swarm_node.tasks.assignment import assigned_index
from tests.support.waiting import await_condition

TASK, TASK_SEED = "chain-sum", 7
SWARM = swarm_id("test", TASK, "0" * 16)
RULES = AdmissionRules((TASK,), TASK_SEED)

_sequence = itertools.count(time.time_ns())


def make_body(sender: str, tokens: int = 40, seed: int = 0, step: int = 0) -> bytes:
    """A group that the sender was assigned; four completions of so many tokens, each body another."""
    sequence = next(_sequence)
    rng = np.random.default_rng([seed, sequence])
    completions = tuple(
        Completion(rng.integers(0, 60_000, tokens).astype(np.int32), -rng.random(tokens).astype(np.float32), Finish.LENGTH)
        for _ in range(4)
    )
    problem = ProblemRef(TASK, TASK_SEED, assigned_index(sender, step, 0, TASK_SEED))
    policy = PolicyTag("tiny", "0" * 16, step, "reference", "float32", 0, 1.0, 4)
    return encode_group(Group(problem, bytes(32), policy, time.time(), sequence, completions))


def loopback(**options: object) -> NetworkOptions:
    """Options of a node that listens on loopback, on any port, without a directory unless asked for."""
    return NetworkOptions(**{"listen": ("/ip4/127.0.0.1/tcp/0",), "directory": False, "redial_max_s": 1.0, **options})


@contextmanager
def node(home: Path, *, identity: Identity | None = None, swarm: str = SWARM, **options: object) -> Iterator[Libp2pGossip]:
    """A running node."""
    gossip = Libp2pGossip.start(loopback(**options), home, swarm, RULES, identity=identity)
    try:
        yield gossip
    finally:
        gossip.close()


def listening(gossip: Libp2pGossip) -> tuple[str, ...]:
    """The node's addresses, once it has some."""
    await_condition(lambda: gossip.report().addresses, "the node listens")
    return gossip.report().addresses


def await_peers(gossip: Libp2pGossip, *others: Libp2pGossip) -> None:
    """Wait until the node is connected to each of the others."""
    wanted = {other.peer_id for other in others}
    await_condition(lambda: wanted <= set(gossip.report().peer_ids), f"connected to {len(wanted)} peers: {gossip.report().trouble}")


def await_bodies(gossip: Libp2pGossip, count: int) -> list[Received]:
    """The next so many bodies that the node receives."""
    received: list[Received] = []

    def enough() -> bool:
        received.extend(gossip.drain())
        return len(received) >= count

    await_condition(enough, f"{count} bodies have come")
    return received


def exchange(sender: Libp2pGossip, receiver: Libp2pGossip, tokens: int = 40) -> None:
    """One group from one node to another, whole and with its signer's name; others that arrive meanwhile are passed over.

    Publishing is best effort, and a message that meets a connection's end is lost: after some seconds another one is sent.
    """
    sent: dict[bytes, float] = {}
    arrived: list[Received] = []

    def is_there() -> bool:
        if not sent or time.monotonic() - max(sent.values()) > 5:
            body = make_body(sender.peer_id, tokens)
            sent[body] = time.monotonic()
            sender.publish(body)
        arrived.extend(received for received in receiver.drain() if received.body in sent)
        return bool(arrived)

    await_condition(is_there, f"a group of {tokens} tokens arrives")
    assert {received.sender for received in arrived} == {sender.peer_id}
