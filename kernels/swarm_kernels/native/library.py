"""The CPU kernels behind the interface of all backends: argument checks, then one call into the compiled library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swarm_kernels.checks import check_attend, check_cache, check_select
from swarm_kernels.elementwise import naive
from swarm_kernels.interface import DecodeStep
from swarm_kernels.layout import LayerCache
from swarm_kernels.linear import naive as linear_naive
from swarm_kernels.native.arguments import (
    DTYPE_CODES,
    STRUCTURES,
    AppendArguments,
    AttendArguments,
    DecodeArguments,
    GateArguments,
    LinearArguments,
    LogprobArguments,
    NormArguments,
    SelectArguments,
)
from swarm_kernels.native.build import BuildError, build

WIDTH = 32
"""Elements that the vectors of the elementwise kernels take at once; other widths are computed by torch."""
LINEAR_ROWS = 64
"""Rows up to which reading the weights is what a linear layer costs; torch is better at larger products."""
TASKS_A_THREAD = 4
"""Splits are added until every thread has this many (sequence, KV head, split) tasks, so that uneven lengths still balance."""


def load_library(march: str = "native") -> ctypes.CDLL:
    """Build if needed, load, and compare the argument structures of both sides. Raises BuildError."""
    path = build(march)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load: {error}") from error
    for which, structure in enumerate(STRUCTURES):
        if library.swarm_argument_bytes(which) != ctypes.sizeof(structure):
            raise BuildError(f"{path} was built from other sources: {structure.__name__} differs")
    library.swarm_read.restype = ctypes.c_uint64
    return library


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeKernels:
    """See `swarm_kernels.interface.Kernels`. Threads: as many as torch uses."""

    name = "native"

    def __init__(self, march: str = "native") -> None:
        self.library = load_library(march)
        self._has_linear = bool(self.library.swarm_has_linear())
        self._step: DecodeStep | None = None
        self._arguments = DecodeArguments()
        self._scratch: tuple[Tensor, ...] = ()

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        cache: LayerCache,
        *,
        query: Tensor | None = None,
        cosines: Tensor | None = None,
        sines: Tensor | None = None,
    ) -> None:
        check_cache(cache, keys.dtype)
        arguments = AppendArguments()
        _fill_append(arguments, keys, values, slots, cache, query, cosines, sines)
        self.library.swarm_append(ctypes.byref(arguments))

    def select_pages(self, query: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, budgets: Tensor, width: int) -> Tensor:
        check_cache(cache, query.dtype)
        check_select(query, cache, table, lengths, budgets, width)
        arguments = SelectArguments()
        pages = torch.empty(query.shape[0], cache.keys.shape[1], width, dtype=torch.int32)
        _fill_select(arguments, query, cache, table, lengths, budgets, pages)
        self.library.swarm_select(ctypes.byref(arguments))
        return pages

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        table: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        pages: Tensor | None = None,
        window: int = 0,
        splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        check_cache(cache, query.dtype)
        check_attend(query, cache, table, lengths, pages, window, splits)
        arguments = AttendArguments()
        out = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        splits = splits or choose_splits(query.shape[0] * cache.keys.shape[1])
        partial = _partial(query, splits)
        _fill_attend(arguments, query, cache, table, lengths, pages, out, lse, partial, splits)
        arguments.scale, arguments.window = scale, window
        self.library.swarm_attend(ctypes.byref(arguments))
        return out, lse

    def decode_layer(
        self, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, *, sparse: bool, window: int = 0
    ) -> Tensor:
        if step is not self._step:
            self._prepare(step, cache, query, keys, values)
        out = torch.empty(query.shape, dtype=query.dtype)
        append, select, attend = self._parts
        append.query = select.query = attend.query = query.data_ptr()
        append.keys, append.values = keys.data_ptr(), values.data_ptr()
        append.cache_keys = attend.keys = cache.keys.data_ptr()
        append.cache_values = attend.values = cache.values.data_ptr()
        append.centroids = select.centroids = cache.centroids.data_ptr()
        attend.out = out.data_ptr()
        attend.window = window
        self._arguments.sparse = sparse
        attend.pages = select.pages if sparse else None
        self.library.swarm_decode(ctypes.byref(self._arguments))
        return out

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        rows, columns = hidden.shape
        same = all(part.is_contiguous() and part.dtype == hidden.dtype for part in (hidden, weight, hidden if delta is None else delta))
        if columns % WIDTH or not same:
            return naive.add_norm(hidden, delta, weight, epsilon)
        out, total = torch.empty_like(hidden), hidden if delta is None else torch.empty_like(hidden)
        self.library.swarm_norm(
            ctypes.byref(
                NormArguments(
                    hidden.data_ptr(),
                    _pointer(delta),
                    weight.data_ptr(),
                    total.data_ptr(),
                    out.data_ptr(),
                    DTYPE_CODES[hidden.dtype],
                    rows,
                    columns,
                    torch.get_num_threads(),
                    epsilon,
                )
            )
        )
        return total, out

    def gate(self, gates: Tensor, values: Tensor) -> Tensor:
        count = gates.numel()
        if count % WIDTH or not (gates.is_contiguous() and values.is_contiguous() and gates.dtype == values.dtype):
            return naive.gate(gates, values)
        out = torch.empty_like(gates)
        arguments = GateArguments(
            gates.data_ptr(), values.data_ptr(), out.data_ptr(), count, DTYPE_CODES[gates.dtype], torch.get_num_threads()
        )
        self.library.swarm_gate(ctypes.byref(arguments))
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, (outputs, inputs) = len(x), weight.shape
        parts = (x, weight) if bias is None else (x, weight, bias)
        matching = x.shape == (rows, inputs) and (bias is None or bias.shape == (outputs,))  # else torch says what is wrong
        fits = matching and 0 < rows <= LINEAR_ROWS and inputs % WIDTH == 0 and outputs % WIDTH == 0
        if not (self._has_linear and fits and all(part.is_contiguous() and part.dtype == torch.bfloat16 for part in parts)):
            return linear_naive.linear(x, weight, bias)
        out = torch.empty(rows, outputs, dtype=torch.bfloat16)
        packed = torch.empty(min(rows, 16) * -(-rows // 16) * inputs, dtype=torch.bfloat16)
        arguments = LinearArguments(
            x.data_ptr(),
            weight.data_ptr(),
            _pointer(bias),
            out.data_ptr(),
            packed.data_ptr(),
            rows,
            inputs,
            outputs,
            torch.get_num_threads(),
        )
        self.library.swarm_linear(ctypes.byref(arguments))
        return out

    def logprob_forward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, top: Tensor, mass: Tensor, chosen: Tensor) -> None:
        arguments = _logprob_arguments(logits, targets, sharpness)
        arguments.top, arguments.mass, arguments.chosen = top.data_ptr(), mass.data_ptr(), chosen.data_ptr()
        self.library.swarm_logprob_forward(ctypes.byref(arguments))

    def logprob_backward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, lse: Tensor, scale: Tensor, gradient: Tensor) -> None:
        arguments = _logprob_arguments(logits, targets, sharpness)
        arguments.lse, arguments.scale, arguments.gradient = lse.data_ptr(), scale.data_ptr(), gradient.data_ptr()
        arguments.gradient_stride = gradient.stride(0)
        self.library.swarm_logprob_backward(ctypes.byref(arguments))

    def _prepare(self, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Everything that the layers of a step share; a layer then sets nine pointers. Strides must be the same in all layers."""
        check_cache(cache, query.dtype)
        check_attend(query, cache, step.table, step.lengths, None, 0, step.splits)
        arguments = DecodeArguments()
        batch, kv_heads = query.shape[0], cache.keys.shape[1]
        splits = step.splits or choose_splits(batch * kv_heads)
        partial, lse = _partial(query, splits), torch.empty(query.shape[:2], dtype=torch.float32)
        pages = None
        _fill_append(arguments.append, keys, values, step.slots, cache, query, step.cosines, step.sines)
        if step.budgets is not None:
            check_select(query, cache, step.table, step.lengths, step.budgets, step.list_width)
            pages = torch.empty(batch, kv_heads, step.list_width, dtype=torch.int32)
            _fill_select(arguments.select, query, cache, step.table, step.lengths, step.budgets, pages)
        _fill_attend(arguments.attend, query, cache, step.table, step.lengths, pages, query, lse, partial, splits)
        arguments.attend.scale = step.scale
        self._arguments, self._scratch, self._step = arguments, (partial, lse, *([] if pages is None else [pages])), step
        self._parts = arguments.append, arguments.select, arguments.attend


