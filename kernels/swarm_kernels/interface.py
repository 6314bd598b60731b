"""What every backend offers: the kernels of a decode step, under one signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from swarm_kernels.layout import LayerCache


@dataclass(frozen=True, eq=False)
class NewTokens:
    """N tokens to be written into a layer's cache."""

    keys: Tensor
    """(N, KV heads, head size), not rotated yet."""
    values: Tensor
    slots: Tensor
    """(N,) int64, physical page * page size + offset; -1 writes nothing (a padded row)."""
    query: Tensor | None = None
    """(N, query heads, head size), rotated in place when there are angles."""
    cosines: Tensor | None = None
    """(N, head size), both halves, of the keys' type; None leaves keys and query as they are."""
    sines: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    """Which pages to choose among, for B sequences with one new token each."""

    query: Tensor
    """(B, query heads, head size), rotated."""
    table: Tensor
    """(B, M) int32, the physical page of each page of the sequence."""
    lengths: Tensor
    """(B,) int32, tokens of the sequence, the new one included."""
    budgets: Tensor
    """(B,) int32, pages besides the reserved three (the first and the last two)."""
    width: int
    """K, the pages of a list; at least 3, and it cuts larger budgets."""


@dataclass(frozen=True, eq=False)
class Attention:
    """One new token of each of B sequences, over the cached tokens of chosen pages."""

    query: Tensor
    """(B, query heads, head size); query head i reads KV head i // group."""
    table: Tensor
    """(B, M) int32, the physical page of each page of the sequence."""
    lengths: Tensor
    """(B,) int32, tokens of the sequence, the new one included; its key and value are in the cache already."""
    scale: float
    """Factor of the scores."""
    pages: Tensor | None = None
    """(B, KV heads, K) int32, which pages of the sequence each KV head reads, -1 for none; None reads all (dense attention)."""
    window: int = 0
    """The last `window` tokens alone are visible; 0: all of them."""
    splits: int | None = None
    """As in `DecodeStep`."""


@dataclass(frozen=True, eq=False)
class PromptAttention:
    """N consecutive tokens of several sequences in C chunks, one of a sequence each, over everything up to each token."""

    query: Tensor
    """(N, query heads, head size); query head i reads KV head i // group."""
    table: Tensor
    """(C, M) int32, the physical page of each page of each sequence."""
    bounds: Tensor
    """(C + 1,) int32 on the CPU, ascending from 0 to N: tokens [bounds[c], bounds[c + 1]) belong to chunk c."""
    starts: Tensor
    """(C,) int32 on the CPU, tokens of the sequence before its chunk; the keys and values of both are in the cache already."""
    scale: float
    window: int = 0
    """The last `window` tokens alone are visible to a token; 0: all of them."""


@dataclass(eq=False)
class DecodeStep:
    """What all layers of one decode step share. B sequences, one new token each."""

    table: Tensor
    """(B, M) int32: the physical page of each page of each sequence; entries past a sequence's end are never read."""
    lengths: Tensor
    """(B,) int32: tokens of each sequence, the new one included; 0 marks a padded row."""
    slots: Tensor
    """(B,) int64: where the new token goes, physical page * page size + offset; -1 for a padded row. No other
    sequence may read this page: it is written while others read theirs."""
    scale: float
    """Factor of the attention scores, usually head size ** -0.5."""
    splits: int | None = None
    """Into how many parts a sequence's pages are cut. A number is the deterministic mode: a sequence's result then depends on that sequence
    alone. None lets the backend choose from the batch, which is faster for few sequences."""
    cosines: Tensor | None = None
    """(B, head size), rotary angles of the new tokens, of the cache's type; None: the model has no rotary embedding."""
    sines: Tensor | None = None
    budgets: Tensor | None = None
    """(B,) int32: pages that a sparse layer reads besides the reserved three; None: every layer is dense."""
    list_width: int = 0
    """Pages of the longest list: the largest budget + 3, at most M."""

    def new_tokens(self, query: Tensor, keys: Tensor, values: Tensor) -> NewTokens:
        """What one layer writes."""
        return NewTokens(keys, values, self.slots, query, self.cosines, self.sines)

    def selection(self, query: Tensor) -> Selection | None:
        """What one sparse layer chooses; None: every layer is dense."""
        return None if self.budgets is None else Selection(query, self.table, self.lengths, self.budgets, self.list_width)

    def attention(self, query: Tensor, pages: Tensor | None = None, window: int = 0) -> Attention:
        """What one layer attends to."""
        return Attention(query, self.table, self.lengths, self.scale, pages, window, self.splits)


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to a linear layer, scale * (x A^T) B^T, computed in float32 (LoRA, arXiv 2106.09685)."""

    a: Tensor
    """(rank, inputs)"""
    b: Tensor
    """(outputs, rank)"""
    scale: float


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A linear layer that is nothing else, but for an adapter."""

    weight: Tensor
    """(outputs, inputs)"""
    bias: Tensor | None = None
    """(outputs,)"""
    adapter: LowRank | None = None


