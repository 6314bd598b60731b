"""Small random policies for tests: Llama architecture over single characters, made in memory in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from swarm_node.policy.fingerprint import fingerprint_policy, fingerprint_tokenizer
from swarm_node.policy.policy import Policy

CHARACTERS = "0123456789+-*=;. abcdefghijklmnopqrstuvwxyz?\n"
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>"]


def random_model(seed: int = 0, layers: int = 2, vocabulary: int = 64) -> LlamaForCausalLM:
    """47,856 float32 parameters, grouped-query attention, logits spread widely enough that tokens differ in probability."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0, eos_token_id=[2, 3])
    model.eval()
    return model


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One id a character, after four special ones."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", additional_special_tokens=["<end>"]
    )


def family_model(family: str, seed: int = 0, layers: int = 4, **changes: Any) -> PreTrainedModel:
    """A random model of an architecture that the sparse engine knows: heads of 32, two query heads a KV head."""
    settings = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    model.generation_config = GenerationConfig(bos_token_id=1, pad_token_id=0, eos_token_id=[2, 3])
    model.eval()
    return model


def random_policy(
    seed: int = 0, stop_ids: frozenset[int] = frozenset({2, 3}), layers: int = 2, model: PreTrainedModel | None = None
) -> Policy:
    """A policy over `random_model`, or another model of 64 tokens, and `character_tokenizer`."""
    model, tokenizer = random_model(seed, layers) if model is None else model, character_tokenizer()
    fingerprint = fingerprint_tokenizer(tokenizer, stop_ids)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        name="random",
        fingerprint=fingerprint_policy(model.config, fingerprint),
        tokenizer_fingerprint=fingerprint,
        stop_ids=stop_ids,
        vocab_size=64,
        device=torch.device("cpu"),
        dtype=torch.float32,
        lora=False,
    )


def save_model_folder(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face model folder with `random_model` and `character_tokenizer`."""
    random_model(seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder
