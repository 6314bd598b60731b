"""What was measured, and what follows from it: ratios of medians, the floor that memory sets, and what the cost model predicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm_node.experiments.bench.cost_model import ModelShape, Speed, decode_seconds, step_work

RATIOS: Mapping[str, tuple[str, str, str]] = {
    "dense_vs_transformers_b8": ("b8", "dense", "transformers"),
    "dense_vs_transformers_b32": ("b32", "dense", "transformers"),
    "dense_vs_vllm_b8": ("b8", "dense", "vllm"),
    "dense_vs_vllm_b32": ("b32", "dense", "vllm"),
    "sparse_vs_dense_4k_b8": ("4k_b8", "sparse", "dense"),
    "sparse_vs_dense_8k_b8": ("8k_b8", "sparse", "dense"),
    "sparse_vs_dense_8k_b32": ("8k_b32", "sparse", "dense"),
    "sparse_vs_vllm_4k_b8": ("4k_b8", "sparse", "vllm"),
}
"""Name -> case, who, against whom."""


@dataclass(frozen=True)
class Decode:
    """What one engine needed for the decode steps of a case."""

    case: str
    engine: str
    batch: int
    context: float
    """Mean tokens of a sequence during the steps."""
    steps: int
    """Of a round."""
    seconds: tuple[float, ...]
    """Of the steps of each round."""
    budget: float | None = None
    """Mean pages that a sparse step might read besides the reserved three; None: dense."""
    shared: bool = False

    @property
    def step_seconds(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds) / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch, by the median step."""
        return self.batch / self.step_seconds


@dataclass(frozen=True)
class Prefill:
    """What one engine needed for the prompts of a case."""

    case: str
    engine: str
    tokens: int
    """Computed."""
    seconds: tuple[float, ...]
    """Of each round; to the first token, unless the engine reports what its prompts took."""


def times_apart(
    case: str, engine: str, batch: int, prompt: int, tokens: int, first: Sequence[float], whole: Sequence[float]
) -> tuple[Prefill, Decode]:
    """Prefill and decode from runs of one token and of `tokens` tokens: their difference is tokens - 1 decode steps."""
    seconds = tuple(long - short for short, long in zip(first, whole, strict=True))
    decode = Decode(case, engine, batch, prompt + tokens / 2, tokens - 1, seconds)
    return Prefill(case, engine, batch * prompt, tuple(first)), decode


@dataclass(frozen=True)
class Predictor:
    """The cost model on this machine, with what a step takes besides as the short cases show it."""

    shape: ModelShape
    flops: float
    read_bytes_per_second: float
    overheads: Mapping[int, float]
    """Batch size -> seconds of a step besides computing and reading."""

    def floor_seconds(self, decode: Decode) -> float:
        """Of a step: every byte that it has to move, at the speed of memory reads."""
        budget = None if decode.budget is None else round(decode.budget)
        return step_work(self.shape, decode.batch, decode.context, budget).bytes / self.read_bytes_per_second

    def step_seconds(self, decode: Decode) -> float:
        """Predicted seconds of a step of our engine."""
        speed = Speed(self.flops, self.read_bytes_per_second, self.overheads.get(decode.batch, 0.0))
        return decode_seconds(self.shape, speed, decode.batch, decode.context, None if decode.budget is None else round(decode.budget))


def make_predictor(shape: ModelShape, flops: float, read_bytes_per_second: float, decodes: Sequence[Decode]) -> Predictor:
    """With the overhead of each batch size: what our dense step took after short prompts, less what the model predicts for it."""
    bare = Predictor(shape, flops, read_bytes_per_second, {})
    short = [decode for decode in decodes if decode.engine == "dense" and decode.case == f"b{decode.batch}"]
    overheads = {decode.batch: max(0.0, decode.step_seconds - bare.step_seconds(decode)) for decode in short}
    return Predictor(shape, flops, read_bytes_per_second, overheads)


def ratios(decodes: Sequence[Decode], predictor: Predictor, missing: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each of `RATIOS`: measured (how many times faster, by medians), predicted, and why a null is one.

    Args:
        decodes: All that were measured, of any case and engine.
        predictor: Predicts dense and sparse steps of our engine.
        missing: Case, engine, or `case/engine` -> why it was not measured.
    """
    found = {(decode.case, decode.engine): decode for decode in decodes}
    result: dict[str, dict[str, Any]] = {}
    for name, (case, engine, against) in RATIOS.items():
        ours, other = found.get((case, engine)), found.get((case, against))
        entry: dict[str, Any] = {"measured": None, "predicted": None}
        if ours is not None and other is not None:
            entry["measured"] = other.step_seconds / ours.step_seconds
        else:
            entry["reason"] = missing.get(case) or missing.get(engine) or missing.get(against) or "not measured"
        dense = found.get((case, "dense"))
        if engine == "sparse" and ours is not None and other is not None and dense is not None:
            entry["predicted"] = predictor.step_seconds(dense) / predictor.step_seconds(ours)
        elif "reason" not in entry:
            entry["reason"] = "not predicted: both read the same bytes, what they do besides is not in the cost model"
        result[name] = entry
    return result
