"""Known model shapes, to time kernels and engines at a size whose weights are not here: speed does not ask what the weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm_node.policy.fingerprint import fingerprint_policy, fingerprint_tokenizer
from swarm_node.policy.memory import move_to_huge_pages
from swarm_node.policy.policy import Policy


class BenchError(ValueError):
    """The benchmark cannot be done as asked; nothing was measured."""


def check_tokens(name: str, sampled: int, wanted: int) -> None:
    """Raise BenchError unless an engine sampled as many tokens as all others do."""
    if sampled != wanted:
        raise BenchError(f"{name} sampled {sampled} tokens instead of {wanted}: its time compares with nothing")


@dataclass(frozen=True)
class Shape:
    """A Llama architecture by its sizes."""

    about: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = True
    """Whether the LM head is the embedding."""
    context: int = 32768


SHAPES: Mapping[str, Shape] = {
    "0.5m": Shape("tiny-s", 3, 128, 320, 4, 2, 32, 100, context=2048),
    "135m": Shape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, context=8192),
    "1.7b": Shape("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151936),
    "8b": Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, tied=False),
}


def find_shape(name: str) -> Shape:
    """Raises BenchError: there is none of this name."""
    if name not in SHAPES:
        known = ", ".join(f"{key} ({shape.about})" for key, shape in SHAPES.items())
        raise BenchError(f"unknown shape '{name}'. Known shapes: {known}")
    return SHAPES[name]


def random_policy(name: str, dtype: torch.dtype, device: torch.device) -> Policy:
    """A policy of a known shape with random weights from a fixed seed, and a tokenizer that knows no text.

    Raises:
        BenchError: there is no shape of this name, or it does not fit into the device's memory.
    """
    shape = find_shape(name)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype=dtype,
    )
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).eval()
    except torch.OutOfMemoryError as error:
        raise BenchError(f"shape {name} does not fit into the memory of {device}: choose a smaller one") from error
    finally:
        torch.set_default_dtype(default)
    move_to_huge_pages(model)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>")), eos_token="<end>")
    fingerprint = fingerprint_tokenizer(tokenizer, frozenset({0}))
    return Policy(
        model=model,
        tokenizer=tokenizer,
        name=f"random {name}",
        fingerprint=fingerprint_policy(config, fingerprint),
        tokenizer_fingerprint=fingerprint,
        stop_ids=frozenset({0}),
        vocab_size=shape.vocabulary,
        device=device,
        dtype=dtype,
        lora=False,
        choices=(f"model: random weights in the shape of {shape.about}",),
    )
