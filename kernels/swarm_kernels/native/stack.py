"""All layers of a decode step, or of prompts, in one call into the compiled library, over the policy's weights as they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarm_kernels.interface import DecodeStep, LayerWeights, LinearWeight, LowRank, NewTokens, NormWeight, PromptAttention, PromptStep
from swarm_kernels.layout import LayerCache
from swarm_kernels.native import arguments as c
from swarm_kernels.native.fill import fill_append, fill_decode, fill_prompts, packed_rows, pointer

WIDTH = 32
"""The kernels take inputs and outputs by so many."""
FEW_ROWS = 256
"""Of a linear layer: up to so many rows, packing them is cheaper than packing the weights."""


class NativeStack:
    """See `swarm_kernels.interface.Stack`."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerWeights], norm: NormWeight) -> None:
        """The weights must fit, see `fits`; they are referred to, and must stay where they are. Adapters are copied."""
        self._adapters = [[_transposed(linear.adapter) for linear in layer.linears] for layer in layers]  # keeps the copies alive
        arguments = [_layer(layer, adapters) for layer, adapters in zip(layers, self._adapters, strict=True)]
        self._decode, self._prefill = (_Call(library, layers, arguments, norm) for _ in range(2))

    def decode(self, step: DecodeStep, caches: Sequence[LayerCache], hidden: Tensor) -> Tensor:
        """See `Stack.decode`."""
        call = self._decode
        call.prepare(caches, hidden)
        a = call.arguments
        scratch = fill_decode(a.step, step, caches[0], call.query, call.keys, call.values)
        a.step.attend.out = a.attended
        a.step.sparse = step.budgets is not None
        out = call.run(hidden)
        del scratch  # lived until here
        return out

    def prefill(self, step: PromptStep, caches: Sequence[LayerCache], hidden: Tensor) -> Tensor:
        """See `Stack.prefill`."""
        call, cache = self._prefill, caches[0]
        call.prepare(caches, hidden)
        a = call.arguments
        attention = PromptAttention(call.query, step.table, step.bounds, step.starts, scale=1.0)  # which each layer replaces by its own
        fill_prompts(a.prompt, cache, attention, call.attended)
        fill_append(a.step.append, cache, NewTokens(call.keys, call.values, step.slots, call.query, step.cosines, step.sines))
        return call.run(hidden)


class _Call:
    """The arguments of one kind of call, and the memory that its layers write to."""

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[LayerWeights], arguments: Sequence[c.LayerArguments], norm: NormWeight
    ) -> None:
        self._library = library
        self._weights = layers, norm  # keeps them alive
        self._layers = (c.LayerArguments * len(layers))(*arguments)
        self._rank = max((linear.adapter.a.shape[0] for layer in layers for linear in layer.linears if linear.adapter), default=0)
        first = layers[0]
        self._width, self._inner = first.output.weight.shape[0], first.gate.weight.shape[0]
        self._query_width, self._kv_width = first.query.weight.shape[0], first.key.weight.shape[0]
        self.arguments = c.StackArguments(layers=self._layers, final_norm=_norm(norm), width=self._width, inner=self._inner)
        self.arguments.count = len(layers)
        self._caches: Sequence[LayerCache] = ()
        self._buffers: tuple[Tensor | None, ...] = ()
        self.query, self.keys, self.values, self.attended = (torch.empty(0),) * 4

    def prepare(self, caches: Sequence[LayerCache], hidden: Tensor) -> None:
        """Raises ValueError when the arguments do not fit the model."""
        rows = len(hidden)
        if hidden.shape != (rows, self._width) or hidden.dtype != torch.bfloat16 or not hidden.is_contiguous():
            raise ValueError(f"hidden states of shape {tuple(hidden.shape)} and type {hidden.dtype}; expected (B, {self._width}) bfloat16")
        if caches is not self._caches:
            self._point_at(caches)
        if rows != self.arguments.rows:
            self._allocate(rows, caches[0].keys.shape[3])

    def run(self, hidden: Tensor) -> Tensor:
        a, out = self.arguments, torch.empty_like(hidden)
        a.hidden, a.normed, a.threads = hidden.data_ptr(), out.data_ptr(), torch.get_num_threads()
        self._library.swarm_stack(ctypes.byref(a))
        return out

    def _point_at(self, caches: Sequence[LayerCache]) -> None:
        if len(caches) != len(self._layers) or caches[0].keys.shape[1] * caches[0].keys.shape[3] != self._kv_width:
            raise ValueError(f"{len(caches)} layers of a cache of another shape than the {len(self._layers)} layers of the model")
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.cache_keys, layer.cache_values, layer.centroids = (
                part.data_ptr() for part in (cache.keys, cache.values, cache.centroids)
            )
        self._caches = caches

    def _allocate(self, rows: int, head_size: int) -> None:
        """What the layers write, for so many rows."""
        widths = (self._width, self._query_width, self._kv_width, self._kv_width, self._query_width, self._inner, self._inner)
        packed = packed_rows(rows, max(self._width, self._query_width, self._inner)) if rows <= FEW_ROWS else None
        parts = [torch.empty(rows, width, dtype=torch.bfloat16) for width in widths]
        inner_product = torch.empty(rows, self._rank, dtype=torch.float32)
        self._buffers = (*parts, packed, inner_product)
        delta, query, keys, values, attended, gates, ups = (part.data_ptr() for part in parts)
        a = self.arguments
        a.delta, a.query, a.keys, a.values, a.attended = delta, query, keys, values, attended
        a.gates, a.ups, a.packed, a.inner_product, a.rows = gates, ups, pointer(packed), inner_product.data_ptr(), rows
        for layer in self._layers:
            layer.query.out, layer.key.out, layer.value.out = query, keys, values
            layer.output.out, layer.gate.out, layer.up.out, layer.down.out = delta, gates, ups, delta
        self.query, self.keys, self.values, self.attended = (part.view(rows, -1, head_size) for part in parts[1:5])


