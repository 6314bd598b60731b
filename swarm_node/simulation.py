"""A swarm in one process and in virtual time: real nodes, real learning, a simulated network.

    swarm = Swarm([NodeSpec("ada", "tiny-s"), NodeSpec("ben", "tiny-m", tokens_per_s=400)], seed=1)
    swarm.run(steps=5)
    swarm["ada"].rows[-1].foreign_groups_used

Nodes run the same loop, admission and codec as on a real machine. A step takes the virtual time that its tokens take at the node's
speed, so slow and fast machines meet as they would; everything follows from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm_node.config import make_config
from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.simulated.network import SimulatedNetwork
from swarm_node.network.simulated.peers import RawPeer
from swarm_node.network.simulated.weather import Link
from swarm_node.node import Node
from swarm_node.observe.metrics import StepRow
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.tasks.registry import load_task

SMALL: Mapping[str, Any] = {
    "rollout": {"prompts_per_step": 2, "max_new_tokens": 64},
    "control": {"group_size": 4},
    "learning": {"learning_rate": 3e-4},
}
"""What a simulated node does unless told otherwise: steps of a fraction of a second on one core."""


@dataclass(frozen=True)
class NodeSpec:
    """One simulated node."""

    name: str
    """Its peer id."""
    model: str = "tiny-s"
    lora: bool = False
    tokens_per_s: float = 1000.0
    """Virtual speed: completion tokens sampled and learned a second."""
    config: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    """Tables of the node's configuration, as in its TOML file."""


@dataclass
class SimulatedNode:
    """A node, and what it has measured."""

    spec: NodeSpec
    node: Node
    rows: list[StepRow] = field(default_factory=list)
    ready_at: float = 0.0
    """Virtual time of its next step."""


Adversary = Callable[[RawPeer, "Swarm"], None]
"""Called once a virtual second; sends what it likes."""


@dataclass
class _Intruder:
    peer: RawPeer
    act: Adversary
    ready_at: float = 0.0


class Swarm:
    """Nodes on one simulated network. Time moves only in `run`."""

    def __init__(
        self, specs: Sequence[NodeSpec], *, seed: int = 0, link: Link | None = None, adversaries: Mapping[str, Adversary] | None = None
    ) -> None:
        """
        Args:
            specs: one a node, with names that differ.
            seed: of the network and of every node; the same one gives the same run.
            link: what connects any two peers; `network.set_link`, `network.partition`, `network.churn` change it.
            adversaries: peer id -> what it does every virtual second.

        Raises:
            ValueError: two peers of one name, or a configuration that cannot be.
        """
        self.network = SimulatedNetwork(seed, link=link)
        self._nodes = {spec.name: self._start(spec, seed * 1000 + number) for number, spec in enumerate(specs)}
        self._intruders = [_Intruder(self.network.join_raw(name), act) for name, act in (adversaries or {}).items()]

    def __getitem__(self, name: str) -> SimulatedNode:
        return self._nodes[name]

    def __iter__(self) -> Iterator[SimulatedNode]:
        return iter(self._nodes.values())

    def run(
        self, *, steps: int | None = None, seconds: float | None = None, on_step: Callable[[SimulatedNode], None] | None = None
    ) -> None:
        """Let every node take `steps` more steps, or let `seconds` of virtual time pass.

        A node that has taken its steps waits for the others, and what is sent to it still arrives. A step that begins within `seconds`
        is finished.

        Args:
            steps: that each node takes from here on.
            seconds: of virtual time; give this or `steps`, not both.
            on_step: called after every step with the node that took it.
        """
        if (steps is None) == (seconds is None):
            raise ValueError("run takes either steps or seconds")
        goals = {name: math.inf if steps is None else len(member.rows) + steps for name, member in self._nodes.items()}
        until = math.inf if seconds is None else self.network.now + seconds
        while running := [member for name, member in self._nodes.items() if len(member.rows) < goals[name]]:
            # Of several that are due at once the first named one acts: the order is part of what the seed decides.
            turns: list[SimulatedNode | _Intruder] = [*running, *self._intruders]
            next_up = min(turns, key=lambda turn: turn.ready_at)
            if next_up.ready_at > until:
                break
            self.network.advance(max(0.0, next_up.ready_at - self.network.now))
            if isinstance(next_up, _Intruder):
                next_up.act(next_up.peer, self)
                next_up.ready_at = self.network.now + 1.0
                continue
            row = next_up.node.step()
            next_up.rows.append(row)
            next_up.ready_at = self.network.now + (row.rollout_tokens + row.learning_tokens) / next_up.spec.tokens_per_s
            if on_step:
                on_step(next_up)
        if seconds is not None:
            self.network.advance(until - self.network.now)

    def _start(self, spec: NodeSpec, seed: int) -> SimulatedNode:
        tables = {name: {**SMALL.get(name, {}), **spec.config.get(name, {})} for name in {**SMALL, **spec.config}}
        tables["run"] = {**tables.get("run", {}), "seed": seed}
        config = make_config(tables)
        task = load_task(config.task.name)
        policy = load_policy(ModelOptions(name=spec.model, lora=spec.lora, device="cpu"))
        rules = AdmissionRules((task.name,), config.task.seed, config.admission, config.learning.collaboration == "horizontal")
        gossip = self.network.join(spec.name, rules.build(self.network.clock))
        node = Node(config, policy=policy, task=task, peer_id=spec.name, gossip=gossip, clock=self.network.clock, sequence=0)
        return SimulatedNode(spec, node)
