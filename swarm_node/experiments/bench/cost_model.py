"""What a decode step costs, and what sparse attention can save: the eFLOPs model (arXiv 2606.08446).

    eFLOPs = FLOPs + I · bytes          I = the machine's FLOP/s over its bytes/s

Divided by FLOP/s this is a time in which computing and reading do not overlap. The weights are read once for the whole batch; everything
else is per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from swarm_node.rollout.sparsity.acceptance import RESERVED


@dataclass(frozen=True)
class ModelShape:
    """What of a model the cost of a decode step depends on."""

    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_size: int
    parameters: int
    """That every token is multiplied with: all but an input embedding that is not tied to the head."""
    weight_bytes: int = 2
    """Bytes of a parameter."""
    cache_bytes: int = 2
    """Bytes of a number in the KV cache."""
    page_size: int = 16
    dense_layers: int = 2
    """First layers, whose attention is dense in a sparse step too."""


@dataclass(frozen=True)
class Speed:
    """Of a machine, measured and not looked up."""

    flops_per_second: float
    bytes_per_second: float
    step_seconds: float = 0.0
    """What a decode step takes besides computing and reading: launches, sampling, the program itself."""

    def __post_init__(self) -> None:
        if not (self.flops_per_second > 0 and self.bytes_per_second > 0 and self.step_seconds >= 0):
            raise ValueError(f"{self}: speeds must be positive and step_seconds at least 0; measure them with `swarm-node bench`")

    @property
    def intensity(self) -> float:
        """I, in FLOP per byte."""
        return self.flops_per_second / self.bytes_per_second


@dataclass(frozen=True)
class Work:
    """What one decode step of a batch computes and reads."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)

    def eflops(self, intensity: float) -> float:
        """FLOPs + I · bytes."""
        return self.flops + intensity * self.bytes

    def seconds(self, speed: Speed) -> float:
        """eFLOPs / (FLOP/s), and the step's overhead."""
        return self.eflops(speed.intensity) / speed.flops_per_second + speed.step_seconds


def shape_of(config: PretrainedConfig, parameters: int, *, weight_bytes: int = 2, cache_bytes: int = 2) -> ModelShape:
    """The shape of a model from its transformers configuration; `parameters` is the count of all its parameters.

    An input embedding of its own is subtracted, because a token reads one row of it. Adapters and biases are neglected.
    """
    text = config.get_text_config()
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    embedding = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    return ModelShape(
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_size=head_size,
        parameters=parameters - embedding,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
    )


def step_work(shape: ModelShape, batch: int, context: float, budget: int | None = None) -> Work:
    """Work of one decode step: one new token for each of `batch` sequences of `context` tokens, none of whose pages are shared.

    budget: pages that the sparse layers read besides the reserved three; None: dense attention. A context of no more pages is dense.
    """
    pages = context / shape.page_size
    weights = Work(2.0 * shape.parameters * batch, float(shape.parameters * shape.weight_bytes))
    if budget is None or pages <= budget + RESERVED:
        return weights + _attention(shape, context) * (shape.layers * batch)
    dense = min(shape.dense_layers, shape.layers)
    scoring = Work(2.0 * shape.kv_heads * shape.head_size * pages, pages * shape.kv_heads * shape.head_size * shape.cache_bytes)
    sparse = _attention(shape, float((budget + RESERVED) * shape.page_size)) + scoring
    return weights + (_attention(shape, context) * dense + sparse * (shape.layers - dense)) * batch


def decode_seconds(shape: ModelShape, speed: Speed, batch: int, context: float, budget: int | None = None) -> float:
    """Seconds of that step on a machine."""
    return step_work(shape, batch, context, budget).seconds(speed)


def _attention(shape: ModelShape, tokens: float) -> Work:
    """One layer and sequence attending to so many tokens: 4 · n_H · d · c FLOPs (scores and values), 2 · c · n_KV · d numbers read."""
    flops = 4.0 * shape.heads * shape.head_size * tokens
    return Work(flops, 2.0 * tokens * shape.kv_heads * shape.head_size * shape.cache_bytes)
