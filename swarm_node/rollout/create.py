"""Make the engine that the options ask for."""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_kernels.choose import choose_backend
from swarm_kernels.naive.backend import TorchKernels

from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import Engine
from swarm_node.rollout.options import RolloutOptions, SparsityOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.paged.families import Unsupported
from swarm_node.rollout.reference import ReferenceEngine
from swarm_node.rollout.sparsity.closed_loop import ClosedLoop
from swarm_node.rollout.sparsity.monitor import Monitor
from swarm_node.rollout.sparsity.schedule import choose_schedule

log = logging.getLogger(__name__)


def create_engine(policy: Policy, options: RolloutOptions, sparsity: SparsityOptions | None = None, home: Path | None = None) -> Engine:
    """The engine of `rollout.engine`. Where the sparse one cannot walk the model, or has no kernels that are worth it, the reference takes
    its place, and says so.

    Args:
        policy: What it samples from; read at every call, so it may learn meanwhile.
        options: `[rollout]`.
        sparsity: Of the sparse engine; None: dense.
        home: Where a calibrated schedule may lie.

    Raises:
        ValueError: the schedule does not exist or cannot be read, or the engine needs something that is not installed; the message says
            what to do.
    """
    if options.engine == "vllm":
        from swarm_node.rollout.vllm.engine import VllmEngine

        return VllmEngine(policy, options)
    if options.engine == "sparse":
        backend = choose_backend(policy.device)
        if isinstance(backend.kernels, TorchKernels):  # which gather pages with torch, ten times slower than dense attention in place
            return ReferenceEngine(policy, options, choice=f"engine reference, dense, for want of fast kernels; {backend.reason}")
        try:
            return _sparse(policy, options, sparsity or SparsityOptions(schedule="dense"), home)
        except Unsupported as reason:
            log.warning("%s: sampling with the reference engine, dense and several times slower", reason)
            return ReferenceEngine(policy, options, choice=f"engine reference: {reason}")
    return ReferenceEngine(policy, options)


def check_engine(options: RolloutOptions) -> None:
    """Whether what the engine needs is installed. Raises ValueError."""
    if options.engine == "vllm":
        from swarm_node.rollout.vllm.start import import_vllm

        import_vllm()


def _sparse(policy: Policy, options: RolloutOptions, sparsity: SparsityOptions, home: Path | None) -> SparseEngine:
    schedule, why = choose_schedule(sparsity, policy.name, home)
    monitor = None
    if schedule is not None and sparsity.closed_loop:
        loop = ClosedLoop(schedule, threshold=sparsity.threshold, context=policy.context)
        monitor = Monitor(policy, loop, sparsity.observed_completions)
    engine = SparseEngine(policy, options, schedule, monitor)
    engine.choices += (why,)
    return engine
