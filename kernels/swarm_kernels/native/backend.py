"""The CPU kernels behind the interface of all backends: argument checks, then one call into the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_kernels.checks import check_prompts
from swarm_kernels.interface import Attention, DecodeStep, LayerWeights, NewTokens, NormWeight, PromptAttention, Selection
from swarm_kernels.layout import LayerCache
from swarm_kernels.naive import elementwise, linear, prompt, sampling
from swarm_kernels.native.arguments import (
    DTYPE_CODES,
    STRUCTURES,
    AppendArguments,
    AttendArguments,
    DecodeArguments,
    DrawArguments,
    GateArguments,
    LinearArguments,
    LogprobArguments,
    NormArguments,
    Product,
    PromptArguments,
    SelectArguments,
)
from swarm_kernels.native.build import BuildError, build
from swarm_kernels.native.fill import fill_append, fill_attend, fill_decode, fill_prompts, fill_select, packed_rows, pointer
from swarm_kernels.native.stack import FEW_ROWS, WIDTH, NativeStack, fits


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


class NativeKernels:
    """See `swarm_kernels.interface.Kernels`. Threads: as many as torch uses; not to be called by several at a time."""

    name = "native"

    def __init__(self, march: str = "native") -> None:
        self.library = load_library(march)
        self._has_linear = bool(self.library.swarm_has_linear())
        self._step: DecodeStep | None = None
        self._arguments = DecodeArguments()
        self._scratch: tuple[Tensor, ...] = ()

    def append(self, cache: LayerCache, tokens: NewTokens) -> None:
        """See `Kernels.append`."""
        arguments = AppendArguments()
        fill_append(arguments, cache, tokens)
        self.library.swarm_append(ctypes.byref(arguments))

    def select_pages(self, cache: LayerCache, selection: Selection) -> Tensor:
        """See `Kernels.select_pages`."""
        arguments = SelectArguments()
        pages = fill_select(arguments, cache, selection)
        self.library.swarm_select(ctypes.byref(arguments))
        return pages

    def attend(self, cache: LayerCache, attention: Attention) -> tuple[Tensor, Tensor]:
        """See `Kernels.attend`. Without a number of splits there are as many as keep all threads busy."""
        arguments, out = AttendArguments(), torch.empty(attention.query.shape, dtype=attention.query.dtype)
        lse, _partial = fill_attend(arguments, cache, attention, out)  # both live until here
        self.library.swarm_attend(ctypes.byref(arguments))
        return out, lse

    def attend_prompts(self, cache: LayerCache, attention: PromptAttention) -> Tensor:
        """See `Kernels.attend_prompts`. Torch's where there are no matrix instructions, or the type is not bfloat16."""
        query = attention.query
        if not self._has_linear or query.dtype != torch.bfloat16:
            check_prompts(cache, attention)
            return prompt.attend_prompts(cache, attention)
        arguments, out = PromptArguments(), torch.empty(query.shape, dtype=query.dtype)
        fill_prompts(arguments, cache, attention, out)
        self.library.swarm_attend_prompts(ctypes.byref(arguments))
        return out

    def decode_layer(
        self, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, *, sparse: bool, window: int = 0
    ) -> Tensor:
        """See `Kernels.decode_layer`. The strides of a step's first layer are taken for those of all its layers."""
        if step is not self._step:
            arguments = DecodeArguments()
            self._scratch = fill_decode(arguments, step, cache, query, keys, values)
            self._arguments, self._parts, self._step = arguments, (arguments.append, arguments.select, arguments.attend), step
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
        """See `Kernels.add_norm`. Torch's for widths, strides or types that the kernel does not know."""
        rows, columns = hidden.shape
        same = all(part.is_contiguous() and part.dtype == hidden.dtype for part in (hidden, weight, hidden if delta is None else delta))
        if columns % WIDTH or not same:
            return elementwise.add_norm(hidden, delta, weight, epsilon)
        out, total = torch.empty_like(hidden), hidden if delta is None else torch.empty_like(hidden)
        self.library.swarm_norm(
            ctypes.byref(
                NormArguments(
                    hidden.data_ptr(),
                    pointer(delta),
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
        """See `Kernels.gate`. Torch's for sizes, strides or types that the kernel does not know."""
        count = gates.numel()
        if count % WIDTH or not (gates.is_contiguous() and values.is_contiguous() and gates.dtype == values.dtype):
            return elementwise.gate(gates, values)
        out = torch.empty_like(gates)
        arguments = GateArguments(
            gates.data_ptr(), values.data_ptr(), out.data_ptr(), count, DTYPE_CODES[gates.dtype], torch.get_num_threads()
        )
        self.library.swarm_gate(ctypes.byref(arguments))
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`. Torch's where there are no matrix instructions, or the sizes or types do not fit them."""
        rows, (outputs, inputs) = len(x), weight.shape
        parts = (x, weight) if bias is None else (x, weight, bias)
        matching = x.shape == (rows, inputs) and (bias is None or bias.shape == (outputs,))  # else torch says what is wrong
        fits = matching and rows > 0 and inputs % WIDTH == 0 and outputs % WIDTH == 0
        if not (self._has_linear and fits and all(part.is_contiguous() and part.dtype == torch.bfloat16 for part in parts)):
            return linear.linear(x, weight, bias)
        out = torch.empty(rows, outputs, dtype=torch.bfloat16)
        packed = packed_rows(rows, inputs) if rows <= FEW_ROWS else None
        arguments = LinearArguments(
            Product(weight.data_ptr(), pointer(bias), out.data_ptr(), outputs=outputs),
            x.data_ptr(),
            pointer(packed),
            rows,
            inputs,
            torch.get_num_threads(),
        )
        self.library.swarm_linear(ctypes.byref(arguments))
        return out

    def draw(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See `Kernels.draw`. Torch's for strides, shapes or types that the kernel does not know."""
        rows, columns = logits.shape
        if logits.stride(1) != 1 or uniforms.shape != (rows,) or uniforms.dtype != torch.float64 or logits.dtype not in DTYPE_CODES:
            return sampling.draw(logits, uniforms, temperature)
        ids, logprobs, numbers = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32), uniforms.contiguous()
        arguments = DrawArguments(
            logits.data_ptr(),
            numbers.data_ptr(),
            ids.data_ptr(),
            logprobs.data_ptr(),
            logits.stride(0),
            DTYPE_CODES[logits.dtype],
            rows,
            columns,
            temperature,
            torch.get_num_threads(),
        )
        self.library.swarm_draw(ctypes.byref(arguments))
        if bool(logprobs.isnan().any()):
            raise FloatingPointError(sampling.NOT_FINITE)
        return ids, logprobs

    def stack(self, layers: Sequence[LayerWeights], norm: NormWeight) -> NativeStack | None:
        """See `Kernels.stack`. None where there are no matrix instructions, or `fits` says no."""
        return NativeStack(self.library, layers, norm) if self._has_linear and fits(layers, norm) else None

    def logprob_forward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, top: Tensor, mass: Tensor, chosen: Tensor) -> None:
        """See `Kernels.logprob_forward`."""
        arguments = _logprob_arguments(logits, targets, sharpness)
        arguments.top, arguments.mass, arguments.chosen = top.data_ptr(), mass.data_ptr(), chosen.data_ptr()
        self.library.swarm_logprob_forward(ctypes.byref(arguments))

    def logprob_backward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, lse: Tensor, scale: Tensor, gradient: Tensor) -> None:
        """See `Kernels.logprob_backward`."""
        arguments = _logprob_arguments(logits, targets, sharpness)
        arguments.lse, arguments.scale, arguments.gradient = lse.data_ptr(), scale.data_ptr(), gradient.data_ptr()
        arguments.gradient_stride = gradient.stride(0)
        self.library.swarm_logprob_backward(ctypes.byref(arguments))


def _logprob_arguments(logits: Tensor, targets: Tensor, sharpness: Tensor) -> LogprobArguments:
    a = LogprobArguments()
    a.logits, a.targets, a.sharpness = logits.data_ptr(), targets.data_ptr(), sharpness.data_ptr()
    a.rows, a.columns = logits.shape
    a.row_stride = logits.stride(0)
    a.dtype, a.threads = DTYPE_CODES[logits.dtype], torch.get_num_threads()
    return a
