"""Models that would load and then be wrong are refused at the start, by name and with the next step; what only looks odd is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from swarm_node.policy.errors import ModelError
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.policy import Policy
from swarm_node.policy.probe import batching_error, batching_tolerance
from tests.support.policies import character_tokenizer, family_model, random_model, save_model_folder

Weights = dict[str, Tensor]

MAMBA = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 8}
NOT_BATCHED: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4, "num_key_value_heads": None, "head_dim": None, "intermediate_size": 128},
    "mamba2": MAMBA | {"num_key_value_heads": None, "intermediate_size": 128},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "jamba": {"num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "bart": {"d_model": 64, "decoder_layers": 2, "is_encoder_decoder": False},
}
"""Architectures whose state between tokens is more than keys and values, and what a small one of them needs besides `family_model`'s."""


def load(folder: Path, **changes: Any) -> Policy:
    return load_policy(ModelOptions.model_validate({"name": str(folder), "device": "cpu"} | changes))


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    weights = change(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file, metadata={"format": "pt"})


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_layer_1(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if "layers.1." not in name}


def one_other_shape(weights: Weights) -> Weights:
    return weights | {"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 40)}


def one_value(value: float) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        weights["model.layers.1.self_attn.k_proj.weight"][3, 4] = value
        return weights

    return change


def under(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            without_layer_1,
            ["9 weights", "missing", "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight", "and 6 more"],
        ),
        (under("module."), ["21 weights", "lm_head.weight", "begin with 'module.'", "DataParallel", "take that off"]),
        (under("_orig_mod."), ["21 weights", "begin with '_orig_mod.'", "torch.compile"]),
        (under("actor."), ["21 weights", "begin with 'actor.': take that off"]),
        (one_other_shape, ["1 weights", "other shapes", "model.layers.0.mlp.up_proj.weight: (96, 40), expected (96, 48)"]),
        (
            lambda weights: weights | {"model.layers.0.mlp.up_proj.bias": torch.zeros(96)},
            ["1 weights of layers", "config.json describes: model.layers.0.mlp.up_proj.bias."],
        ),
        (one_value(torch.nan), ["1 weights", "NaN or infinity as float32: model.layers.1.self_attn.k_proj.weight."]),
        (one_value(-torch.inf), ["1 weights", "NaN or infinity as float32: model.layers.1.self_attn.k_proj.weight."]),
    ],
)
def test_weights_that_are_not_whole_are_named(
    tmp_path: Path, change: Callable[[Weights], Weights], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_model_folder(tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(ModelError) as caught:
        load(folder)
    for word in [*words, str(folder)]:
        assert word in str(caught.value)
    assert "LOAD REPORT" not in capfd.readouterr().err, "the error says it once"


@pytest.mark.parametrize(
    ("family", "sizes", "lost"),
    [
        ("mixtral", {"num_local_experts": 4}, "layers.1.block_sparse_moe.experts.2.w1"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "layers.1.mlp.experts.2.up_proj"),
    ],
)
def test_an_expert_that_is_missing_is_noticed_where_experts_are_put_together(
    tmp_path: Path, family: str, sizes: dict[str, Any], lost: str
) -> None:
    folder = save(family_model(family, layers=2, **sizes), tmp_path / "model")
    rewrite(folder, lambda weights: {name: tensor for name, tensor in weights.items() if lost not in name})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        load(folder)


def test_sound_weights_that_overflow_on_the_way_are_not_called_an_unknown_architecture(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model")
    rewrite(folder, lambda weights: {name: tensor * 0 + 3e38 if "norm" in name else tensor for name, tensor in weights.items()})
    with pytest.raises(ModelError, match="its logits are NaN in float32"):
        load(folder)


def test_a_weight_that_the_asked_type_cannot_hold_says_so(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model")
    rewrite(folder, one_value(1e5))
    with pytest.raises(ModelError, match=r"NaN or infinity as float16: .* or another dtype"):
        load(folder, dtype="float16")
    assert load(folder).dtype == torch.float32


def test_adapters_that_were_not_merged_are_recognised(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model")
    wrapped = get_peft_model(random_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    rewrite(folder, lambda _: dict(wrapped.state_dict()))
    with pytest.raises(ModelError, match=r"begin with 'base_model\.model\.'.*peft.*merge_and_unload"):
        load(folder)


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_s_folder_is_not_a_model(tmp_path: Path, with_config: bool) -> None:
    base = save_model_folder(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(tmp_path / "adapter"))
    if with_config:
        (tmp_path / "adapter" / "config.json").write_bytes((base / "config.json").read_bytes())
        character_tokenizer().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"is an adapter \(adapter_config.json\).*merge_and_unload"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize("case", ["tied head not saved", "rotary buffers of old saves", "more rows than tokens", "in shards"])
def test_what_only_looks_incomplete_loads(tmp_path: Path, case: str) -> None:
    if case == "tied head not saved":
        model: Any = family_model("llama", layers=2, tie_word_embeddings=True)
        folder = save(model, tmp_path / "model")
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    elif case == "more rows than tokens":
        model = random_model(vocabulary=128)
        folder = save(model, tmp_path / "model")
    else:
        model = random_model()
        folder = save(model, tmp_path / "model")
        if case == "in shards":
            (folder / "model.safetensors").unlink()
            model.save_pretrained(folder, max_shard_size="60KB")
            assert (folder / "model.safetensors.index.json").is_file()
        else:
            rewrite(folder, lambda weights: weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(load(folder).model(input_ids=ids).logits, model(input_ids=ids).logits)


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    random_model().save_pretrained(folder, max_shard_size="60KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def forget(characters: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {token: index for token, index in vocabulary.items() if token not in characters}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    return change


def forget_all(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def spoil_index(folder: Path) -> None:
    damage_index(folder)
    (folder / "model.safetensors.index.json").write_text("{")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a shard is gone": (damage_index, "weights"),
    "the index is no JSON": (spoil_index, "weights"),
    "the header lies": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "weights"),
    "empty weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "weights"),
    "the tokenizer is no JSON": (lambda folder: (folder / "tokenizer.json").write_text('{"model": '), "tokenizer"),
    "the tokenizer has no model": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer"),
    "the tokenizer has no vocabulary": (forget_all, "cannot encode a question: WordLevel error"),
    "the tokenizer knows no digits": (forget("0123456789"), "does not know digits: 12\\+30 becomes"),
    "the generation configuration is no JSON": (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config"),
    "a stop token that is a word": (
        lambda folder: edit(folder / "generation_config.json", eos_token_id=["<end>", 3]),
        "names '<end>', 3, 2 and 1 more for a stop token",
    ),
    "the configuration is no JSON": (lambda folder: (folder / "config.json").write_text('{"model_type": "llama",'), "configuration"),
    "the configuration is a list": (lambda folder: (folder / "config.json").write_text("[]"), "configuration"),
    "an unknown architecture": (lambda folder: edit(folder / "config.json", model_type="nonesuch"), "configuration"),
    "a size that is a word": (lambda folder: edit(folder / "config.json", hidden_size="large"), "configuration"),
    "a size below zero": (lambda folder: edit(folder / "config.json", intermediate_size=-1), "can build"),
    "no such activation": (lambda folder: edit(folder / "config.json", hidden_act="nonesuch"), "can build"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_ends_in_one_error(tmp_path: Path, case: str) -> None:
    folder = save_model_folder(tmp_path / "model")
    change, word = DAMAGE[case]
    change(folder)
    with pytest.raises(ModelError, match=word) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"model.gguf is a file: give the folder"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ],
)
def test_a_quantised_folder_is_refused_before_anything_of_it_is_read(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = save_model_folder(tmp_path / "model")
    edit(folder / "config.json", quantization_config=settings)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"is quantised \({settings['quant_method']}\).*float32, bfloat16 or float16"):
        load(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model")
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([f"<more {number}>" for number in range(64 - len(tokenizer) + 1)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"knows 64 tokens, .* up to id 64.*resize"):
        load(folder)


def test_a_stop_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model")
    edit(folder / "generation_config.json", eos_token_id=[2, 99])
    with pytest.raises(ModelError, match=r"knows 64 tokens, .* up to id 99"):
        load(folder)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "cannot render a user's turn: Roles must alternate"),
        ("{% if messages[0]['role'] == 'system' %}x{% endif %}", "makes nothing of a prompt"),
        ("{% for m in messages if m['role'] == 'human' %}{{ m.content }}{% endfor %}1+1=", "leaves the user's turn out"),
    ],
)
def test_a_chat_template_that_cannot_ask_is_refused_at_the_start(tmp_path: Path, template: str, words: str) -> None:
    folder = save_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"chat template of model {folder} {words}"):
        load(folder)


@pytest.mark.parametrize("family", NOT_BATCHED)
def test_a_state_that_cannot_be_batched_is_refused(tmp_path: Path, family: str) -> None:
    changes = {key: value for key, value in NOT_BATCHED[family].items() if value is not None}
    common = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common, **tokens, **changes))
    with pytest.raises(ModelError, match=rf"\({family}\) cannot be sampled in batches.*Choose a Llama"):
        load(save(model, tmp_path / "model"))


def test_a_model_that_sees_what_follows_is_noticed() -> None:
    """Decoded token by token it is another model than the one that is trained."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("git", **settings, eos_token_id=2)).eval()
    assert batching_error(model) > 10 * batching_tolerance(torch.float32)


def test_an_encoder_decoder_and_a_vision_model_are_refused(tmp_path: Path) -> None:
    small: dict[str, Any] = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    with pytest.raises(ModelError, match=r"\(t5\) is an encoder-decoder"):
        load(save(T5ForConditionalGeneration(T5Config(**small)), tmp_path / "t5"))
    folder = save_model_folder(tmp_path / "vision")
    config = AutoConfig.for_model("gemma3", text_config={"num_hidden_layers": 1, "hidden_size": 32}, vision_config={"num_hidden_layers": 1})
    config.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"\(gemma3\) is a model of more than text \(vision_config\)"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"sliding_window": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3", {}),
        ("cohere", {}),
    ],
)
def test_attention_over_keys_and_values_passes_in_every_type(family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    error = batching_error(nn.Module.to(family_model(family, **changes), dtype))
    assert error < batching_tolerance(dtype) / 4, "far from the limit"


def test_the_probe_notices_padding_that_is_seen() -> None:
    model = family_model("llama")
    layers = model.model.layers
    attention = layers[2].self_attn
    unmasked = attention.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        return unmasked(*arguments, **named | {"attention_mask": None})

    attention.forward = forward
    assert batching_error(model) > 10 * batching_tolerance(torch.float32)
    assert batching_error(model.bfloat16()) > batching_tolerance(torch.bfloat16)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "original_max_position_embeddings": 96}


@pytest.mark.parametrize(
    ("rope", "positions", "context"),
    [
        (LONGROPE, 384, 96),
        ({"rope_type": "dynamic", "factor": 2.0}, 128, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}, 384, 384),
    ],
)
def test_the_context_ends_where_one_sequence_would_turn_the_angles_of_the_others(
    tmp_path: Path, rope: dict[str, Any], positions: int, context: int
) -> None:
    parameters = {"rope_theta": 10_000.0} | rope
    model = family_model("llama", layers=2, max_position_embeddings=positions, rope_parameters=parameters)
    policy = load(save(model, tmp_path / "model"))
    assert policy.context == context
    assert any("context 96 of 384 tokens" in choice for choice in policy.choices) == (context < positions)

    def logits(length: int) -> Tensor:
        """Of the first ten tokens, the same whatever the length of their batch."""
        ids = torch.arange(2 * length).view(2, length) % 61
        with torch.no_grad():
            logits: Tensor = policy.model(input_ids=ids, use_cache=False).logits[0, :10]
        return logits

    assert torch.allclose(logits(10), logits(context), atol=1e-4)
    if rope["rope_type"] == "longrope":
        assert not torch.allclose(logits(10), logits(context + 1), atol=1e-3), "otherwise the limit would be needless"


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "nonesuch://127.0.0.1:1", "http://127.0.0.1:port"])
def test_a_proxy_that_the_hub_s_client_cannot_use_is_one_sentence(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    class InvalidAddress(Exception):
        """As the client's own, of which nothing else is known."""

    def refuse(*arguments: Any, **named: Any) -> None:
        if proxy.startswith("socks"):
            raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed. Make sure to install httpx.")
        if proxy.startswith("http:"):
            raise InvalidAddress("Invalid port: 'port'")
        raise ValueError(f"Unknown scheme for proxy URL URL('{proxy}')")

    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setattr(HfApi, "model_info", refuse)
    with pytest.raises(
        ModelError, match=r"the hub cannot be asked: .*pip install 'httpx\[socks\]'\), or correct or unset ALL_PROXY"
    ) as caught:
        load_policy(ModelOptions(name="owner/model", device="cpu"))
    assert "\n" not in str(caught.value)
    assert load_policy(ModelOptions(name="tiny-s", device="cpu")).name == "tiny-s", "what lies here needs no proxy"
