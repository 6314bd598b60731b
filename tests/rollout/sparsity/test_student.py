"""What distillation trains is what the sparse engine samples from: its log-probs are those of the student's teacher-forced forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from swarm_node.policy.parts import head
from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.policy.sparse_attention import completion_hidden
from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.schedule import Schedule
from tests.support.policies import family_model, random_policy

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_s_log_probs_are_the_student_s(family: str, adapted: bool) -> None:
    policy = random_policy(model=family_model(family, **FAMILIES[family]), stop_ids=frozenset({64}))  # never sampled
    schedule = Schedule((1,), 0.8, "test")
    engine = SparseEngine(policy, RolloutOptions(), schedule)
    adapter = RolloutAdapter(policy.model, rank=4, alpha=4)
    with torch.no_grad():
        for index, parameter in enumerate(adapter.parameters().values()):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(index))
    if adapted:
        engine.wear(adapter)
    prompt = np.random.default_rng(0).integers(4, 60, 45).astype(np.int32)
    rollout = engine.generate([GroupRequest(prompt, 3, 7)], seed=2, temperature=0.9, max_new_tokens=70)
    assert rollout.report.sparse_share > 0.2
    for completion in rollout.groups[0]:
        tokens = torch.from_numpy(completion.tokens.astype(np.int64))
        budgets = schedule.budgets_at(np.arange(45, 45 + len(tokens) - 1))
        found = []
        for worn, pages in ((adapted, budgets), (not adapted, budgets), (adapted, None)):
            with torch.no_grad(), adapter.active() if worn else nullcontext():
                hidden = completion_hidden(policy.model, torch.from_numpy(prompt.astype(np.int64)), tokens, pages)
                found.append((head(policy.model)(hidden) / 0.9).log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy())
        np.testing.assert_allclose(found[0], completion.logprobs, rtol=0, atol=1e-4)
        assert np.abs(found[1] - completion.logprobs).max() > 1e-2, "the adapter is felt"
        if family != "mistral":  # all layers of a Mistral have the window
            assert np.abs(found[2] - completion.logprobs).max() > 1e-3, "so is what was not read"
