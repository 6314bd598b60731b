"""One node: the loop in which the rooms meet, and the only place where they do.

A step, top to bottom: draw problems, choose the group size, sample the groups, publish them, take in what peers sent, learn, and tell
the controller how long the completions were. A node that hears nobody takes the same path with an empty inbox.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_protocols.codec import decode_group, encode_group
from swarm_protocols.group import Completion, Group, PolicyTag, ProblemRef, hash_prompt
from swarm_protocols.limits import DEFAULT_LIMITS
from swarm_protocols.reject import Rejected

from swarm_node.checkpoint import Checkpoint, CheckpointError
from swarm_node.config import Config
from swarm_node.control.decision import Cost, Decision, Observation
from swarm_node.control.prompt_aware import prompt_feature
from swarm_node.control.sagc import Controller
from swarm_node.evaluation import Evaluation, evaluate
from swarm_node.learning.distill import Distiller, DistillReport
from swarm_node.learning.pool import Pool, PoolState
from swarm_node.learning.report import StepReport
from swarm_node.learning.samples import split_one_reward
from swarm_node.learning.scored import ScoredGroup
from swarm_node.learning.trainer import Trainer
from swarm_node.network.admission.halves import FullAdmission
from swarm_node.network.gossip import Gossip
from swarm_node.network.inbox import newest_of_each
from swarm_node.observe.metrics import Increments, StepRow
from swarm_node.observe.status import State, Status
from swarm_node.policy.policy import Policy
from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.prompts import Prompts
from swarm_node.rollout.create import create_engine
from swarm_node.rollout.engine import Engine, GroupRequest, Rollout
from swarm_node.rollout.noise import node_seed
from swarm_node.tasks.assignment import EVERYBODY, MAX_SLOTS, assigned_index
from swarm_node.tasks.base import Problem, Reward, RewardError, Split, Task

log = logging.getLogger(__name__)

STATE_VERSION = 2

SEQUENCE_GAP = 1 << 32
"""Sequence numbers left out after a checkpoint: more than the lost steps after it can have used, 4 s of the clock."""
JUDGED_PER_PLACE = 4
"""Groups of peers judged in a step for each place that a foreign group can have in its batch."""
MAX_TRAINED_TOKENS = 8192
"""Longest prompt with completion that is taken from a peer, unless this node samples longer ones itself."""


ADAPTER = "rollout_adapter."
"""Before the names of the rollout adapter's tensors in a checkpoint."""


class ResumeError(ValueError):
    """A checkpoint does not belong to this configuration; the message says what differs and what to do."""


@dataclass(frozen=True)
class Sampled:
    """One step's own groups and what scoring them found."""

    groups: tuple[ScoredGroup, ...]
    rewards: tuple[Reward, ...]
    """Of every completion whose reward could be computed."""
    rollout: Rollout
    decision: Decision


@dataclass
class Totals:
    """Running totals over the node's life; they are part of the checkpoint."""

    groups_sent: int = 0
    groups_admitted: int = 0
    own_groups_used: int = 0
    foreign_groups_used: int = 0
    reward_errors: int = 0
    straggler_sum: float = 0.0
    """Discounted sum of the steps' straggler shares; with `straggler_weight`, the rate that is shown against the budget."""
    straggler_weight: float = 0.0


def check_resumable(state: Mapping[str, Any], policy: Policy) -> None:
    """Whether a checkpoint's state belongs to this policy.

    Raises:
        ResumeError: it was made by another model, or is in another version's format.
    """
    if state.get("version") != STATE_VERSION:
        found = state.get("version")
        raise ResumeError(f"the checkpoint has format {found}, this version reads {STATE_VERSION}: use another home folder")
    if (state["fingerprint"], state["lora"]) != (policy.fingerprint, policy.lora):
        made_by = f"{state['model']} ({'LoRA' if state['lora'] else 'full'})"
        here = f"{policy.source or policy.name} ({'LoRA' if policy.lora else 'full'})"
        if state["fingerprint"] != policy.fingerprint:
            made_by, here = f"{made_by} with fingerprint {state['fingerprint']}", f"{here} with {policy.fingerprint}"
        raise ResumeError(f"the checkpoint was made by {made_by} and this run is {here}: ask for that model, or use another --home")


