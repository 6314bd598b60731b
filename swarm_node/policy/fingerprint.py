"""Short stable names for an architecture and a tokenizer, so that peers can tell whether they speak the same tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Where a configuration came from and how it is run says nothing about the architecture.
_NOT_ARCHITECTURE = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config", "use_cache"}
)


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int]) -> str:
    """16 hex digits over everything that maps text to ids and back: vocabulary, added tokens, the tokenizer's pipeline (normaliser,
    pre-tokeniser, merges, decoder), the special tokens' roles, the chat template and the stop ids. The same in every process, wherever
    the tokenizer's files lie."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    pipeline = json.loads(backend.to_str()) if backend is not None else {}
    # How a caller last padded or truncated is state, not identity.
    pipeline = {part: value for part, value in pipeline.items() if part not in ("padding", "truncation", "version")}
    return _digest(
        {
            "vocabulary": tokenizer.get_vocab(),
            "added": {str(index): str(token) for index, token in tokenizer.added_tokens_decoder.items()},
            "special": {role: str(token) for role, token in tokenizer.special_tokens_map.items()},
            "pipeline": pipeline,
            "chat_template": tokenizer.chat_template,
            "stop_ids": sorted(stop_ids),
        }
    )


def fingerprint_policy(config: PretrainedConfig, tokenizer_fingerprint: str) -> str:
    """16 hex digits over the architecture's configuration and the tokenizer's fingerprint."""
    architecture = {key: value for key, value in config.to_dict().items() if key not in _NOT_ARCHITECTURE}
    return _digest({"architecture": architecture, "tokenizer": tokenizer_fingerprint})


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
