"""The scheduler: who is computed when pages are short. What the engine computes of it stands in test_engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from swarm_kernels.layout import PageLayout

from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.paged.cache import PagedCache
from swarm_node.rollout.paged.scheduler import Scheduler
from swarm_node.rollout.paged.sequence import Prompt


@pytest.mark.parametrize(("pages", "opened"), [(5, []), (6, [1])])
def test_a_prompt_waits_until_it_leaves_a_page_to_each_completion_and_one_to_spare(pages: int, opened: list[int]) -> None:
    cache = PagedCache(PageLayout(layers=1, pages=pages, kv_heads=1, head_size=32, page_size=16, dtype=torch.float32))
    prompts = [Prompt(index, GroupRequest(np.zeros(32, np.int32), 1, index)) for index in range(2)]
    scheduler = Scheduler(prompts, np.zeros(2, np.uint64), cache, limit=8, slots=4, chunk=32)
    assert [owner for owner, _ in scheduler.next_chunks()] == prompts[:1]
    prompts[0].hidden = torch.zeros(1)
    scheduler.start()
    # One completion holds two pages and may take a third next; the second prompt takes two, and its completion a third as well.
    assert [prompts.index(owner) for owner, _ in scheduler.next_chunks() if isinstance(owner, Prompt)] == opened
