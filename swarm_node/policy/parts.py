"""A causal language model seen as a body and a head, whatever wraps it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from swarm_kernels.logprob import Head
from torch import nn


def unwrap(model: nn.Module) -> Any:
    """The transformers model inside a peft wrapper (its adapters are in place and stay active), or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def body(model: nn.Module) -> nn.Module:
    """The transformer without the LM head; its output has `last_hidden_state`, shape (batch, length, hidden)."""
    inner: nn.Module = unwrap(model).base_model
    return inner


def head(model: nn.Module) -> Head:
    """The LM head over its weights as they lie now: Granite divides logits by `logits_scaling`, Cohere multiplies them by `logit_scale`,
    Gemma 2 caps them."""
    inner = unwrap(model)
    projection, config = inner.get_output_embeddings(), inner.config
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Head(projection.weight, projection.bias, factor, getattr(config, "final_logit_softcapping", None))


def head_width(model: nn.Module) -> int:
    """Number of logits a position."""
    return int(unwrap(model).get_output_embeddings().weight.shape[0])


def splits(model: nn.Module) -> bool:
    """Whether head(body(x)) are the model's own logits: tried on a short input, as architectures differ in what they do after the head.
    Raises FloatingPointError where they are not numbers."""
    inner = unwrap(model)
    ids = torch.arange(4, device=next(inner.parameters()).device)[None] % int(inner.config.get_text_config().vocab_size)
    with evaluating(inner), torch.inference_mode():
        whole = inner(input_ids=ids, use_cache=False).logits
        parts = head(model)(body(model)(input_ids=ids, use_cache=False).last_hidden_state)
    if whole.isnan().any():
        raise FloatingPointError(f"its logits are NaN in {str(whole.dtype).removeprefix('torch.')}")
    return whole.shape == parts.shape and bool(torch.allclose(whole.float(), parts.float(), rtol=1e-2, atol=1e-2))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; in the mode in which it was when the context ends."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def rotary_limit(config: Any) -> int | None:
    """Positions up to which rotary angles depend on the position alone: LongRoPE and dynamic NTK turn a whole batch otherwise once one of
    its sequences is longer. None: everywhere."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # one for all layers, or one a type of layer
    return min(
        (
            int(kind.get("original_max_position_embeddings") or config.get_text_config().max_position_embeddings)
            for kind in kinds
            if kind.get("rope_type") in ("dynamic", "longrope")
        ),
        default=None,
    )


def cache_argument(model: nn.Module) -> str:
    """The name under which this model's forward takes its KV cache: `cache`, or `past_key_values` before transformers 5.2x."""
    return "cache" if "cache" in inspect.signature(unwrap(model).forward).parameters else "past_key_values"
