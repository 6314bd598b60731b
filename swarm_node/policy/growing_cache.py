"""A KV cache that grows in place: transformers' own copies every key and value for every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer


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
    """An empty cache for a model; layers with sliding windows or recurrent states stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _enlarge(buffer: Tensor, length: int) -> Tensor:
    """A buffer with the same beginning and room for `length` positions and half as many again."""
    batch, heads, filled, size = buffer.shape
    larger = torch.empty(batch, heads, length + length // 2 + 32, size, dtype=buffer.dtype, device=buffer.device)
    larger[:, :, :filled] = buffer
    return larger