class Node:
    """A policy that samples, exchanges and learns. One step a call; no thread, no signal, no file."""

    def __init__(
        self,
        config: Config,
        *,
        policy: Policy,
        task: Task,
        peer_id: str,
        gossip: Gossip,
        status: Status | None = None,
        clock: Callable[[], float] = time.time,
        sequence: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`clock` gives Unix seconds. `sequence` is the first sequence number; by default the clock in nanoseconds, and after `restore`
        at least what the checkpoint's steps did not use. `engine` samples; by default the one that the configuration asks for."""
        self.config = config
        self.policy = policy
        self.task = task
        self.peer_id = peer_id
        self.gossip = gossip
        self.status = status or Status(clock)
        self.clock = clock
        self._noise_seed = node_seed(config.run.seed, peer_id)
        self.engine = create_engine(policy, config.rollout, config.sparsity, config.home) if engine is None else engine
        self.distiller = self._make_distiller()
        self.controller = Controller(config.control, config.run.seed)
        self.pool = Pool(config.pool)
        # Dr. GRPO divides by the longest completion that there can be.
        self.trainer = Trainer(policy, config.learning.model_copy(update={"constant_length": config.rollout.max_new_tokens}))
        self.context = policy.context or DEFAULT_LIMITS.tokens_per_completion
        self.admission = FullAdmission(
            config.admission,
            prompt_tokens=lambda ref: self.prompt(self.problem(ref)),
            vocab_size=policy.vocab_size,
            stop_ids=policy.stop_ids,
            max_tokens=min(self.context, max(MAX_TRAINED_TOKENS, 2 * config.rollout.max_new_tokens)),
        )
        self.horizontal = config.learning.collaboration == "horizontal"
        self.totals = Totals()
        self.groups_unread = 0
        """Arrived faster than they could be learned from: dropped before they cost anything."""
        self.steps = 0
        self._sequence = time.time_ns() if sequence is None else sequence
        self._arrivals, self._refusals = Increments(), Increments()
        self._boundary = self._state()
        self._updating = False

    def _make_distiller(self) -> Distiller | None:
        options = self.config.distill
        if not options.enabled:
            return None
        adapter = RolloutAdapter(self.policy.model, options.rank, options.alpha, self._noise_seed)
        self.engine.wear(adapter)
        return Distiller(self.policy.model, adapter, options, self._noise_seed)

    # -- the loop -----------------------------------------------------------------------------------------------------------------

    def step(self, before_update: Callable[[], None] = lambda: None) -> StepRow:
        """Take one step.

        Args:
            before_update: called before anything that a checkpoint holds changes, the weights first. Until then the step can be
                abandoned by an exception and `checkpoint` still describes the step before; afterwards it must be left to finish.
        """

        def update() -> None:
            before_update()
            self._updating = True

        began = time.perf_counter()
        self.status.enter(State.ROLLING_OUT, step=self.steps)
        problems, prompts = self.next_problems()
        features = [prompt_feature(problem.task, problem.level, len(prompt)) for problem, prompt in zip(problems, prompts, strict=True)]
        decision = self.controller.choose(features)
        sampled = self.sample(problems, prompts, decision)

        self.status.enter(State.EXCHANGING)
        self.publish(sampled.groups)
        admitted = self.take_in()

        self.status.enter(State.LEARNING)
        for group in (*sampled.groups, *admitted):
            self.pool.add(group)
        learned = self.trainer.step(self.draw(), update)
        if learned.dropped_for_memory:
            log.warning("%d foreign groups did not fit into memory and were left out", learned.dropped_for_memory)
        update()  # the books of a step without an update must not be torn either
        distilled = self.distill(sampled.groups)
        self.engine.policy_updated(self.steps + 1)

        rollout, report = sampled.rollout, sampled.rollout.report
        observed = self.controller.observe(rollout.lengths, rollout.truncated, Cost(report.seconds, report.slot_idle_share))
        self.steps += 1
        gamma = self.config.control.gamma
        self.totals.straggler_sum = gamma * self.totals.straggler_sum + observed.rate
        self.totals.straggler_weight = gamma * self.totals.straggler_weight + 1
        self.totals.own_groups_used += learned.own_groups
        self.totals.foreign_groups_used += learned.foreign_groups
        self._boundary = self._state()
        self._updating = False
        self.gossip.progress(self.steps, self.policy.name)
        return self._row(sampled, observed, learned, distilled, len(admitted), time.perf_counter() - began)

    def next_problems(self) -> tuple[list[Problem], list[NDArray[np.int32]]]:
        """This step's problems: assigned by peer id and step, so that nobody can pick easy ones; in horizontal collaboration by step."""
        seed = self.config.task.seed
        owner = EVERYBODY if self.horizontal else self.peer_id
        prompts = Prompts(self.policy, self.task, self.config.rollout.max_new_tokens, self.context)
        drawn = (prompts.draw(seed, assigned_index(owner, self.steps, slot, seed)) for slot in range(MAX_SLOTS))
        usable = list(islice(filter(None, drawn), self.config.rollout.prompts_per_step))
        prompts.check()
        if prompts.left_out:
            log.warning("step %d left out %d problems, first: %s", self.steps, prompts.left_out, prompts.why)
        return [problem for problem, _ in usable], [prompt for _, prompt in usable]

    def sample(self, problems: Sequence[Problem], prompts: Sequence[NDArray[np.int32]], decision: Decision) -> Sampled:
        """Sample and score one group a problem."""
        requests = [
            GroupRequest(prompt, size, self.steps << 16 | slot)
            for slot, (prompt, size) in enumerate(zip(prompts, decision.sizes, strict=True))
        ]
        options = self.config.rollout
        rollout = self.engine.generate(
            requests, seed=self._noise_seed, temperature=options.temperature, max_new_tokens=options.max_new_tokens
        )
        groups: list[ScoredGroup] = []
        rewards: list[Reward] = []
        for problem, prompt, completions in zip(problems, prompts, rollout.groups, strict=True):
            group = self._group(problem, prompt, completions, rollout.report.largest_budget)
            scores = self.score(problem, completions)
            rewards += [score for score in scores if score is not None]
            body = encode_group(group)
            if self.horizontal:  # parts wait in the pool, and must come back from a checkpoint as they went in
                group = decode_group(body)
            groups.append(self._scored(group, prompt, scores, self.peer_id, body))
        return Sampled(tuple(groups), tuple(rewards), rollout, decision)

    def publish(self, groups: Sequence[ScoredGroup]) -> None:
        """Send own groups to the peers."""
        for group in groups:
            self.gossip.publish(group.body)
            self.totals.groups_sent += 1

    def take_in(self) -> list[ScoredGroup]:
        """Groups of peers that pass every check, scored here: no reward is ever taken from the wire."""
        admitted: list[ScoredGroup] = []
        arrived = self.gossip.drain()
        chosen = newest_of_each(arrived, JUDGED_PER_PLACE * self.config.pool.foreign_per_step)
        self.groups_unread += len(arrived) - len(chosen)
        for received in chosen:
            try:
                group, prompt = self.admission.admit(received.sender, received.body)
            except Rejected as rejected:  # counted by admission
                log.debug("a group of %s was refused: %s", received.sender, rejected)
                continue
            scores = self.score(self.problem(group.problem), group.completions)
            admitted.append(self._scored(group, prompt, scores, received.sender, received.body))
        self.totals.groups_admitted += len(admitted)
        return admitted

    def draw(self) -> list[ScoredGroup]:
        """The step's batch. In horizontal collaboration the parts of the step before, which peers have had a step's time to send; with
        DAPO's dynamic sampling, foreign groups that cannot teach make room for others."""
        if self.horizontal:
            return self.pool.draw_parts(self.steps)
        batch = self.pool.draw(self.steps)
        if self.config.learning.algorithm != "dapo":
            return batch
        useful, useless = split_one_reward(batch, self.config.learning)
        return useful + self.pool.replace(self.steps, useless)

    def distill(self, groups: Sequence[ScoredGroup]) -> DistillReport | None:
        """Train the adapter that only rollouts wear, on the node's own completions; None when there is none or nothing is sparse."""
        if self.distiller is None or self.engine.schedule is None:
            return None
        samples = [
            (torch.from_numpy(group.prompt), torch.from_numpy(completion.tokens))
            for group in groups
            for completion in group.group.completions
        ]
        return self.distiller.step(samples, self.engine.schedule.budgets_at, self.config.rollout.temperature)

    def evaluate(self, split: Split) -> Evaluation:
        """Sampled accuracy on a split that is never trained on."""
        self.status.enter(State.EVALUATING)
        return evaluate(
            self.policy, self.engine, self.task, split=split, problems=self.config.run.eval_problems, samples=self.config.run.eval_samples,
            temperature=self.config.run.eval_temperature, max_new_tokens=self.config.rollout.max_new_tokens,
        )  # fmt: skip

    # -- prompts and rewards ------------------------------------------------------------------------------------------------------

    def problem(self, ref: ProblemRef) -> Problem:
        """The training problem that a reference names. Raises LookupError for a task that this node does not train on."""
        if ref.task != self.task.name:
            raise LookupError(f"this node trains on {self.task.name}")
        return self.task.problem(ref.seed, ref.index)

    def prompt(self, problem: Problem) -> NDArray[np.int32]:
        """Token ids (P,) of a problem's prompt."""
        return self.policy.encode_prompt(problem.prompt)

    def score(self, problem: Problem, completions: Sequence[Completion]) -> list[Reward | None]:
        """Rewards computed here; None where one could not be computed, which is not the same as a wrong answer."""
        scores: list[Reward | None] = []
        for completion in completions:
            try:
                scores.append(self.task.reward(problem, self.policy.decode(completion.tokens)))
            except RewardError:
                self.totals.reward_errors += 1
                scores.append(None)
        return scores

    def _group(self, problem: Problem, prompt: NDArray[np.int32], completions: tuple[Completion, ...], sparse_budget: int) -> Group:
        self._sequence += 1
        tag = PolicyTag(
            model=self.policy.name,
            fingerprint=self.policy.fingerprint,
            step=self.steps,
            engine=self.engine.name,
            dtype=str(self.policy.dtype).removeprefix("torch."),
            sparse_budget=sparse_budget,
            temperature=self.config.rollout.temperature,
            group_size=len(completions),
        )
        ref = ProblemRef(problem.task, problem.seed, problem.index)
        return Group(ref, hash_prompt(prompt), tag, self.clock(), self._sequence, completions)

    def _scored(self, group: Group, prompt: NDArray[np.int32], scores: Sequence[Reward | None], sender: str, body: bytes) -> ScoredGroup:
        rewards = tuple(None if score is None else score.value for score in scores)
        return ScoredGroup(group, prompt, rewards, sender, sender == self.peer_id, self.steps, body)

    # -- stop and resume ----------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Everything that the next step depends on, as it was when the last step ended."""
        state, bodies = self._boundary
        weights = {name: parameter.detach() for name, parameter in self.policy.trainable().items()}
        optimiser, _ = self.trainer.state_dict()
        if self.distiller is not None:
            optimiser |= {f"{ADAPTER}{name}": tensor for name, tensor in self.distiller.state_dict().items()}
        return Checkpoint(step=self.steps, weights=weights, optimiser=optimiser, state=state, bodies=bodies)

    def check_sound(self) -> None:
        """Whether `checkpoint` describes the last complete step.

        Raises:
            CheckpointError: an update was left half done, or a weight is not finite.
        """
        if self._updating:
            raise CheckpointError(f"the update after step {self.steps} was left half done")
        for name, parameter in self.policy.trainable().items():
            if not bool(parameter.isfinite().all()):
                raise CheckpointError(f"{name} holds numbers that are not finite")

    def _state(self) -> tuple[dict[str, Any], list[bytes]]:
        pool = self.pool.state()
        state = {
            "version": STATE_VERSION,
            "model": self.policy.source or self.policy.name,
            "dtype": str(self.policy.dtype).removeprefix("torch."),
            "fingerprint": self.policy.fingerprint,
            "lora": self.policy.lora,
            "task": self.task.name,
            "controller": self.controller.state(),
            "pool": pool.metadata,
            "trainer": self.trainer.scalars(),
            "engine": self.engine.state(),
            "totals": asdict(self.totals),
            "sequence": self._sequence,
        }
        return state, pool.bodies

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint.

        Raises:
            ResumeError: it was made by another model or in another version's format.
        """
        check_resumable(checkpoint.state, self.policy)
        state: dict[str, Any] = checkpoint.state
        try:
            self.policy.load_weights(checkpoint.weights)
            moments = {name: tensor for name, tensor in checkpoint.optimiser.items() if not name.startswith(ADAPTER)}
            adapter = {name.removeprefix(ADAPTER): tensor for name, tensor in checkpoint.optimiser.items() if name.startswith(ADAPTER)}
            self.trainer.load_state_dict(moments, state["trainer"])
            if self.distiller is not None and adapter:
                self.distiller.load_state_dict(adapter)
        except ValueError as error:  # another LoRA rank, another dtype
            raise ResumeError(f"the checkpoint of step {checkpoint.step} does not fit this configuration: {error}") from error
        self.controller.restore(state["controller"])
        self.engine.load_state(state["engine"])
        self.pool.restore(PoolState(checkpoint.bodies, state["pool"]), decode_group)
        self.totals = Totals(**state["totals"])
        self.steps = checkpoint.step
        self._sequence = max(self._sequence, state.get("sequence", 0) + SEQUENCE_GAP)  # older versions saved none
        self.engine.policy_updated(self.steps)
        self._boundary = self._state()

    # -- what is shown ------------------------------------------------------------------------------------------------------------

    def rejections(self) -> dict[str, int]:
        """Reject reason -> count, of both halves of admission."""
        return dict(Counter(self.admission.rejections) + Counter(self.gossip.report().rejections))

    def _row(
        self, sampled: Sampled, observed: Observation, learned: StepReport, distilled: DistillReport | None, admitted: int, seconds: float
    ) -> StepRow:
        network, rollout = self.gossip.report(), sampled.rollout
        rewards = np.array([reward.value for reward in sampled.rewards] or [np.nan])
        correct = np.array([float(reward.correct) for reward in sampled.rewards] or [np.nan])
        lengths = np.concatenate(rollout.lengths)
        refused = self._refusals.of(self.rejections())
        return StepRow.gather(
            {
                "decision": sampled.decision,
                "rollout": rollout.report,
                "learned": learned,
                "metrics": learned.metrics,
                "distilled": distilled,
                "observed": observed,
                "network": network,
            },
            **self._arrivals.of(
                {
                    "groups_received": network.received,
                    "groups_dropped": network.dropped + self.groups_unread,
                    "network_restarts": network.restarts,
                }
            ),
            step=self.steps,
            time=self.clock(),
            seconds=seconds,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std()),
            accuracy=float(correct.mean()),
            length_mean=float(lengths.mean()),
            length_max=int(lengths.max()),
            truncated_share=float(np.concatenate(rollout.truncated).mean()),
            straggler_rate=self.totals.straggler_sum / self.totals.straggler_weight,
            straggler_target=self.config.control.delta,
            feasible=not observed.infeasible,
            pool_groups=len(self.pool),
            groups_sent=len(sampled.groups),
            groups_admitted=admitted,
            rejections={reason: count for reason, count in refused.items() if count},
        )
