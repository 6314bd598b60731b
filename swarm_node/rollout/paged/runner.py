"""Walk the policy's own modules over the paged cache: dense prefill of many sequences at once, and one token a sequence.

Weights are read where the policy has them, so an update needs no hand-over, and whatever wraps a linear layer (an adapter, a hook) is
called and takes part. Attention, rotation, cache writes, norms and plain linear layers are kernels of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from swarm_kernels.interface import DecodeStep, Kernels, NewTokens, PromptAttention, PromptStep, Stack
from swarm_kernels.layout import RESERVED_PAGES
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from swarm_node.policy.policy import Policy
from swarm_node.policy.rollout_adapter import RolloutAdapter
from swarm_node.policy.sparse_attention import DENSE_LAYERS
from swarm_node.rollout.paged.cache import Batch, CachedSequence, PagedCache
from swarm_node.rollout.paged.families import Anatomy, Layer, Norm, dissect, layer_weights, norm_weight, plain
from swarm_node.rollout.paged.graphs import CudaRecorder, StepGraphs, StepInputs


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that prefill computes now."""

    sequence: CachedSequence
    tokens: NDArray[np.int32]
    """(T,), the sequence's tokens from `start` on."""
    start: int
    """Tokens of the sequence that are in the cache already."""


class ModelRunner:
    """Hidden states out of token ids. Call it in inference mode."""

    adapter: RolloutAdapter | None = None
    """Takes part in everything that the runner computes, and in nothing else."""

    def __init__(self, policy: Policy, kernels: Kernels) -> None:
        """Raises Unsupported, see `dissect`."""
        self.anatomy: Anatomy = dissect(policy.model)
        self.kernels = kernels
        self.device = policy.device
        # A fixed number keeps a completion's attention the same whatever runs beside it.
        self._splits = 8 if policy.device.type == "cuda" else 2
        self._stack: Stack | None = None
        self._model = policy.model
        self._graphs = StepGraphs(CudaRecorder(policy.device)) if policy.device.type == "cuda" else None

    def prepare(self) -> None:
        """Look at the modules anew: weights stay where they are until the next look. Whether one call can compute all layers, and whether
        recorded steps still hold."""
        layers = [layer_weights(layer, _selects(layer, index)) for index, layer in enumerate(self.anatomy.layers)]
        whole = [layer for layer in layers if layer is not None]
        if self._graphs is not None:
            # Whatever wraps a linear layer may do something else at each look.
            known = [] if len(whole) == len(layers) else [object()]
            scales = [linear.adapter.scale for layer in whole for linear in layer.linears if linear.adapter is not None]
            addresses = [tensor.data_ptr() for tensor in chain(self._model.parameters(), self._model.buffers())]
            self._graphs.prepare((self.adapter, known, scales, addresses))
        self._stack = self.kernels.stack(whole, norm_weight(self.anatomy.norm)) if len(whole) == len(layers) else None

    def prefill(self, chunks: Sequence[Chunk], cache: PagedCache) -> Tensor:
        """Compute chunks of prompts with dense attention and write their keys and values.

        Returns:
            The hidden state of each chunk's last token after the final norm, (chunks, H).
        """
        ids = torch.from_numpy(np.concatenate([chunk.tokens for chunk in chunks])).to(self.device)
        positions = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        slots = torch.cat([cache.slots(chunk.sequence, chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        table = pad_sequence([cache.row(chunk.sequence) for chunk in chunks], batch_first=True)
        bounds = torch.tensor([0, *accumulate(len(chunk.tokens) for chunk in chunks)], dtype=torch.int32)
        starts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32)
        last = (bounds[1:] - 1).to(self.device)
        with self._adapted():
            hidden = self.anatomy.embedding(ids)
            cosines, sines = self._angles(hidden, torch.from_numpy(positions).to(self.device))
            if self._stack is not None and self.adapter is None:
                return self._stack.prefill(PromptStep(table, bounds, starts, slots, cosines, sines), cache.layers, hidden)[last]
            delta: Tensor | None = None
            for layer, layer_cache in zip(self.anatomy.layers, cache.layers, strict=True):
                hidden, normed = self._norm(layer.input_norm, hidden, delta)
                query, keys, values = self._project(layer, normed)
                angles = (query, cosines, sines) if layer.rotary else ()
                self.kernels.append(layer_cache, NewTokens(keys, values, slots, *angles))
                attention = PromptAttention(query, table, bounds, starts, layer.scale, layer.window)
                attended = self.kernels.attend_prompts(layer_cache, attention)
                hidden, delta = self._finish(layer, hidden, attended)
            assert delta is not None
            return self._norm(self.anatomy.norm, hidden[last], delta[last])[1]

    def decode(self, tokens: Tensor, positions: NDArray[np.int64], batch: Batch, cache: PagedCache, budgets: NDArray[np.int32]) -> Tensor:
        """Compute one token of each of B sequences.

        Args:
            tokens: (B,) ids, on the policy's device.
            positions: (B,), of these tokens in their sequences.
            batch: Where the cache put them.
            cache: That the keys and values are written to and read from.
            budgets: (B,) pages that the sparse layers may read besides the reserved three; where all sequences are shorter, nothing is
                selected and attention is dense.

        Returns:
            Hidden states after the final norm, (B, H).
        """
        pages = batch.table.shape[1]
        sparse = bool((budgets + RESERVED_PAGES < -(-(positions + 1) // cache.layout.page_size)).any())
        width = min(int(np.minimum(budgets, pages).max()) + RESERVED_PAGES, pages) if sparse else 0
        at, allowed = (torch.from_numpy(part).to(self.device) for part in (positions, budgets))
        inputs = StepInputs(tokens, at, batch.table, batch.lengths, batch.slots, allowed)
        with self._adapted():
            if self._graphs is None:
                return self._step(inputs, width, cache)
            return self._graphs.decode(
                lambda inputs, width: self._step(inputs, width, cache), inputs, width, cache=cache, adapted=self.adapter is not None
            )

    def _step(self, inputs: StepInputs, list_width: int, cache: PagedCache) -> Tensor:
        """A decode step without a wait for the device in it; `list_width` 0: dense."""
        sparse = list_width > 0
        hidden = self.anatomy.embedding(inputs.tokens)
        cosines, sines = self._angles(hidden, inputs.positions)
        step = DecodeStep(inputs.table, inputs.lengths, inputs.slots, 1.0, self._splits, cosines, sines)
        if sparse:
            step.list_width, step.budgets = list_width, inputs.budgets
        if self._stack is not None and self.adapter is None:
            return self._stack.decode(step, cache.layers, hidden)
        unrotated = DecodeStep(step.table, step.lengths, step.slots, 1.0, self._splits, None, None, step.budgets, step.list_width)
        delta: Tensor | None = None
        for index, (layer, layer_cache) in enumerate(zip(self.anatomy.layers, cache.layers, strict=True)):
            hidden, normed = self._norm(layer.input_norm, hidden, delta)
            query, keys, values = self._project(layer, normed)
            shared = step if layer.rotary else unrotated
            shared.scale = layer.scale
            attended = self.kernels.decode_layer(
                shared,
                layer_cache,
                query,
                keys,
                values,
                sparse=sparse and _selects(layer, index),
                window=layer.window,
            )
            hidden, delta = self._finish(layer, hidden, attended)
        return self._norm(self.anatomy.norm, hidden, delta)[1]

    def _adapted(self) -> AbstractContextManager[object]:
        return nullcontext() if self.adapter is None else self.adapter.active()

    def _angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self.anatomy.rotary(hidden, positions[None])
        return cosines[0], sines[0]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (N, V) of hidden states (N, H) after the final norm. None of the families changes them after its head."""
        return self._linear(self.anatomy.head, hidden)

    def _linear(self, module: nn.Module, x: Tensor) -> Tensor:
        """A linear layer by our own kernel where it is nothing else; whatever wraps, hooks or replaces its forward is called."""
        found = plain(module)
        if found is not None:
            return self.kernels.linear(x, found.weight, found.bias)
        out: Tensor = module(x)
        return out

    def _norm(self, norm: Norm, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.kernels.add_norm(hidden, delta, norm.weight, norm.epsilon)

    def _project(self, layer: Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (N, query heads, head size), keys and values (N, KV heads, head size), not rotated yet."""
        size = self.anatomy.head_size
        query, keys, values = (self._linear(module, normed) for module in (layer.query, layer.key, layer.value))
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(layer.query_norm, query.view(-1, size), None)[1]
            keys = self._norm(layer.key_norm, keys.view(-1, size), None)[1]
        count, heads, kv_heads = len(normed), self.anatomy.query_heads, self.anatomy.kv_heads
        return query.view(count, heads, size), keys.view(count, kv_heads, size), values.view(count, kv_heads, size)

    def _finish(self, layer: Layer, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """What follows attention in a layer, for hidden (N, H) and attended (N, query heads, head size): the residual stream and what the
        next norm adds to it."""
        hidden, normed = self._norm(layer.middle_norm, hidden, self._linear(layer.output, attended.flatten(1)))
        gated = self.kernels.gate(self._linear(layer.gate, normed), self._linear(layer.up, normed))
        return hidden, self._linear(layer.down, gated)


def _selects(layer: Layer, index: int) -> bool:
    """Whether a layer reads a selection of the pages in a sparse step."""
    return index >= DENSE_LAYERS and not layer.window
