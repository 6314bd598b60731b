"""Loading a policy: every choice has its reason, fingerprints say who speaks the same tokens, bad input says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from swarm_node.policy import catalogue, hardware, loading
from swarm_node.policy.errors import ModelError
from swarm_node.policy.fingerprint import fingerprint_tokenizer
from swarm_node.policy.hardware import choose_device, choose_dtype
from swarm_node.policy.loading import load_policy
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.policy import Policy
from tests.support.policies import random_policy, save_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("models") / "one")


def load(folder: Path, **changes: object) -> Policy:
    return load_policy(ModelOptions.model_validate({"name": str(folder), "device": "cpu"} | changes))


def test_a_folder_is_loaded_whole(folder: Path) -> None:
    policy = load(folder)
    assert policy.stop_ids == {2, 3}, "both of the generation config"
    assert policy.vocab_size == 64
    assert (policy.dtype, policy.device.type, policy.lora) == (torch.float32, "cpu", False)
    assert not policy.model.training
    assert len(policy.trainable()) == 21
    reference = random_policy()
    for name, parameter in policy.trainable().items():
        assert torch.equal(parameter, reference.trainable()[name])


def test_every_choice_is_explained(folder: Path) -> None:
    model, device, dtype, training = load(folder, device="auto").choices
    assert model == f"model {folder}: as asked"
    assert device.startswith("device ")
    assert dtype == "dtype float32: every weight is trained, and small updates vanish in bfloat16"
    assert training == "training 47,856 of 47,856 parameters: full fine-tuning, as asked"


def test_adapters_alone_are_trained_on_every_linear_layer_and_start_from_their_seed(folder: Path) -> None:
    policy, again, other = (load(folder, lora=True, lora_rank=4, lora_seed=seed) for seed in (1, 1, 2))
    names = list(policy.trainable())
    assert len(names) == 2 * 7 * 2, "two layers of seven linear maps, two factors each"
    assert all("lora_" in name for name in names)
    assert not any("lm_head" in name for name in names)
    assert all(parameter.dtype == torch.float32 for parameter in policy.trainable().values())
    for name, parameter in policy.trainable().items():
        assert torch.equal(parameter, again.trainable()[name])
    assert any(not torch.equal(parameter, other.trainable()[name]) for name, parameter in policy.trainable().items())
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=ids).logits, load(folder).model(input_ids=ids).logits), "fresh adapters change nothing"


def test_loading_leaves_the_global_random_state_alone(folder: Path) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    load(folder, lora=True)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_weights_go_back_in_by_name_and_strictly(folder: Path) -> None:
    policy = load(folder)
    changed = {name: parameter + 1 for name, parameter in policy.trainable().items()}
    policy.load_weights(changed)
    assert all(torch.equal(parameter, changed[name]) for name, parameter in policy.trainable().items())

    first = next(iter(changed))
    for wrong, message in (
        ({name: tensor for name, tensor in changed.items() if name != first}, f"missing {first}"),
        (changed | {"more": torch.zeros(1)}, "unknown more"),
        (changed | {first: torch.zeros(2, 2)}, r"has shape \(2, 2\), expected \(64, 48\)"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.load_weights({name: tensor * 0 for name, tensor in wrong.items()})
    assert all(torch.equal(parameter, changed[name]) for name, parameter in policy.trainable().items()), "refused weights change nothing"


def test_prompts_are_encoded_plainly_without_a_chat_template(folder: Path) -> None:
    policy = load(folder)
    prompt = policy.encode_prompt("12+3=?")
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [5, 6, 14, 7, 17, 47]


def test_prompts_are_a_user_s_turn_where_there_is_a_chat_template(tmp_path: Path, folder: Path) -> None:
    policy = load(folder)
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}a={% endif %}"
    )
    prompt = policy.encode_prompt("1+1").tolist()
    assert prompt[-3] == 3, "the end of turn is one token"
    assert prompt[:-3] == policy.tokenizer.encode("u=1+1")
    assert prompt[-2:] == policy.tokenizer.encode("a=")


@pytest.mark.parametrize(("tail", "text"), [([], "1+2"), ([2], "1+2"), ([3], "1+2"), ([0, 3], "1+2")])
def test_text_has_neither_stop_token_nor_special_tokens(folder: Path, tail: list[int], text: str) -> None:
    assert load(folder).decode(np.array([5, 14, 6, *tail], dtype=np.int32)) == text


def test_fingerprints_are_the_same_in_another_folder_and_another_process(folder: Path, tmp_path: Path) -> None:
    policy, elsewhere = load(folder), load(save_model_folder(tmp_path / "two", seed=9))
    assert policy.tokenizer_fingerprint == elsewhere.tokenizer_fingerprint
    assert policy.fingerprint == elsewhere.fingerprint, "weights do not count"
    program = (
        "import sys; from transformers import AutoConfig, AutoTokenizer; from swarm_node.policy.fingerprint import *; "
        "tokenizer = fingerprint_tokenizer(AutoTokenizer.from_pretrained(sys.argv[1]), [3, 2]); "
        "print(fingerprint_policy(AutoConfig.from_pretrained(sys.argv[1]), tokenizer), tokenizer)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"},
    ).stdout
    assert output.split() == [policy.fingerprint, policy.tokenizer_fingerprint]
    assert len(policy.fingerprint) == len(policy.tokenizer_fingerprint) == 16


def test_padding_once_does_not_change_the_tokenizer_s_fingerprint(folder: Path) -> None:
    policy = load(folder)
    policy.tokenizer(["1", "12"], padding=True, truncation=True, max_length=8)
    assert fingerprint_tokenizer(policy.tokenizer, policy.stop_ids) == policy.tokenizer_fingerprint


@pytest.mark.parametrize("change", ["stop ids", "chat template", "vocabulary", "added token", "pipeline"])
def test_whatever_changes_the_tokens_changes_the_tokenizer_s_fingerprint(folder: Path, tmp_path: Path, change: str) -> None:
    copy = save_model_folder(tmp_path / "copy")
    if change == "stop ids":
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    elif change == "chat template":
        (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    else:
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        if change == "vocabulary":
            vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        elif change == "added token":
            tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": len(vocabulary), "content": "<new>"})
        else:
            tokenizer["normalizer"] = {"type": "Lowercase"}
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load(copy).tokenizer_fingerprint != load(folder).tokenizer_fingerprint


def test_another_architecture_has_another_fingerprint_but_speaks_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    shallow = random_policy(layers=1)
    assert shallow.tokenizer_fingerprint == random_policy().tokenizer_fingerprint
    assert shallow.fingerprint != random_policy().fingerprint


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"unknown model 'tiny-x'.*tiny-s, tiny-m, tiny-m-words, smollm2-135m.*folder.*hub id"):
        load_policy(ModelOptions(name="tiny-x", device="cpu"))


def test_a_model_that_was_not_pulled_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="swarm-node model pull smollm2-135m"):
        load_policy(ModelOptions(name="smollm2-135m", device="cpu"))


@pytest.mark.parametrize(
    "damage", ["no config", "no weights", "weights cut short", "pickled weights only", "no tokenizer", "no stop token"]
)
def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path, damage: str) -> None:
    copy = save_model_folder(tmp_path / "copy")
    weights = copy / "model.safetensors"
    if damage == "no config":
        (copy / "config.json").unlink()
        message = "holds no config.json"
    elif damage == "no weights":
        weights.unlink()
        message = "the weights of model"
    elif damage == "weights cut short":
        weights.write_bytes(weights.read_bytes()[:1000])
        message = "the weights of model"
    elif damage == "pickled weights only":
        weights.rename(copy / "pytorch_model.bin")
        message = "the weights of model"
    elif damage == "no tokenizer":
        for path in copy.glob("tokenizer*"):
            path.unlink()
        message = "the tokenizer of model"
    else:
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((copy / name).read_text())
            (copy / name).write_text(json.dumps(settings | {"eos_token_id": None}))
        settings = json.loads((copy / "tokenizer_config.json").read_text())
        (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
        message = "names no stop token"
    with pytest.raises(ModelError, match=message):
        load(copy)


def test_a_hub_id_that_cannot_be_had_is_an_error_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_hub_answers", lambda repository: False)
    with pytest.raises(ModelError, match=r"nobody/nothing.*hub.*local folder"):
        load_policy(ModelOptions(name="nobody/nothing", device="cpu"))


def test_auto_chooses_what_fits_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE", str(tmp_path))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    name, why = loading._choose_name("auto", cpu)
    assert name == "tiny-m"
    assert "without an accelerator" in why
    name, why = loading._choose_name("auto", gpu)
    assert name == "tiny-m"
    assert "swarm-node model pull smollm2-135m" in why
    big = tmp_path / "smollm2-135m"
    big.mkdir()
    (big / "pulled.json").write_text('{"origin": "hub", "sha256": {}}')
    monkeypatch.setattr(loading, "free_memory", lambda device: 16 * 2**30)
    assert loading._choose_name("auto", gpu)[0] == "smollm2-135m"
    monkeypatch.setattr(loading, "free_memory", lambda device: 2 * 2**30)
    name, why = loading._choose_name("auto", gpu)
    assert name == "tiny-m"
    assert "needs 2.0 GiB to train and 2.0 GiB are free" in why


@pytest.mark.parametrize(
    ("lora", "device", "free", "expected"),
    [
        (False, "cpu", 100, torch.float32),
        (False, "cpu", 10, torch.bfloat16),
        (True, "cpu", 10, torch.float32),
        (True, "cpu", 5, torch.bfloat16),
        (False, "cuda", 100, torch.float32),
        (False, "cuda", 10, torch.bfloat16),
        (True, "cuda", 100, torch.bfloat16),
    ],
)
def test_the_weight_type_follows_what_is_trained_where_and_memory(
    monkeypatch: pytest.MonkeyPatch, lora: bool, device: str, free: int, expected: torch.dtype
) -> None:
    monkeypatch.setattr(hardware, "free_memory", lambda device: free * 2**30)
    dtype, why = choose_dtype(ModelOptions(lora=lora), torch.device(device), parameters=1_500_000_000)
    assert dtype == expected
    assert str(expected).removeprefix("torch.") in why


def test_a_named_type_is_used_as_asked(folder: Path) -> None:
    policy = load(folder, dtype="bfloat16")
    assert policy.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.bfloat16}


def test_an_accelerator_that_computes_nothing_is_passed_over_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "_trouble_with", lambda device: "no kernel image is available")
    device, why = choose_device("auto")
    assert device.type == "cpu"
    assert "cuda is present but no kernel image is available" in why
    with pytest.raises(ModelError, match="device cuda:3 cannot be used: no kernel image"):
        choose_device("cuda:3")


def test_the_probe_passes_on_the_cpu() -> None:
    assert choose_device("cpu") == (torch.device("cpu"), "device cpu: as asked")


@pytest.mark.parametrize("bad", [{"device": "gpu"}, {"dtype": "int8"}, {"lora_rank": 0}, {"name": ""}, {"rank": 3}])
def test_options_refuse_what_has_no_meaning(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ModelOptions.model_validate(bad)


@pytest.mark.parametrize("name", ["tiny-s", "tiny-m", "tiny-m-words"])
def test_the_shipped_models_load_and_speak_one_language(name: str) -> None:
    policy = load_policy(ModelOptions(name=name, device="cpu"))
    assert policy.tokenizer_fingerprint == load_policy(ModelOptions(name="tiny-s", device="cpu")).tokenizer_fingerprint
    about = catalogue.find(name)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    assert parameters == pytest.approx(about.parameters, rel=0.35)
    prompt = policy.encode_prompt("12+30=?")
    assert "12+30=?" in policy.decode(prompt)
    assert all(0 <= stop < policy.vocab_size for stop in policy.stop_ids)
