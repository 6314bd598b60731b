"""Load a policy: any model that AutoModelForCausalLM loads, full or with adapters, with the reason for every automatic choice."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError
from peft import LoraConfig, get_peft_model
from swarm_protocols.limits import DEFAULT_LIMITS
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from transformers.utils.peft_utils import find_adapter_config_file

from swarm_node.policy import catalogue
from swarm_node.policy.errors import ModelError
from swarm_node.policy.fetching import first_line, proxy_advice
from swarm_node.policy.fingerprint import fingerprint_policy, fingerprint_tokenizer
from swarm_node.policy.hardware import choose_device, choose_dtype, free_memory, training_bytes
from swarm_node.policy.memory import move_to_huge_pages
from swarm_node.policy.options import ModelOptions
from swarm_node.policy.parts import head_width, rotary_limit, splits
from swarm_node.policy.policy import Policy
from swarm_node.policy.probe import batching_error, batching_tolerance

_BIG = "smollm2-135m"
_SMALL = "tiny-m"
_ADVICE = "Choose a Llama, Qwen, Gemma, Mistral or similar model."
_WRAPPERS = {
    "module.": "torch's DataParallel",
    "_orig_mod.": "torch.compile",
    "base_model.model.": "peft, with its adapters (merge_and_unload merges them)",
}
"""Who puts this before the names of weights."""


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
        ModelError: the name is unknown, or the model is not here, cannot be read, is quantised, lacks weights, holds some that are not
            finite, does not fit its tokenizer, cannot be split into body and head or sampled in batches, or has no stop token or no prompt.
    """
    device, why_device = choose_device(options.device)
    name, why_name = _choose_name(options.name, device)
    source = _locate(name)
    config = _read(source, AutoConfig, "configuration")
    _check_kind(config, source)
    parameters = _count_parameters(config, source)
    dtype, why_dtype = choose_dtype(options, device, parameters)

    tokenizer: PreTrainedTokenizerBase = _read(source, AutoTokenizer, "tokenizer")
    model = _read_weights(source, dtype).to(device).eval()
    _check_finite(model, source)
    _check_computation(model, source)
    stop_ids = _stop_ids(model, tokenizer, source)
    _check_vocabulary(model, tokenizer, stop_ids, source)
    if options.lora:
        model = _add_adapters(model, options)
    model.eval()
    move_to_huge_pages(model)

    tokenizer_fingerprint = fingerprint_tokenizer(tokenizer, stop_ids)
    policy = Policy(
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
        choices=(why_name, why_device, why_dtype, _describe_training(model, options), *_describe_context(config)),
    )
    _check_prompts(policy)
    return policy


def check_model(options: ModelOptions) -> None:
    """Whether the model is here or can be had, as far as that shows without its weights.

    Raises:
        ModelError: as `load_policy`.
    """
    name, _ = _choose_name(options.name, choose_device(options.device)[0])
    _read(_locate(name), AutoConfig, "configuration")


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
    if folder.is_file():
        raise ModelError(f"{folder} is a file: give the folder that holds config.json, the tokenizer's files and *.safetensors.")
    if folder.is_dir():
        _refuse_adapter(name, str(folder), offline=True)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"folder {folder} holds no config.json: it is not a Hugging Face model folder (config, tokenizer, safetensors)."
            )
        return _Source(str(folder.absolute()), str(folder.absolute()))
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        offline = not _hub_answers(name)
        _refuse_adapter(name, name, offline)
        return _Source(name, name, on_hub=True, offline=offline)
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
    except HFValidationError as error:
        raise catalogue.unknown(repository) from error
    except Exception as error:  # what the client raises about proxies that it cannot use
        raise ModelError(f"model {repository}: the hub cannot be asked: {proxy_advice(error)}, or give a local folder.") from error
    return True


def _refuse_adapter(name: str, location: str, offline: bool) -> None:
    # transformers would load the base model and hide the adapter in it.
    if find_adapter_config_file(location, local_files_only=offline) is not None:
        raise ModelError(
            f"model {name} is an adapter (adapter_config.json), not a whole model: merge it into its base model with peft's "
            "merge_and_unload, save that with its tokenizer, and give its folder."
        )