@dataclass(frozen=True, eq=False)
class NormWeight:
    """An RMS norm."""

    weight: Tensor
    """(H,)"""
    epsilon: float


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A decoder layer: norm, attention, norm, gated MLP."""

    input_norm: NormWeight
    query: LinearWeight
    key: LinearWeight
    value: LinearWeight
    query_norm: NormWeight | None
    key_norm: NormWeight | None
    output: LinearWeight
    middle_norm: NormWeight
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight
    scale: float
    """Factor of the attention scores."""
    window: int
    """Tokens that a sliding window sees; 0: all."""
    rotary: bool
    """Whether keys and queries are rotated."""
    selects: bool
    """Whether it reads a selection of the pages when the step has budgets."""

    @property
    def linears(self) -> tuple[LinearWeight, ...]:
        """In the order of their use."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down


@dataclass(frozen=True, eq=False)
class PromptStep:
    """What all layers share when consecutive tokens of several sequences are computed. N tokens in C chunks, one of a sequence each."""

    table: Tensor
    """(C, M) int32: the physical page of each page of each sequence."""
    bounds: Tensor
    """(C + 1,) int32 on the CPU, ascending from 0 to N: tokens [bounds[c], bounds[c + 1]) belong to chunk c."""
    starts: Tensor
    """(C,) int32 on the CPU: tokens of the sequence before its chunk, which are in the cache."""
    slots: Tensor
    """(N,) int64: where the tokens go, physical page * page size + offset."""
    cosines: Tensor
    """(N, head size), rotary angles, of the cache's type."""
    sines: Tensor


class Stack(Protocol):
    """All layers of a model and its final norm, over the weights as they lie."""

    def prefill(self, step: PromptStep, caches: Sequence[LayerCache], hidden: Tensor) -> Tensor:
        """N > 0 tokens with dense causal attention: embeddings (N, H), which are overwritten, to hidden states after the final norm (N, H).
        Scales and windows are those of each layer."""

    def decode(self, step: DecodeStep, caches: Sequence[LayerCache], hidden: Tensor) -> Tensor:
        """One token of each of B sequences, B > 0: embeddings (B, H), which are overwritten, to hidden states after the final norm (B, H).
        The scale is that of each layer; the step's is not looked at."""


class Kernels(Protocol):
    """The kernels of one backend. Tensors are contiguous in their last dimension, on one device, and query, keys and values have the type
    of the cache.
    """

    name: str

    def append(self, cache: LayerCache, tokens: NewTokens) -> None:
        """Write new tokens, see `naive/append.py`."""

    def select_pages(self, cache: LayerCache, selection: Selection) -> Tensor:
        """Choose the pages of a sparse step, see `naive/selection.py`."""

    def attend(self, cache: LayerCache, attention: Attention) -> tuple[Tensor, Tensor]:
        """Decode attention, see `naive/attention.py`."""

    def decode_layer(
        self, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, *, sparse: bool, window: int = 0
    ) -> Tensor:
        """One layer of a decode step: append (query rotated in place), select when `sparse`, attend.

        query (B, query heads, head size); keys, values (B, KV heads, head size). Returns (B, query heads, head size).
        """

    def attend_prompts(self, cache: LayerCache, attention: PromptAttention) -> Tensor:
        """Attention of prefill, see `naive/prompt.py`."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Residual sum and RMS norm, see `naive/elementwise.py`."""

    def gate(self, gates: Tensor, values: Tensor) -> Tensor:
        """The middle of a gated MLP, see `naive/elementwise.py`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer, see `naive/linear.py`. A row's result does not depend on the others where it is our own kernel."""

    def draw(self, logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """One token a row and its log-probability, see `naive/sampling.py`."""

    def stack(self, layers: Sequence[LayerWeights], norm: NormWeight) -> Stack | None:
        """All layers at once, with the results of the single kernels; None where this backend has it not, or not for such weights. It is
        good for as long as the weights stay where they are; what is written into them is seen. Adapters are copied."""

    def logprob_forward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, top: Tensor, mass: Tensor, chosen: Tensor) -> None:
        """Fold one piece of the vocabulary into the running maximum, sum and target logit of each row, see `naive/logprob.py`."""

    def logprob_backward(self, logits: Tensor, targets: Tensor, sharpness: Tensor, lse: Tensor, scale: Tensor, gradient: Tensor) -> None:
        """Write the gradient of one piece; `gradient` may be `logits`, see `naive/logprob.py`."""


def compose_layer(
    kernels: Kernels, step: DecodeStep, cache: LayerCache, query: Tensor, keys: Tensor, values: Tensor, sparse: bool, window: int
) -> Tensor:
    """`decode_layer` out of the three kernels, for backends that have nothing faster."""
    kernels.append(cache, step.new_tokens(query, keys, values))
    selection = step.selection(query) if sparse else None
    pages = None if selection is None else kernels.select_pages(cache, selection)
    return kernels.attend(cache, step.attention(query, pages, window))[0]
