"""The policy: a causal language model, its tokenizer, and what others must know about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from swarm_node.policy.errors import ModelError
from swarm_node.policy.fetching import first_line
from swarm_node.policy.parts import rotary_limit, unwrap

_PRIVATE_USE = range(0xE000, 0xF900)
"""Characters that no standard gives a meaning to."""


@dataclass(eq=False)
class Policy:
    """The model that this node trains and samples from: one module object, shared by learner and rollout."""

    model: nn.Module
    """A transformers causal language model, wrapped by peft when `lora`."""
    tokenizer: PreTrainedTokenizerBase
    name: str
    """What peers are shown: a named model or hub id as the user gave it, of a folder its own name, of `auto` what was chosen. Printable and
    within the wire's limit for texts."""
    fingerprint: str
    """16 hex digits over the architecture's configuration and the tokenizer's fingerprint; not over the weights, which change."""
    tokenizer_fingerprint: str
    """16 hex digits; part of the swarm's id. See `swarm_node.policy.fingerprint`."""
    stop_ids: frozenset[int]
    """Token ids that end a completion, at least one."""
    vocab_size: int
    """Width of the model's logits: token ids lie in [0, vocab_size)."""
    device: torch.device
    dtype: torch.dtype
    """Of the model's weights; adapters are float32."""
    lora: bool
    source: str = ""
    """What `load_policy` loads it from again; a folder's absolute path, which stays on this machine. Empty where nothing can."""
    choices: tuple[str, ...] = ()
    """Sentences that say what was chosen (model, dtype, device) and why."""

    @property
    def context(self) -> int | None:
        """Tokens that the model's positions allow, prompt and completion together; None where it has no limit of its own. Where rotary
        angles change with the length of the batch, only as many as leave them alone."""
        config = unwrap(self.model).config
        limits = [limit for limit in (getattr(config, "max_position_embeddings", None), rotary_limit(config)) if limit is not None]
        return int(min(limits)) if limits else None

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that training changes, by name, in the model's own order (the same in every process)."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def encode_prompt(self, prompt: str) -> NDArray[np.int32]:
        """Token ids (P,), P >= 1, of a task's prompt: as a user's turn of the chat template where the tokenizer has one, else encoded
        plainly, without what some tokenizers append. Special tokens come from template and tokenizer alone: their text in the prompt
        stays text.

        Raises:
            ModelError: the chat template fails or refuses a user's turn, or nothing comes of the prompt.
        """
        special = [token for token in self._special_tokens if token in prompt]
        opening, closing = "", ""
        if special:  # marked, as it has to be found again in what the template renders
            opening, closing = islice((mark for mark in map(chr, _PRIVATE_USE) if mark not in prompt), 2)
        text, ids = f"{opening}{prompt}{closing}", []
        if self.tokenizer.chat_template:
            turn = [{"role": "user", "content": text}]
            try:
                text = str(self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
            except Exception as error:  # a template is a program of others: it raises whatever it likes
                raise ModelError(
                    f"the chat template of model {self.source or self.name} cannot render a user's turn: {first_line(error)}. "
                    "Mend chat_template.jinja (or chat_template in tokenizer_config.json), or choose another model."
                ) from error
        else:
            ids = self._beginning()
        pieces = re.split(f"{opening}(.*?){closing}", text, flags=re.DOTALL) if special else [text]
        for index, piece in enumerate(pieces):
            ids += self._encode_as_text(piece, special) if index % 2 else self.tokenizer.encode(piece, add_special_tokens=False)
        if not ids:
            where = "chat template" if self.tokenizer.chat_template else "tokenizer"
            raise ModelError(
                f"the {where} of model {self.source or self.name} makes nothing of a prompt: mend it, or choose another model."
            )
        return np.asarray(ids, dtype=np.int32)

    def _beginning(self) -> list[int]:
        """Ids that the tokenizer puts before a text; what it puts behind, an end of text, would end a prompt before its answer."""
        bare: list[int] = self.tokenizer.encode("a", add_special_tokens=False)
        whole: list[int] = self.tokenizer.encode("a")
        return whole[: next((start for start in range(len(whole)) if whole[start : start + len(bare)] == bare), 0)]

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        """Texts that the tokenizer would take for a special token, wherever it finds them: those it calls so, stop tokens, and those that
        the chat template writes."""
        template = str(self.tokenizer.chat_template or "")
        return tuple(
            token.content
            for index, token in self.tokenizer.added_tokens_decoder.items()
            if token.special or index in self.stop_ids or (token.content in template and not token.content.isspace())
        )

    def _encode_as_text(self, text: str, special: list[str]) -> list[int]:
        """Ids of a text, without those of special tokens. Some tokenizers know these as words too; such a text is cut until it has none."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if len(text) < 2 or not any(self.tokenizer.convert_tokens_to_ids(token) in ids for token in special):
            return ids
        half = len(text) // 2
        return self._encode_as_text(text[:half], special) + self._encode_as_text(text[half:], special)

    def decode(self, tokens: NDArray[np.integer]) -> str:
        """A completion's text, without its stop token and other special tokens."""
        ids = tokens.tolist()
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the trainable parameters in place.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs; nothing is changed then.
        """
        own = self.trainable()
        problems = [f"missing {name}" for name in own.keys() - weights.keys()]
        problems += [f"unknown {name}" for name in weights.keys() - own.keys()]
        problems += [
            f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(parameter.shape)}"
            for name, parameter in own.items()
            if name in weights and weights[name].shape != parameter.shape
        ]
        if problems:
            listed = "; ".join(sorted(problems)[:3])
            raise ValueError(
                f"these weights are not of {self.name} ({'LoRA' if self.lora else 'full'}): {len(problems)} differences, first {listed}. "
                "Use the model and LoRA options that the weights were saved with, or another home folder."
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
