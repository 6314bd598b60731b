"""Load a policy: any model that AutoModelForCausalLM loads, full or with adapters, with the reason for every automatic choice."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from swarm_protocols.limits import DEFAULT_LIMITS
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from swarm_node.policy import catalogue
from swarm_node.policy.errors import ModelError
from swarm_node.policy.fingerprint import fingerprint_policy, fingerprint_tokenizer
from swarm_node.policy.hardware import choose_device, choose_dtype, free_memory, training_bytes
from swarm_node.policy.memory import move_to_huge_pages
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.parts import head_width, splits
from swarm_node.policy.policy import Policy

_BIG = "smollm2-135m"
_SMALL = "tiny-m"


@dataclass(frozen=True)
class _Source:
    """What `from_pretrained` is given, and what errors call it."""

    name: str
    location: str
    on_hub: bool = False
    offline: bool = True
    """Whether only files on this machine may be used."""


def load_policy(options: ModelOptions) -> Policy:
    """Load the model that the options name, ready to sample (evaluation mode) and to train.

    Raises:
        ModelError: the name is unknown, the model is not here, cannot be read, cannot be split into body and head, or has no stop token.
    """
    device, why_device = choose_device(options.device)
    name, why_name = _choose_name(options.name, device)
    source = _locate(name)
    config = _read(source, AutoConfig, "configuration")
    parameters = _count_parameters(config, source)
    dtype, why_dtype = choose_dtype(options, device, parameters)

    tokenizer: PreTrainedTokenizerBase = _read(source, AutoTokenizer, "tokenizer")
    transformers_logging.disable_progress_bar()
    model: nn.Module = _read(source, AutoModelForCausalLM, "weights", dtype=dtype, use_safetensors=True).to(device)
    if not splits(model):
        raise ModelError(
            f"model {source.name} ({config.model_type}) changes its logits after the LM head in a way that is not known here. "
            "Choose a Llama, Qwen, Gemma, Mistral or similar model."
        )
    stop_ids = _stop_ids(model, tokenizer, source)
    if options.lora:
        model = _add_adapters(model, options)
    model.eval()
    move_to_huge_pages(model)

    tokenizer_fingerprint = fingerprint_tokenizer(tokenizer, stop_ids)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        name=_shown_name(source),
        source=source.name,
        fingerprint=fingerprint_policy(config, tokenizer_fingerprint),
        tokenizer_fingerprint=tokenizer_fingerprint,
        stop_ids=stop_ids,
        vocab_size=head_width(model),
        device=device,
        dtype=dtype,
        lora=options.lora,
        choices=(why_name, why_device, why_dtype, _describe_training(model, options)),
    )


def _choose_name(wanted: str, device: torch.device) -> tuple[str, str]:
    if wanted != "auto":
        return wanted, f"model {wanted}: as asked"
    if device.type == "cpu":
        return _SMALL, f"model {_SMALL}: without an accelerator a step of it takes seconds, and a step of {_BIG} minutes"
    if not catalogue.find(_BIG).present:
        return _SMALL, f"model {_SMALL}: this machine could train {_BIG}, which is not here; `swarm-node model pull {_BIG}` fetches it"
    need, free = training_bytes(catalogue.find(_BIG).parameters), free_memory(device)
    if need > free * 0.8:
        return _SMALL, f"model {_SMALL}: {_BIG} needs {need / 2**30:.1f} GiB to train and {free / 2**30:.1f} GiB are free"
    return _BIG, f"model {_BIG}: it is here, and it fits {device} ({need / 2**30:.1f} of {free / 2**30:.1f} GiB)"


def _locate(name: str) -> _Source:
    if name in catalogue.names():
        entry = catalogue.find(name)
        if not entry.present and not entry.pullable:
            raise ModelError(
                f"model {name} ships with swarm-node, but {entry.folder} is missing: the installation is damaged, install it again."
            )
        if not entry.present:
            raise ModelError(f"model {name} is not on this machine yet ({entry.folder}). Fetch it with `swarm-node model pull {name}`.")
        return _Source(name, str(entry.folder))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"folder {folder} holds no config.json: it is not a Hugging Face model folder (config, tokenizer, safetensors)."
            )
        return _Source(str(folder.absolute()), str(folder.absolute()))
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        return _Source(name, name, on_hub=True, offline=not _hub_answers(name))
    raise catalogue.unknown(name)


def _shown_name(source: _Source) -> str:
    """As it stands in every group: of a folder its own name, for the path is nobody else's business."""
    name = os.path.basename(os.path.abspath(source.name)) if os.path.isabs(source.name) else source.name
    printable = "".join(character if character.isprintable() else "?" for character in name) or "model"
    return printable.encode()[: DEFAULT_LIMITS.text_bytes].decode(errors="ignore")


def _hub_answers(repository: str) -> bool:
    """Asked once with a short limit: transformers would ask for every file, with retries, and a copy of an earlier run may be here."""
    try:
        HfApi().model_info(repository, timeout=5)
    except (HTTPError, OSError):
        return False
    return True


def _read(source: _Source, loader: Any, what: str, **arguments: Any) -> Any:
    """`from_pretrained` without remote code, its many ways to fail turned into one error that says what to do."""
    try:
        return loader.from_pretrained(source.location, local_files_only=source.offline, trust_remote_code=False, **arguments)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        advice = (
            "Check the id and the connection to the hub, or give a local folder."
            if source.on_hub
            else "The folder needs config.json, tokenizer files and *.safetensors."
        )
        raise ModelError(f"the {what} of model {source.name} cannot be loaded: {first} {advice}") from error


def _count_parameters(config: PretrainedConfig, source: _Source) -> int:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ModelError(f"model {source.name} ({config.model_type}) is not a causal language model that transformers knows.") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase, source: _Source) -> frozenset[int]:
    """Every id that ends a text: of the generation config, and the tokenizer's own end (a chat model's end of turn)."""
    found: set[int] = set()
    for ids in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise ModelError(f"model {source.name} names no stop token: set eos_token_id in its generation_config.json.")
    return frozenset(found)


def _add_adapters(model: Any, options: ModelOptions) -> nn.Module:
    """Wrap with LoRA on all linear layers but the LM head; the same seed gives the same adapters."""
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        target_modules="all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft still asks transformers under an old name; users can do nothing about it
        torch.manual_seed(options.lora_seed)
        return get_peft_model(model, config)


def _describe_training(model: nn.Module, options: ModelOptions) -> str:
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    how = f"LoRA of rank {options.lora_rank} on all linear layers" if options.lora else "full fine-tuning"
    return f"training {trained:,} of {total:,} parameters: {how}, as asked"
