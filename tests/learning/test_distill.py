"""DistillSparse: the divergence, one update of the adapter, and its state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from swarm_node.learning.distill import Distiller, divergence, token_divergences
from swarm_node.learning.options import DistillOptions
from swarm_node.policy.loading import _add_adapters
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.rollout_adapter import AdapterError, RolloutAdapter
from swarm_node.policy.sparse_attention import completion_hidden
from tests.support.policies import random_model

pytestmark = pytest.mark.usefixtures("one_thread")


def one_page(positions: np.ndarray) -> np.ndarray:
    return np.ones(len(positions), dtype=np.int32)


def samples(count: int = 3, length: int = 90) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, 64, (n,), generator=generator) for n in (40 + i, length)) for i in range(count)]  # type: ignore[misc]


def distiller_of(model: nn.Module, seed: int = 0, **options: object) -> Distiller:
    found = DistillOptions.model_validate({"rank": 4, "alpha": 4, "learning_rate": 1e-2, "completions_per_step": 2, **options})
    return Distiller(model, RolloutAdapter(model, found.rank, found.alpha), found, seed)


def random_logits(count: int = 6, vocabulary: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    dense, sparse = (2 * torch.randn(count, vocabulary, generator=generator) for _ in range(2))
    return dense, sparse.requires_grad_()


def test_a_divergence_worked_by_hand() -> None:
    dense, sparse = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    reverse = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(divergence(dense, sparse, "forward")) == pytest.approx(forward, rel=1e-6)
    assert float(divergence(dense, sparse, "reverse")) == pytest.approx(reverse, rel=1e-6)
    tempered = torch.tensor([[math.log(9.0), 0.0]])  # at temperature 2 the same distribution
    assert float(divergence(dense, tempered, "forward", 2.0)) == pytest.approx(forward, rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_the_forward_divergence_is_the_difference_of_the_probabilities(temperature: float) -> None:
    dense, sparse = random_logits()
    divergence(dense, sparse, "forward", temperature).sum().backward()
    expected = ((sparse / temperature).softmax(-1) - (dense / temperature).softmax(-1)).detach() / temperature
    torch.testing.assert_close(sparse.grad, expected, rtol=0, atol=1e-6)


def test_equal_logits_have_no_divergence_and_no_gradient() -> None:
    for direction in ("forward", "reverse"):
        dense, _ = random_logits()
        sparse = dense.clone().requires_grad_()
        value = divergence(dense, sparse, direction).sum()
        value.backward()
        assert float(value.detach()) == pytest.approx(0, abs=1e-6)
        torch.testing.assert_close(sparse.grad, torch.zeros_like(sparse), rtol=0, atol=1e-6)


def test_the_dense_side_gets_no_gradient() -> None:
    dense, sparse = random_logits()
    dense.requires_grad_()
    divergence(dense, sparse, "forward").sum().backward()
    assert dense.grad is None


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_in_chunks_it_is_the_same_and_the_logits_of_all_tokens_never_exist_at_once(direction: str) -> None:
    weight = torch.randn(11, 5, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    dense, sparse = (torch.randn(10, 5, generator=generator) for _ in range(2))
    whole, chunked = sparse.clone().requires_grad_(), sparse.clone().requires_grad_()
    rows: list[int] = []

    def project(states: Tensor) -> Tensor:
        rows.append(len(states))
        return states @ weight.T

    expected = divergence(dense @ weight.T, whole @ weight.T, direction, 0.8)  # type: ignore[arg-type]
    expected.mean().backward()
    # Products of 5 terms and sums over 11, of values up to the divergence itself, in another order: each may round once more.
    tolerance = 16 * torch.finfo(torch.float32).eps * float(expected.detach().abs().max())
    found, accepted = token_divergences(project, dense, chunked, direction, 0.8, chunk_tokens=4)  # type: ignore[arg-type]
    found.mean().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(chunked.grad, whole.grad, rtol=0, atol=tolerance)
    assert max(rows) == 4
    assert len(rows) == 12, "three chunks, two sides, and once more in the backward pass"
    ours, theirs = ((states @ weight.T / 0.8).softmax(-1) for states in (dense, sparse))
    torch.testing.assert_close(accepted, torch.minimum(ours, theirs).sum(-1), rtol=0, atol=1e-6)
    assert not accepted.requires_grad


@pytest.mark.parametrize("lora", [False, True])
def test_updates_bring_the_sparse_actor_nearer_and_leave_the_policy_alone(lora: bool) -> None:
    model: nn.Module = random_model(layers=4)
    if lora:
        model = _add_adapters(model, ModelOptions(lora=True, lora_rank=4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    hidden = completion_hidden(model, *samples()[0])
    distiller = distiller_of(model, completions_per_step=3)
    reports = [distiller.step(samples(), one_page, 1.0) for _ in range(12)]
    assert reports[0].loss > 1e-3
    assert reports[-1].loss < 0.7 * reports[0].loss
    assert reports[-1].acceptance_mean > reports[0].acceptance_mean
    assert distiller.steps == reports[-1].step == 12
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert learns == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(completion_hidden(model, *samples()[0]), hidden), "the adapter is off again"


def test_the_first_loss_and_acceptance_are_those_of_the_bare_sparse_actor() -> None:
    model = random_model(layers=4)
    (pair,) = samples(1)
    report = distiller_of(model, coefficient=3.0).step([pair], one_page, 0.9)
    with torch.no_grad():
        dense = model.lm_head(completion_hidden(model, *pair)) / 0.9
        sparse = model.lm_head(completion_hidden(model, *pair, np.ones(89, int))) / 0.9
    expected = (dense.softmax(-1) * (dense.log_softmax(-1) - sparse.log_softmax(-1))).sum(-1).mean()
    assert report.loss == pytest.approx(3 * float(expected), rel=1e-4)
    ((positions, accepted),) = report.acceptance
    assert positions.tolist() == list(range(40, 129))
    np.testing.assert_allclose(accepted, torch.minimum(dense.softmax(-1), sparse.softmax(-1)).sum(-1)[1:].numpy(), atol=1e-5)
    assert (accepted[:23] > 1 - 1e-5).all(), "up to position 63 a budget of one page is dense"
    assert report.tokens == 90


def test_a_step_averages_over_all_tokens_of_its_completions() -> None:
    model = random_model(layers=4)
    pairs = [samples(1)[0], (samples(1)[0][0], samples(1)[0][1][:45])]
    losses = [distiller_of(model).step([pair], one_page, 1.0).loss for pair in pairs]
    both = distiller_of(model).step(pairs, one_page, 1.0)
    assert both.loss == pytest.approx((90 * losses[0] + 45 * losses[1]) / 135, rel=1e-5)


def test_completions_that_are_dense_anyway_teach_nothing() -> None:
    model = random_model(layers=4)
    distiller = distiller_of(model)
    before = distiller.adapter.state_dict()
    report = distiller.step(samples(), lambda positions: np.full(len(positions), 1 << 20, dtype=np.int32), 1.0)
    assert report.skipped == "none of 3 completions is longer than the pages that its budget allows"
    assert report.step == distiller.steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in distiller.adapter.state_dict().items())
    short = (torch.tensor([5]), torch.tensor([7, 8]))
    assert distiller.step([short, *samples(1)], one_page, 1.0).completions == 1


def test_which_completions_are_drawn_changes_from_step_to_step_and_not_from_run_to_run() -> None:
    def drawn(seed: int) -> list[list[int]]:
        distiller = distiller_of(random_model(layers=3), seed=seed)
        reports = [distiller.step(samples(6, 60), one_page, 1.0) for _ in range(4)]
        return [[int(positions[0]) - 40 for positions, _ in report.acceptance] for report in reports]

    assert drawn(0) == drawn(0)
    assert len({tuple(step) for step in drawn(0)}) > 1
    assert drawn(0) != drawn(1)


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    model = random_model(layers=4)
    distiller = distiller_of(model)
    before = distiller.adapter.state_dict()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    report = distiller.step(samples(), one_page, 1.0)
    assert report.skipped == "the gradient's norm is nan"
    assert distiller.steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in distiller.adapter.state_dict().items())


def test_a_run_goes_on_from_its_saved_state_to_the_bit() -> None:
    model = random_model(layers=4)
    whole = distiller_of(model)
    for _ in range(2):
        whole.step(samples(), one_page, 1.0)
    saved = save(whole.state_dict())
    continued = distiller_of(model)
    continued.load_state_dict(load(saved))
    assert continued.steps == 2
    for distiller in (whole, continued):
        for _ in range(2):
            distiller.step(samples(), one_page, 1.0)
    found, expected = continued.state_dict(), whole.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_state_before_the_first_update_can_be_loaded() -> None:
    model = random_model(layers=3)
    distiller = distiller_of(model)
    distiller.load_state_dict(distiller_of(model).state_dict())
    assert distiller.step(samples(1), one_page, 1.0).step == 1


def test_a_state_that_is_not_its_own_is_refused() -> None:
    model = random_model(layers=3)
    distiller = distiller_of(model)
    with pytest.raises(AdapterError, match="rank 4 cannot be loaded"):
        distiller.load_state_dict(distiller_of(model, rank=8).state_dict())
    with pytest.raises(ValueError, match=r"holds 'weights\.x'"):
        distiller.load_state_dict(distiller.state_dict() | {"weights.x": torch.zeros(1)})
    with pytest.raises(ValueError, match="holds no 'steps'"):
        distiller.load_state_dict({})
