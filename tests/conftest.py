"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in torch depend on how many threads share them; on one thread the same program gives the same bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def swarm(one_thread: None) -> Callable:  # type: ignore[type-arg]
    """A simulated swarm in virtual time: `swarm([NodeSpec("ada", "tiny-s"), ...], seed=1, link=..., adversaries={...})`."""
    from swarm_node.simulation import Swarm

    return Swarm
