"""A node's life on a machine: home, model, network, the loop, checkpoints, and a clean end.

`node.py` is the loop without files, signals and processes; this is the rest of `swarm-node join`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from swarm_node import __version__
from swarm_node.checkpoint import Checkpoint, CheckpointError, check_room, load_latest, save_checkpoint
from swarm_node.config import Config, save_config
from swarm_node.home import Home
from swarm_node.interrupt import Interrupt, Stopped
from swarm_node.logs import log_to_file
from swarm_node.network.admission.rules import AdmissionRules
from swarm_node.network.identity import load_or_create
from swarm_node.network.live import Libp2pGossip
from swarm_node.network.swarm_id import swarm_id
from swarm_node.node import Node, check_resumable
from swarm_node.observe.metrics import EventRow, MetricsWriter, StepRow
from swarm_node.observe.status import State, Status
from swarm_node.observe.status_file import StatusFile
from swarm_node.observe.stepline import step_line
from swarm_node.policy.loading import check_model, load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.policy import Policy
from swarm_node.profile import StepProfiler
from swarm_node.rollout.create import check_engine
from swarm_node.rollout.sparsity.schedule import choose_schedule
from swarm_node.tasks.base import Task
from swarm_node.tasks.registry import load_task
from swarm_node.terminal import Terminal

Say = Callable[[str], None]

LISTENING_S = 15.0
"""How long the start waits for the network process, so that the address to dial can be printed."""

FIRST_PEER_S = 15.0
"""How long a node that was told whom to join waits for the first peer before it trains alone; it keeps dialling."""


def run(config: Config, say: Say | None = None, *, profile: bool = False) -> int:
    """Run a node until its steps or minutes are over or it is told to stop; returns the exit code: 1 when the last steps could not be
    saved, else 0.

    Args:
        config: of the node; `config.home` is its home folder.
        say: gets every line that the node says; by default standard output.
        profile: write into the home folder where the time of a step goes.

    Raises:
        ValueError: the configuration cannot be run (unknown model or task, home in use, no room for a checkpoint, a checkpoint of
            another model); nothing has been written then.
    """
    say = say or Terminal()
    with Interrupt() as interrupt:
        try:
            with Home.open(config.home) as home:
                if home.config.exists():  # a new home stays empty until everything has been checked
                    log_to_file(home.path)
                config.network.check_listening()
                task = load_task(config.task.name)
                checkpoint = load_latest(home.checkpoints)
                model = as_before(config.model, checkpoint)
                say(f"loading {model.name}")
                policy = load_policy(model)
                if checkpoint is not None:
                    check_resumable(checkpoint.state, policy)
                check_room(home.checkpoints, checkpoint_bytes(policy))
                life = Life(config, home, policy, task, checkpoint, interrupt, say)
                if profile:
                    life.profiler = StepProfiler(home.path, say)
                try:
                    life.live()
                except Stopped:
                    say("stopped")
                return 0 if life.saved else 1
        except Stopped:
            say("stopped before the first step")
            return 0


def find_problems(config: Config) -> list[tuple[str, ValueError]]:
    """What `run` would refuse, as far as that shows without loading weights, listening, or opening the home: option and error."""
    checks: dict[str, Callable[[], object]] = {
        "task.name": lambda: load_task(config.task.name),
        "model.name": lambda: check_model(config.model),
        "rollout.engine": lambda: check_engine(config.rollout),
        "sparsity.schedule": lambda: choose_schedule(config.sparsity, config.model.name, config.home),
    }
    problems = []
    for key, check in checks.items():
        try:
            check()
        except ValueError as error:
            problems.append((key, error))
    return problems


def checkpoint_bytes(policy: Policy) -> int:
    """What a checkpoint of this policy takes on disk, about: the weights, AdamW's two float32 moments of each, and a float32 copy of
    weights in half precision."""
    return sum(
        parameter.numel() * (parameter.element_size() + 8 + (4 if parameter.element_size() < 4 else 0))
        for parameter in policy.trainable().values()
    )


def as_before(model: ModelOptions, checkpoint: Checkpoint | None) -> ModelOptions:
    """The model options with every `auto` that a checkpoint has decided already: the same command goes on with the same model, however
    much memory is free this time."""
    if checkpoint is None:
        return model
    decided = {"name": checkpoint.state.get("model"), "dtype": checkpoint.state.get("dtype")}
    return model.model_copy(update={key: value for key, value in decided.items() if value and getattr(model, key) == "auto"})


class Life:
    """Everything that a running node holds open, from the first file it writes to the last."""

    def __init__(
        self, config: Config, home: Home, policy: Policy, task: Task, checkpoint: Checkpoint | None, interrupt: Interrupt, say: Say
    ) -> None:
        """Open the network and take up the checkpoint, if there is one.

        Raises:
            ValueError: the checkpoint does not fit the configuration.
        """
        self.config, self.home, self.policy, self.interrupt, self.say = config, home, policy, interrupt, say
        with home.writing():
            self.identity = load_or_create(home.path)
        self.status = Status()
        self.gossip = self._open_network(task)
        try:
            self.node = Node(config, policy=policy, task=task, peer_id=self.identity.peer_id, gossip=self.gossip, status=self.status)
            if checkpoint is not None:
                self.node.restore(checkpoint)
            with home.writing():
                save_config(home.config, config)
                self.metrics = MetricsWriter(home.metrics)
        except BaseException:
            self.gossip.close()
            raise
        if checkpoint is not None and checkpoint.state["task"] != task.name:
            say(f"this node trained on {checkpoint.state['task']} until now and goes on with {task.name}")
        log_to_file(home.path)
        self.resumed = checkpoint is not None
        self.saved_step = self.node.steps
        """Of the last checkpoint; a new node has nothing to lose before its first step."""
        self.saved_at = time.monotonic()
        self.started_at = time.monotonic()
        self.profiler: StepProfiler | None = None
        self._told: set[str] = set()
        self.status_file = StatusFile(home.path, self.describe)

    def live(self) -> None:
        """Train until the end. Whatever ends the loop (the end, a signal, an error), a checkpoint of the last complete step is left behind,
        unless an error came in the middle of an update or left weights that are not finite.
        """
        try:
            self._train()
        except Exception as error:
            error.add_note(replace(self.status.snapshot(), step=self.node.steps).describe(time.time()))
            raise
        finally:
            try:
                self.interrupt.hold()
            finally:  # a signal may have come first
                self._leave()

    def _train(self) -> None:
        self._introduce()
        if self.config.run.eval_every and self.node.steps == 0:
            self._evaluate()
        self._find_peers()
        done = self._done()
        while not done:
            row = self._step()
            self.metrics.write(row)
            self.say(step_line(row))
            self._say_notices()
            if self._checkpoint_due():
                self._checkpoint()
            self.interrupt.release()
            done = self._done()
            if self.config.run.eval_every and (self.node.steps % self.config.run.eval_every == 0 or done):
                self._evaluate()

    @property
    def saved(self) -> bool:
        """Whether the last complete step is in a checkpoint."""
        return self.saved_step == self.node.steps

    def _step(self) -> StepRow:
        def step() -> StepRow:
            return self.node.step(before_update=self.interrupt.hold)

        return step() if self.profiler is None else self.profiler.run(step)

    # -- parts of a life ----------------------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        for choice in (*self.policy.choices, *self.node.engine.choices):
            self.say(choice)
        self.say(f"peer id {self.identity.peer_id}, home {self.home.path}")
        addresses = self._wait_for_addresses()
        self._say_notices()
        for address in addresses:
            self.say(f"others join with: swarm-node join --swarm {self.config.swarm} --peer {address}")
        if self.metrics.found_rows:  # without a checkpoint too: steps of a node that was killed before its first one are taken again
            self.metrics.resume(self.node.steps, time.time())
        if self.resumed:
            self.say(f"resumed at step {self.node.steps}")
        facts = {
            "node": self.home.path.name,
            "model": self.policy.name,
            "lora": self.policy.lora,
            "peer_id": self.identity.peer_id,
            "swarm": self.config.swarm,
            "task": self.node.task.name,
            "addresses": list(addresses),
            "version": __version__,
        }
        self.metrics.write(EventRow(step=self.node.steps, time=time.time(), name="start", data=facts))

    def _wait_for_addresses(self) -> tuple[str, ...]:
        """The addresses that others can dial, as soon as the network process listens; it starts within seconds, or training goes on."""
        deadline = time.monotonic() + LISTENING_S
        while not (addresses := self.gossip.report().addresses) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not addresses:
            self.say(f"the network does not listen yet ({self.gossip.report().trouble}): training alone meanwhile")
        return addresses

    def _say_notices(self) -> None:
        """What the network's processes have found out about this machine since: each sentence once."""
        for notice in self.gossip.report().notices:
            if notice not in self._told:
                self._told.add(notice)
                self.say(f"network: {notice}")

    def _find_peers(self) -> None:
        """Wait a little for the first peer, if this node was told of any."""
        network = self.config.network
        if not network.peers and not network.directory_peers:
            return
        self.status.enter(State.FINDING_PEERS, waiting_for="the first peer")
        deadline = time.monotonic() + FIRST_PEER_S
        while not self.gossip.report().peers:
            if time.monotonic() > deadline:
                self.say(f"no peer answered within {FIRST_PEER_S:.0f} s: training alone, and still dialling")
                return
            time.sleep(0.1)

    def _done(self) -> bool:
        run = self.config.run
        if run.steps is not None and self.node.steps >= run.steps:
            return True
        return run.minutes is not None and time.monotonic() - self.started_at >= 60 * run.minutes

    def _checkpoint_due(self) -> bool:
        run = self.config.run
        return self.node.steps % run.checkpoint_every == 0 or time.monotonic() - self.saved_at > 60 * run.checkpoint_minutes

    def _checkpoint(self) -> None:
        """Save what is sound; a disk that has filled up costs the checkpoint and not the run, and the next one is tried when it is due."""
        self.status.enter(State.CHECKPOINTING)
        self.saved_at = time.monotonic()
        try:
            self.node.check_sound()
            save_checkpoint(self.home.checkpoints, self.node.checkpoint())
        except (CheckpointError, OSError, RuntimeError) as error:  # RuntimeError: what holds the weights does not answer any more
            self.say(f"no checkpoint of step {self.node.steps}: {error}")
            self.metrics.write(EventRow(step=self.node.steps, time=time.time(), name="checkpoint-failed", detail=str(error)))
            return
        self.saved_step = self.node.steps

    def _evaluate(self) -> None:
        evaluation = self.node.evaluate("eval")
        self.metrics.write(evaluation.row(self.node.steps, time.time()))
        self.say(
            f"step {self.node.steps} · accuracy on {evaluation.problems - evaluation.left_out} held-out problems {evaluation.accuracy:.3f} "
            f"± {evaluation.standard_error:.3f} · length {evaluation.length_mean:.0f}"
            + (f" · {evaluation.left_out} left out, first: {evaluation.left_out_why}" if evaluation.left_out else "")
        )

    def _leave(self) -> None:
        self.status.enter(State.STOPPING)
        # Processes take seconds to end, and so does a large checkpoint: both together stay below the ten seconds that a stop may take.
        closing = threading.Thread(target=self.gossip.close, name="closing-network")
        closing.start()
        try:
            if not self.saved:
                self._checkpoint()
            if self.profiler is not None:
                self.profiler.close()
            if self.saved and self.node.steps:
                self.say(f"checkpoint of step {self.node.steps} is in {self.home.checkpoints}")
        finally:
            self.status.enter(State.STOPPING)
            closing.join()
            self.metrics.write(EventRow(step=self.node.steps, time=time.time(), name="stop"))
            self.metrics.close()
            self.status_file.close()

    def _open_network(self, task: Task) -> Libp2pGossip:
        seed, collaboration = self.config.task.seed, self.config.learning.collaboration
        swarm = swarm_id(self.config.swarm, f"{task.name}@{seed} {collaboration}", self.policy.tokenizer_fingerprint)
        rules = AdmissionRules((task.name,), seed, self.config.admission, collaboration == "horizontal")
        return Libp2pGossip.start(self.config.network, self.home.path, swarm, rules, identity=self.identity)

    def describe(self) -> dict[str, Any]:
        """What `swarm-node status` shows."""
        snapshot, network = self.status.snapshot(), self.gossip.report()
        return {
            "pid": os.getpid(),
            "updated": time.time(),
            "state": snapshot.state,
            "since": snapshot.since,
            "waiting_for": snapshot.waiting_for or network.trouble,
            "step": self.node.steps,
            "swarm": self.config.swarm,
            "model": self.policy.name,
            "peer_id": self.identity.peer_id,
            "addresses": list(network.addresses),
            "peers": network.peers,
            "notices": list(network.notices),
            "restarts": network.restarts,
            "groups_sent": self.node.totals.groups_sent,
            "groups_received": network.received,
            "groups_admitted": self.node.totals.groups_admitted,
            "own_groups_used": self.node.totals.own_groups_used,
            "foreign_groups_used": self.node.totals.foreign_groups_used,
            "groups_unread": self.node.groups_unread,
            "reward_errors": self.node.totals.reward_errors,
            "rejections": self.node.rejections(),
            "processes": self.gossip.pids,
        }