def fits(layers: Sequence[LayerWeights], norm: NormWeight) -> bool:
    """Whether the kernels take these weights: contiguous bf16 on the CPU, in shapes that are multiples of WIDTH and alike in all layers,
    with norms of queries and keys both or neither; adapters in contiguous float32, of the shapes that go with them."""
    tensors = [norm.weight, *(tensor for layer in layers for tensor in _tensors(layer))]
    paired = all((layer.query_norm is None) == (layer.key_norm is None) for layer in layers)
    usual = paired and all(t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    usual &= all(_adapter_fits(linear.adapter, linear.weight) for layer in layers for linear in layer.linears if linear.adapter is not None)
    whole = all(size % WIDTH == 0 for tensor in tensors for size in tensor.shape)
    return usual and whole and len({tuple(linear.weight.shape for linear in layer.linears) for layer in layers}) == 1


def _adapter_fits(adapter: LowRank, weight: Tensor) -> bool:
    a, b, rank = adapter.a, adapter.b, len(adapter.a)
    usual = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in (a, b))
    return usual and rank > 0 and a.shape == (rank, weight.shape[1]) and b.shape == (weight.shape[0], rank)


def _tensors(layer: LayerWeights) -> Iterator[Tensor]:
    for norm in (layer.input_norm, layer.query_norm, layer.key_norm, layer.middle_norm):
        if norm is not None:
            yield norm.weight
    for linear in layer.linears:
        yield linear.weight
        if linear.bias is not None:
            yield linear.bias


def _norm(norm: NormWeight | None) -> c.NormWeight:
    return c.NormWeight() if norm is None else c.NormWeight(norm.weight.data_ptr(), norm.epsilon)


def _transposed(adapter: LowRank | None) -> tuple[Tensor, Tensor] | None:
    """Copies of A (rank, inputs), and of B (rank, outputs), scaled."""
    return None if adapter is None else (adapter.a.detach().clone(), (adapter.b.detach() * adapter.scale).t().contiguous())


def _layer(layer: LayerWeights, adapters: Sequence[tuple[Tensor, Tensor] | None]) -> c.LayerArguments:
    norms = (layer.input_norm, layer.query_norm, layer.key_norm, layer.middle_norm)
    products = (_product(linear, adapter) for linear, adapter in zip(layer.linears, adapters, strict=True))
    a = c.LayerArguments(*map(_norm, norms), *products)
    a.scale, a.window, a.rotary, a.sparse = layer.scale, layer.window, layer.rotary, layer.selects
    return a


def _product(linear: LinearWeight, adapter: tuple[Tensor, Tensor] | None) -> c.Product:
    product = c.Product(linear.weight.data_ptr(), pointer(linear.bias), outputs=linear.weight.shape[0])
    if adapter is not None:
        product.a, product.b, product.rank = adapter[0].data_ptr(), adapter[1].data_ptr(), len(adapter[0])
    return product
