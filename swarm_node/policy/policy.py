"""The policy: a causal language model, its tokenizer, and what others must know about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from swarm_node.policy.parts import unwrap


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
        """Tokens that the model's positions allow, prompt and completion together; None where it has no limit of its own."""
        limit = getattr(unwrap(self.model).config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that training changes, by name, in the model's own order (the same in every process)."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def encode_prompt(self, prompt: str) -> NDArray[np.int32]:
        """Token ids (P,) of a task's prompt: as a user's turn of the chat template where the tokenizer has one, else encoded plainly."""
        if self.tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            ids = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
        else:
            ids = self.tokenizer.encode(prompt)
        return np.asarray(ids, dtype=np.int32)

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
