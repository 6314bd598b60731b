"""A KV cache that grows in place, since transformers' own copies every key and value for every token, and prompts that fill it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from swarm_node.policy.parts import body, cache_argument, unwrap


class GrowingLayer(DynamicLayer):
    """A layer's keys and values, each (batch, KV heads, length, head size), as views into buffers with room for more."""

    _key_buffer: Tensor
    _value_buffer: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append along the length; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._key_buffer, self._value_buffer = key_states[:, :, :0], value_states[:, :, :0]
        before = self.get_seq_length()
        length = before + key_states.shape[2]
        if length > self._key_buffer.shape[2]:
            self._key_buffer = _enlarge(self._key_buffer[:, :, :before], length)
            self._value_buffer = _enlarge(self._value_buffer[:, :, :before], length)
        self._key_buffer[:, :, before:length] = key_states
        self._value_buffer[:, :, before:length] = value_states
        self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        length = self.get_seq_length()
        self._key_buffer, self._value_buffer = self._key_buffer[indices], self._value_buffer[indices]
        self.keys, self.values = self._key_buffer[:, :, :length], self._value_buffer[:, :, :length]


def growing_cache(config: PretrainedConfig) -> DynamicCache:
    """An empty cache for a model; layers with other states than keys and values stay transformers' own.

    Layers with sliding windows keep everything, and the model's mask hides what is outside: a cache that drops keys goes by the
    configuration, which may name a window that the model does not have.
    """
    cache = DynamicCache(config=config)
    whole = (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [GrowingLayer() if type(layer) in whole else layer for layer in cache.layers]  # type: ignore[no-untyped-call]
    return cache


def prefill(model: nn.Module, prompts: Sequence[NDArray[np.int32]], room: int) -> tuple[Tensor, DynamicCache, Tensor, Tensor]:
    """Run the prompts once, padded on the left.

    Args:
        model: A transformers causal language model, perhaps wrapped by peft.
        prompts: Token ids (P,) each, P >= 1.
        room: Positions after the prompts that the mask shall have.

    Returns:
        The last hidden states (N, H), the cache, the attention mask (N, longest prompt + room), the prompts' lengths (N,).
    """
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.ones(len(prompts), width + room, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, : width - len(prompt)] = False
    ids, mask = ids.to(device), mask.to(device)
    lengths = mask[:, :width].sum(-1)
    cache = growing_cache(unwrap(model).config)
    output = body(model)(
        input_ids=ids,
        attention_mask=mask[:, :width],
        position_ids=(mask[:, :width].cumsum(-1) - 1).clamp(min=0),
        use_cache=True,
        **{cache_argument(model): cache},
    )
    return output.last_hidden_state[:, -1], cache, mask, lengths


def _enlarge(buffer: Tensor, length: int) -> Tensor:
    """A buffer with the same beginning and room for `length` positions and half as many again."""
    batch, heads, filled, size = buffer.shape
    larger = torch.empty(batch, heads, length + length // 2 + 32, size, dtype=buffer.dtype, device=buffer.device)
    larger[:, :, :filled] = buffer
    return larger
