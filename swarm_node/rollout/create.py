"""Make the engine that the options ask for."""

from __future__ import annotations

import logging

from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import Engine
from swarm_node.rollout.families import Unsupported
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.reference import ReferenceEngine
from swarm_node.rollout.schedule import Schedule
from swarm_node.rollout.sparse import SparseEngine

log = logging.getLogger(__name__)


def create_engine(policy: Policy, options: RolloutOptions, schedule: Schedule | None = None) -> Engine:
    """The engine of `rollout.engine`. Where the sparse one cannot walk the model, the reference takes its place, and says so.

    Args:
        schedule: Of the sparse engine; None: dense.

    Raises:
        ValueError: the engine needs something that is not installed; the message says what to do.
    """
    if options.engine == "vllm":
        from swarm_node.rollout.vllm_engine import VllmEngine

        return VllmEngine(policy, options)
    if options.engine == "sparse":
        try:
            return SparseEngine(policy, options, schedule)
        except Unsupported as reason:
            log.warning("%s: sampling with the reference engine, dense and several times slower", reason)
            return ReferenceEngine(policy, options, choice=f"engine reference: {reason}")
    return ReferenceEngine(policy, options)
