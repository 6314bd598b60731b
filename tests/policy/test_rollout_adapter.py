"""The rollout adapter: on inside its context and nowhere else, and no part of the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swarm_node.policy.loading import _add_adapters
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.rollout_adapter import AdapterError, RolloutAdapter
from tests.support.policies import random_model

IDS = torch.arange(1, 13)[None]


def policy_model(lora: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    model: nn.Module = random_model()
    if lora:
        model = _add_adapters(model, ModelOptions(lora=True, lora_rank=4))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    return model.to(dtype)


def randomise(adapter: RolloutAdapter, std: float = 0.1) -> RolloutAdapter:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.normal_(std=std, generator=generator)
    return adapter


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("lora", [False, True])
def test_it_covers_every_linear_layer_of_the_blocks_and_no_other(lora: bool) -> None:
    parameters = RolloutAdapter(policy_model(lora), rank=4).parameters()
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    expected = [f"layers.{layer}.{name}.{factor}" for layer in range(2) for name in attention + mlp for factor in "AB"]
    assert list(parameters) == expected, "the same names whether peft wraps the policy or not"
    assert parameters["layers.1.mlp.down_proj.A"].shape == (96, 4)
    assert parameters["layers.1.mlp.down_proj.B"].shape == (4, 48)
    assert all(parameter.dtype == torch.float32 for parameter in parameters.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_a_new_one_changes_nothing(lora: bool, dtype: torch.dtype) -> None:
    model = policy_model(lora, dtype)
    adapter = RolloutAdapter(model)
    before = logits(model)
    with adapter.active():
        assert torch.equal(logits(model), before)
        with torch.enable_grad():
            assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("lora", [False, True])
def test_active_equals_a_policy_whose_weights_were_changed(lora: bool) -> None:
    model, changed = policy_model(lora), policy_model(lora)
    adapter = randomise(RolloutAdapter(model, rank=4, alpha=8))
    factors = adapter.parameters()
    with torch.no_grad():
        for name, module in changed.named_modules():
            path = name[name.find("layers.") :].removesuffix(".base_layer")
            if f"{path}.A" in factors and isinstance(module, nn.Linear):
                module.weight += 2 * (factors[f"{path}.A"] @ factors[f"{path}.B"]).T
    without = logits(model)
    with adapter.active():
        found = logits(model)
        with torch.enable_grad():
            with_gradient = model(input_ids=IDS).logits
    torch.testing.assert_close(found, logits(changed), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(with_gradient, found, rtol=1e-4, atol=1e-4)
    assert float((found - without).abs().max()) > 0.1
    assert torch.equal(logits(model), without), "off again"


@pytest.mark.parametrize("lora", [False, True])
def test_the_policy_does_not_show_that_there_is_one(lora: bool) -> None:
    model = policy_model(lora)
    tree = [name for name, _ in model.named_modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = randomise(RolloutAdapter(model))
    with adapter.active():
        logits(model)
        assert [name for name, _ in model.named_modules()] == tree
        assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_stay_on_their_own_side(lora: bool) -> None:
    model = policy_model(lora)
    adapter = randomise(RolloutAdapter(model, rank=4))
    model(input_ids=IDS).logits.square().sum().backward()
    assert all(parameter.grad is None for parameter in adapter.parameters().values()), "off: no part of the policy's update"
    model.requires_grad_(False)
    model.zero_grad()
    with adapter.active():
        model(input_ids=IDS).logits.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in adapter.parameters().values())


def test_it_follows_its_parameters_from_one_entry_to_the_next() -> None:
    model = policy_model(lora=False)
    adapter = randomise(RolloutAdapter(model))
    with adapter.active():
        first = logits(model)
    with torch.no_grad():
        for parameter in adapter.parameters().values():
            parameter.zero_()
    with adapter.active():
        assert torch.equal(logits(model), logits(model))
        assert float((logits(model) - first).abs().max()) > 0.01
        off = logits(model)
    assert torch.equal(off, logits(model))


def test_it_is_off_after_an_error_and_cannot_be_entered_twice() -> None:
    model = policy_model(lora=False)
    adapter = randomise(RolloutAdapter(model))
    before = logits(model)
    with pytest.raises(RuntimeError, match="active already"), adapter.active(), adapter.active():
        pass
    assert torch.equal(logits(model), before)
    with adapter.active():  # it can be entered again
        assert not torch.equal(logits(model), before)


def test_the_seed_decides_where_it_starts() -> None:
    model = policy_model(lora=False)
    first, again, other = (RolloutAdapter(model, seed=seed).parameters() for seed in (1, 1, 2))
    name = "layers.0.self_attn.q_proj.A"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert 0.9 / 48**0.5 < float(first[name].detach().abs().max()) <= 1 / 48**0.5
    assert not any(bool(parameter.any()) for name, parameter in first.items() if name.endswith(".B"))


def test_its_state_survives_a_file(tmp_path: Path) -> None:
    adapter = randomise(RolloutAdapter(policy_model(lora=False), rank=4))
    save_file(adapter.state_dict(), tmp_path / "adapter.safetensors")
    other = RolloutAdapter(policy_model(lora=True), rank=4)  # an adapter does not mind how the policy is trained
    other.load_state_dict(load_file(tmp_path / "adapter.safetensors"))
    assert all(torch.equal(parameter, other.parameters()[name]) for name, parameter in adapter.parameters().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("layers.0.mlp.up_proj.B"), "missing layers.0.mlp.up_proj.B"),
        (lambda state: state.update({"layers.9.mlp.up_proj.B": torch.zeros(4, 96)}), "unknown layers.9.mlp.up_proj.B"),
        (lambda state: state.update({"layers.0.mlp.up_proj.B": torch.zeros(8, 96)}), r"has shape \(8, 96\), expected \(4, 96\)"),
        (lambda state: state["layers.0.mlp.up_proj.B"].fill_(float("nan")), "layers.0.mlp.up_proj.B holds values that are not finite"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, message: str) -> None:  # type: ignore[no-untyped-def]
    adapter = randomise(RolloutAdapter(policy_model(lora=False), rank=4))
    before = adapter.state_dict()
    broken = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    change(broken)
    with pytest.raises(AdapterError, match=message):
        adapter.load_state_dict(broken)
    assert all(torch.equal(parameter, before[name]) for name, parameter in adapter.parameters().items())


def test_what_has_no_blocks_is_refused() -> None:
    model = random_model()
    del model.model.layers
    with pytest.raises(AdapterError, match="switch distillation off"):
        RolloutAdapter(model)
    with pytest.raises(AdapterError, match="rank is 0"):
        RolloutAdapter(random_model(), rank=0)