def choose_splits(pairs: int) -> int:
    """Splits for a batch of (sequence, KV head) pairs."""
    return max(1, min(8, -(-TASKS_A_THREAD * torch.get_num_threads() // max(pairs, 1))))


def _partial(query: Tensor, splits: int) -> Tensor:
    batch, heads, size = query.shape
    return torch.empty(batch * heads * splits * (size + 2) if splits > 1 else 0, dtype=torch.float32)


def _fill_append(
    a: AppendArguments,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cache: LayerCache,
    query: Tensor | None,
    cosines: Tensor | None,
    sines: Tensor | None,
) -> None:
    a.keys, a.values, a.query, a.slots = keys.data_ptr(), values.data_ptr(), _pointer(query), slots.data_ptr()
    a.cosines, a.sines = _pointer(cosines), _pointer(sines)
    a.cache_keys, a.cache_values, a.centroids = cache.keys.data_ptr(), cache.values.data_ptr(), cache.centroids.data_ptr()
    a.key_token, a.key_head = keys.stride()[:2]
    a.value_token, a.value_head = values.stride()[:2]
    if query is not None:
        a.query_token, a.query_head = query.stride()[:2]
        a.query_heads = query.shape[1]
    a.angle_token = 0 if cosines is None else cosines.stride(0)
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.centroid_page, a.centroid_head = cache.centroids.stride()[:2]
    a.tokens, a.kv_heads, a.head_size = keys.shape
    a.dtype, a.page_size, a.threads = DTYPE_CODES[keys.dtype], cache.page_size, torch.get_num_threads()


def _fill_select(
    a: SelectArguments, query: Tensor, cache: LayerCache, table: Tensor, lengths: Tensor, budgets: Tensor, pages: Tensor
) -> None:
    a.query, a.centroids, a.pages = query.data_ptr(), cache.centroids.data_ptr(), pages.data_ptr()
    a.table, a.lengths, a.budgets = table.data_ptr(), lengths.data_ptr(), budgets.data_ptr()
    a.query_sequence, a.query_head = query.stride()[:2]
    a.centroid_page, a.centroid_head = cache.centroids.stride()[:2]
    a.table_sequence = table.stride(0)
    a.batch, a.kv_heads, a.list_width = pages.shape
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.dtype, a.threads = DTYPE_CODES[query.dtype], torch.get_num_threads()


def _fill_attend(
    a: AttendArguments,
    query: Tensor,
    cache: LayerCache,
    table: Tensor,
    lengths: Tensor,
    pages: Tensor | None,
    out: Tensor,
    lse: Tensor,
    partial: Tensor,
    splits: int,
) -> None:
    a.query, a.keys, a.values = query.data_ptr(), cache.keys.data_ptr(), cache.values.data_ptr()
    a.table, a.lengths, a.pages = table.data_ptr(), lengths.data_ptr(), _pointer(pages)
    a.out, a.lse, a.partial, a.splits = out.data_ptr(), lse.data_ptr(), partial.data_ptr(), splits
    a.query_sequence, a.query_head = query.stride()[:2]
    a.out_sequence, a.out_head = out.stride()[:2]
    a.page_stride, a.head_stride = cache.keys.stride()[:2]
    a.table_sequence = table.stride(0)
    a.batch, a.kv_heads = query.shape[0], cache.keys.shape[1]
    if pages is not None:
        a.pages_sequence, a.pages_head, a.list_width = pages.stride(0), pages.stride(1), pages.shape[2]
    a.group, a.head_size, a.page_size = query.shape[1] // a.kv_heads, query.shape[2], cache.page_size
    a.dtype, a.threads = DTYPE_CODES[query.dtype], torch.get_num_threads()


def _logprob_arguments(logits: Tensor, targets: Tensor, sharpness: Tensor) -> LogprobArguments:
    a = LogprobArguments()
    a.logits, a.targets, a.sharpness = logits.data_ptr(), targets.data_ptr(), sharpness.data_ptr()
    a.rows, a.columns = logits.shape
    a.row_stride = logits.stride(0)
    a.dtype, a.threads = DTYPE_CODES[logits.dtype], torch.get_num_threads()
    return a