def _read(source: _Source, loader: Any, what: str, **arguments: Any) -> Any:
    """`from_pretrained` without remote code, its many ways to fail turned into one error that says what to do."""
    try:
        return loader.from_pretrained(source.location, local_files_only=source.offline, trust_remote_code=False, **arguments)
    except Exception as error:  # whatever parses files of others: OSError, SafetensorError, TypeError, the tokenizers' bare Exception
        advice = (
            "Check the id and the connection to the hub, or give a local folder."
            if source.on_hub
            else "The folder needs config.json, tokenizer files and *.safetensors."
        )
        raise ModelError(f"the {what} of model {source.name} cannot be loaded: {first_line(error)}. {advice}") from error


def _count_parameters(config: PretrainedConfig, source: _Source) -> int:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each architecture's own complaints about its configuration
        raise ModelError(
            f"model {source.name} ({config.model_type}) is not a causal language model that transformers can build: {first_line(error)}. "
            f"{_ADVICE}"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _check_kind(config: PretrainedConfig, source: _Source) -> None:
    """Refuse what would load and then be something else than a causal language model in full precision."""
    text = config.get_text_config()
    quantisation = next((found for part in (config, text) if (found := getattr(part, "quantization_config", None))), None)
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else getattr(quantisation, "quant_method", None)
        raise ModelError(
            f"model {source.name} is quantised ({getattr(method, 'value', method) or 'quantization_config in config.json'}), and only "
            "unquantised weights can be trained: take the model's folder or hub id in float32, bfloat16 or float16."
        )
    others = [kind for kind in ("vision_config", "audio_config") if getattr(config, kind, None) is not None]
    if config.is_encoder_decoder or others:
        what = "an encoder-decoder" if config.is_encoder_decoder else f"a model of more than text ({others[0]})"
        raise ModelError(f"model {source.name} ({config.model_type}) is {what}; swarm-node trains text decoders. {_ADVICE}")


def _read_weights(source: _Source, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())  # tables of names, of which what matters is said here
        return False

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        model, report = _read(
            source,
            AutoModelForCausalLM,
            "weights",
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except ModelError as error:
        torn = re.findall(r"^(\S+) *\|[^|]*CONVERSION", "\n".join(said), re.MULTILINE)
        if torn:  # an expert, or a part of it, is not there
            raise ModelError(f"weights of model {source.name} lack parts that belong together: {_list(torn)}. Fetch it again.") from error
        raise
    finally:
        logger.removeFilter(keep)
    advice = "Save the whole model again (save_pretrained), or fetch it again."
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(
            f"{len(mismatched)} weights of model {source.name} ({source.location}) have other shapes than config.json says, first {name}: "
            f"{tuple(found)}, expected {tuple(expected)}. {advice}"
        )
    # What is not floating is made, not learned: masks and counters that older files lack.
    missing = sorted(key for key in report["missing_keys"] if model.get_parameter_or_buffer(key).is_floating_point())
    if missing:
        raise ModelError(
            f"{len(missing)} weights of model {source.name} are missing from its files ({source.location}): {_list(missing)}. "
            f"{_explain_names(missing, report['unexpected_keys'])}{advice}"
        )
    layers = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    foreign = sorted(name for name in report["unexpected_keys"] if name.rpartition(".")[0] in layers)
    if foreign:
        raise ModelError(
            f"{len(foreign)} weights of layers of model {source.name} ({source.location}) are none that config.json describes: "
            f"{_list(foreign)}. Take the config.json that belongs to these weights."
        )
    return model


def _explain_names(missing: Collection[str], unexpected: Collection[str]) -> str:
    """What stands before the names of weights in the file, if it is that."""
    wanted = set(missing)
    for name in sorted(unexpected):
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in wanted:
                prefix = ".".join(parts[:cut]) + "."
                return f"The file has them under names that begin with {prefix!r}{_by(prefix)}: take that off. "
    return f"The file has others instead: {_list(sorted(unexpected))}. " if unexpected else ""


def _by(prefix: str) -> str:
    return f", as saved from the wrapper of {_WRAPPERS[prefix]}" if prefix in _WRAPPERS else ""


def _list(names: Collection[str], shown: int = 3) -> str:
    return ", ".join(list(names)[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _check_finite(model: nn.Module, source: _Source) -> None:
    # The extremes are NaN where one value is, and take no memory.
    wrong = [name for name, weight in model.named_parameters() if weight.numel() and not torch.stack(weight.aminmax()).isfinite().all()]
    if wrong:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ModelError(
            f"{len(wrong)} weights of model {source.name} ({source.location}) hold NaN or infinity as {dtype}: {_list(wrong)}. "
            "Take an earlier save of the model, or another dtype."
        )


def _check_computation(model: Any, source: _Source) -> None:
    what = f"model {source.name} ({model.config.model_type})"
    try:
        splitting, error = splits(model), batching_error(model)
    except Exception as failure:  # a forward that takes or keeps other things fails wherever it meets ours
        raise ModelError(
            f"{what} cannot be sampled in batches over a known kind of cache ({type(failure).__name__}: {first_line(failure)}). {_ADVICE}"
        ) from failure
    if not splitting:
        raise ModelError(f"{what} changes its logits after the LM head in a way that is not known here. {_ADVICE}")
    tolerance = batching_tolerance(model.dtype)
    if not error <= tolerance:
        raise ModelError(
            f"{what} cannot be sampled in batches: beside another sequence its logits differ by {error:.2g} of their size from those "
            f"alone, limit {tolerance:.2g}. {_ADVICE}"
        )


def _check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], source: _Source) -> None:
    rows = min(int(model.get_input_embeddings().weight.shape[0]), head_width(model))  # type: ignore[operator]
    largest = max(*tokenizer.get_vocab().values(), *stop_ids)
    if largest >= rows:
        raise ModelError(
            f"model {source.name} knows {rows} tokens, and its tokenizer or stop tokens go up to id {largest}: the tokenizer is of another "
            "model, or was extended alone. Take the one that the model was trained with, or resize the model's embeddings."
        )


def _check_prompts(policy: Policy) -> None:
    """Raise what `encode_prompt` raises, now instead of in the first step, and more."""
    try:
        first, second = (policy.encode_prompt(question) for question in ("What is 1+2?", "How many are there?"))
        digits = str(policy.tokenizer.decode(policy.encode_prompt("12+30")))
    except ModelError:
        raise
    except Exception as error:  # the tokenizers' bare Exception
        raise ModelError(f"the tokenizer of model {policy.source} cannot encode a question: {first_line(error)}. {_ADVICE}") from error
    if policy.tokenizer.chat_template and np.array_equal(first, second):
        raise ModelError(
            f"the chat template of model {policy.source or policy.name} leaves the user's turn out: "
            "different questions give the same prompt. "
            "Mend chat_template.jinja (or chat_template in tokenizer_config.json), or choose another model."
        )
    if not policy.tokenizer.chat_template and "12+30" not in "".join(digits.split()):
        raise ModelError(f"the tokenizer of model {policy.source} does not know digits: 12+30 becomes {digits[:80]!r}. {_ADVICE}")


def _stop_ids(model: Any, tokenizer: PreTrainedTokenizerBase, source: _Source) -> frozenset[int]:
    """Every id that ends a text: of the generation config, and the tokenizer's own end (a chat model's end of turn)."""
    if (Path(source.location) / "generation_config.json").is_file():
        _read(source, GenerationConfig, "generation_config.json")  # which transformers does without where it cannot be read
    found: list[Any] = []
    for ids in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not found or not all(type(index) is int and index >= 0 for index in found):
        named = f"{_list([repr(index) for index in found])} for a stop token" if found else "no stop token"
        raise ModelError(f"model {source.name} names {named}: set eos_token_id in its generation_config.json to an id, or some.")
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


def _describe_context(config: PretrainedConfig) -> tuple[str, ...]:
    limit, positions = rotary_limit(config), getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None or positions is None or limit >= positions:
        return ()
    return (f"context {limit:,} of {positions:,} tokens: beyond, the model's rotary angles depend on the longest sequence of a batch",)
