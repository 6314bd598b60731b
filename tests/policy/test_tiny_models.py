"""The tiny models that ship in the package: they load like any other model, share one tokenizer, and can do some of their task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import swarm_node.policy
from swarm_node.tasks.registry import load_task

HOME = Path(swarm_node.policy.__file__).parent / "tiny"
NAMES = ("tiny-s", "tiny-m", "tiny-m-words")
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))


@pytest.mark.parametrize(("name", "parameters"), [("tiny-s", 529_792), ("tiny-m", 1_944_320), ("tiny-m-words", 1_944_320)])
def test_a_model_loads_without_a_hub_with_grouped_query_attention_and_a_stop_id(name: str, parameters: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(HOME / name, local_files_only=True)
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert model.dtype == torch.bfloat16
    config = model.config
    assert config.model_type == "llama"
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.head_dim >= 32
    assert config.max_position_embeddings >= 1024
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(HOME / name, local_files_only=True)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert config.vocab_size == len(tokenizer) <= 128
    assert tokenizer.chat_template is None


def test_the_models_share_one_tokenizer_to_the_byte() -> None:
    files = [(HOME / name / "tokenizer.json").read_bytes() for name in NAMES]
    assert files[0] == files[1] == files[2]
    settings = [(HOME / name / "tokenizer_config.json").read_bytes() for name in NAMES]
    assert settings[0] == settings[1] == settings[2]


def test_the_tokenizer_gives_one_id_a_character_and_loses_none() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HOME / "tiny-s")
    for text in (PRINTABLE, "7+15+9=", "  two  spaces , and a point . ", "\n\n", "don't 'do' that", ""):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len({*tokenizer(PRINTABLE).input_ids}) == len(PRINTABLE)
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_together_they_take_less_than_ten_megabytes() -> None:
    assert sum(file.stat().st_size for file in HOME.rglob("*") if file.is_file()) < 10e6


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_sampling_solves_a_quarter_to_half_of_the_default_task(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(HOME / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(HOME / name)
    tokenizer.padding_side = "left"
    task = load_task("chain-sum")
    asked = [task.problem(0, index, "eval") for index in range(256)]
    inputs = tokenizer([problem.prompt for problem in asked], return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, top_k=0, max_new_tokens=192
        )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    solved = sum(task.reward(problem, text).correct for problem, text in zip(asked, texts, strict=True)) / len(asked)
    # The bounds of the claim, widened by two standard errors of 256 samples.
    assert 0.25 - 0.055 < solved < 0.50 + 0.065
    assert 1.5 * min(map(len, texts)) < max(map(len, texts))
