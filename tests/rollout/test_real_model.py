"""SmolLM2-135M: pulled as a user pulls it, it answers, and both engines sample the same from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from swarm_protocols.group import Completion

from swarm_node.policy.catalogue import pull
from swarm_node.policy.loading import load_policy
from swarm_node.policy.logprobs import completion_logprobs
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.policy import Policy
from swarm_node.rollout.engine import GroupRequest, Rollout
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.reference import ReferenceEngine

NAME = "smollm2-135m"


def mean_error(judge: Policy, requests: Sequence[GroupRequest], rollout: Rollout) -> float:
    """Mean distance of the recorded log-probs from a policy's own, in nats."""
    pairs, recorded = [], []
    for request, group in zip(requests, rollout.groups, strict=True):
        for completion in group:
            pairs.append((torch.from_numpy(request.prompt), torch.from_numpy(completion.tokens)))
            recorded.append(completion.logprobs)
    with torch.no_grad():
        exact = torch.cat(completion_logprobs(judge.model, pairs)).numpy()
    return float(np.abs(np.concatenate(recorded) - exact).mean())


@pytest.mark.slow
def test_the_real_model_is_pulled_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE", str(tmp_path))
    assert pull(NAME).present
    policy = load_policy(ModelOptions(name=NAME, device="cpu"))
    assert policy.stop_ids == {2}
    assert policy.tokenizer.decode([2]) == "<|im_end|>"
    prompt = policy.encode_prompt("What is the capital of France?")
    assert str(policy.tokenizer.decode(prompt)).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    engine = ReferenceEngine(policy, RolloutOptions())
    # Which of the eight say so depends on how the processor rounds.
    rollout = engine.generate([GroupRequest(prompt, 8, 0)], seed=0, temperature=0.3, max_new_tokens=30)
    assert any("Paris" in policy.decode(completion.tokens) for completion in rollout.groups[0])


@pytest.mark.slow
def test_both_engines_sample_the_same_from_it() -> None:
    pull(NAME)
    errors = {}
    for dtype in ("float32", "bfloat16"):
        policy = load_policy(ModelOptions(name=NAME, device="cpu", dtype=dtype))
        requests = [
            GroupRequest(policy.encode_prompt(text), 4, key) for key, text in enumerate(["What is the capital of France?", "Count to ten."])
        ]
        reference, sparse = (
            make(policy, RolloutOptions()).generate(requests, seed=1, temperature=1.0, max_new_tokens=32)
            for make in (ReferenceEngine, SparseEngine)
        )
        if dtype == "float32":
            judge = policy
            same = [
                assert_same(a, b)
                for ours, theirs in zip(sparse.groups, reference.groups, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            ]
            assert sum(same) >= 6
        errors[dtype] = [mean_error(judge, requests, rollout) for rollout in (sparse, reference)]
    print(f"mean distance of recorded log-probs from float32, sparse and reference engine: {errors}")
    assert errors["float32"][0] < 1e-4
    # Logits near 16 are an eighth apart in bfloat16: two right engines differ, but neither may be further from the truth.
    assert errors["bfloat16"][0] < 1.5 * errors["bfloat16"][1]


def assert_same(ours: Completion, theirs: Completion) -> bool:
    """Whether two completions are one; they may part only in the far tail, where many ids share one step of float32."""
    length = min(len(ours), len(theirs))
    common = int((ours.tokens[:length] == theirs.tokens[:length]).cumprod().sum())
    np.testing.assert_allclose(ours.logprobs[:common], theirs.logprobs[:common], atol=1e-4)
    if common < length:
        assert min(ours.logprobs[common], theirs.logprobs[common]) < np.log(1e-4)
        return False
    return len(ours) == len(theirs)
