"""Dense log-probs: by pieces of the vocabulary as from whole logits, padded as unpadded, in value and in gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from swarm_kernels.logprob import CHUNK
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from swarm_node.policy.loading import _add_adapters
from swarm_node.policy.logprobs import completion_logprobs
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.parts import head, head_width, splits
from tests.support.policies import random_model

LENGTHS = [(5, 7), (9, 1), (1, 20), (30, 3)]
TEMPERATURES = [1.0, 0.7, 2.0, 1.3]


def sequences(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 64, (p,), generator=generator), torch.randint(0, 64, (t,), generator=generator)) for p, t in LENGTHS]


def naive(model: nn.Module, prompt: Tensor, completion: Tensor, temperature: float) -> Tensor:
    """One sequence alone, whole logits, full log-softmax."""
    logits: Tensor = model(input_ids=torch.cat([prompt, completion])[None]).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_padded_batch_equals_each_sequence_alone() -> None:
    model = random_model()
    result = completion_logprobs(model, sequences(), temperature=TEMPERATURES)
    assert [len(part) for part in result] == [t for _, t in LENGTHS]
    for (prompt, completion), temperature, logprobs in zip(sequences(), TEMPERATURES, result, strict=True):
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs, naive(model, prompt, completion, temperature), rtol=0, atol=5e-6)


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_equal_those_of_the_naive_loss(lora: bool) -> None:
    model: nn.Module = random_model()
    if lora:
        model = _add_adapters(model, ModelOptions(lora=True, lora_rank=4))
        with torch.no_grad():  # the second factor starts at zero, which would hide errors in the first one's gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    weights = [torch.randn(t, generator=torch.Generator().manual_seed(t)) for _, t in LENGTHS]
    together = completion_logprobs(model, sequences(), temperature=TEMPERATURES)
    found = gradients(model, sum(((w * part).sum() for w, part in zip(weights, together, strict=True)), torch.zeros(())))
    alone = [naive(model, p, c, temperature) for (p, c), temperature in zip(sequences(), TEMPERATURES, strict=True)]
    expected = gradients(model, sum(((w * part).sum() for w, part in zip(weights, alone, strict=True)), torch.zeros(())))
    assert found.keys() == expected.keys()
    assert len(found) == (28 if lora else 21)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-7)


class Widths(TorchDispatchMode):
    """The widest matrix of one row a completion token that any operation makes, forward or backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[0] == sum(t for _, t in LENGTHS):
            self.widest = max(self.widest, out.shape[1])
        return out


def test_the_logits_of_the_whole_vocabulary_never_exist_at_once() -> None:
    model = random_model(vocabulary=2 * CHUNK + 100)
    with Widths() as widths:
        found = completion_logprobs(model, sequences())
        torch.cat(found).sum().backward()
    assert widths.widest == CHUNK
    for (prompt, completion), logprobs in zip(sequences(), found, strict=True):
        torch.testing.assert_close(logprobs, naive(model, prompt, completion, 1.0), rtol=0, atol=1e-5)
    with Widths() as widths:
        head(model)(torch.zeros(31, model.config.hidden_size))
    assert widths.widest == 2 * CHUNK + 100


def test_other_sequences_in_the_batch_change_nothing() -> None:
    model = random_model()
    with torch.no_grad():
        together = completion_logprobs(model, sequences(), temperature=1.0)
        alone = completion_logprobs(model, sequences()[:1], temperature=1.0)
    torch.testing.assert_close(together[0], alone[0], rtol=0, atol=5e-6)
    assert not together[0].requires_grad


def test_a_temperature_divides_the_logits_before_the_softmax() -> None:
    model = random_model()
    prompt, completion = sequences()[0]
    with torch.no_grad():
        [cold] = completion_logprobs(model, [(prompt, completion)], temperature=0.5)
        [warm] = completion_logprobs(model, [(prompt, completion)], temperature=1.0)
    assert not torch.allclose(cold, warm)
    torch.testing.assert_close(cold, naive(model, prompt, completion, 0.5), rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("prompt", "completion", "temperature", "message"),
    [([], [1], 1.0, "0 prompt"), ([1], [], 1.0, "0 completion"), ([1], [1], [1.0, 1.0], "2 temperatures for 1 sequences")],
)
def test_what_has_no_log_probs_is_refused(prompt: list[int], completion: list[int], temperature: float, message: str) -> None:
    pair = (torch.tensor(prompt, dtype=torch.long), torch.tensor(completion, dtype=torch.long))
    with pytest.raises(ValueError, match=message):
        completion_logprobs(random_model(), [pair], temperature=temperature)


def test_no_sequences_have_no_log_probs() -> None:
    assert completion_logprobs(random_model(), [], temperature=1.0) == []


@pytest.mark.parametrize("family", ["gemma2: capped logits", "granite: scaled logits"])
def test_families_that_change_their_logits_after_the_head_are_followed(family: str) -> None:
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
    torch.manual_seed(0)
    if family.startswith("gemma2"):
        model: nn.Module = Gemma2ForCausalLM(Gemma2Config(head_dim=16, final_logit_softcapping=3.0, **small)).eval()
    else:
        model = GraniteForCausalLM(GraniteConfig(logits_scaling=4.0, **small)).eval()
    assert splits(model)
    with torch.no_grad():
        for (prompt, completion), logprobs in zip(sequences(), completion_logprobs(model, sequences(), temperature=1.0), strict=True):
            torch.testing.assert_close(logprobs, naive(model, prompt, completion, 1.0), rtol=0, atol=1e-5)


def test_a_model_that_does_something_unknown_after_its_head_is_noticed() -> None:
    model = random_model()
    assert splits(model)
    assert head_width(model) == 64
    forward = model.forward

    def doubled(**arguments: object) -> object:
        output = forward(**arguments)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    assert not splits(model)
