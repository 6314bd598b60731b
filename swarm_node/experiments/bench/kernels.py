"""Every kernel against the bytes that it has to move, side by side with the floor that memory reads set (`swarm-node bench kernels`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from swarm_kernels.choose import choose_backend
from swarm_kernels.interface import Kernels, NewTokens, PromptAttention
from swarm_kernels.logprob import Head, token_logprobs
from swarm_kernels.measure import PAGE_SIZE, Candidate, Row, StepData, Workload, measure
from torch import Tensor

from swarm_node.experiments.bench.machine import Machine, describe_machine, measure_limits
from swarm_node.experiments.bench.shapes import BenchError, Shape, find_shape

ROWS = 512
"""Tokens of a chunk of prefill, and of a micro-batch of the learner."""


@dataclass(frozen=True)
class KernelTimes:
    """What `bench_kernels` measured."""

    machine: Machine
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """`kernels`: milliseconds, bytes, GB/s and share of the floor, and the seconds of every round."""
        kernels = [
            {
                "name": row.name,
                "ms": row.median * 1e3,
                "bytes": row.size,
                "gb_per_s": row.rate / 1e9,
                "share_of_floor": row.share,
                "seconds": list(row.seconds),
            }
            for row in self.rows
        ]
        return {"machine": asdict(self.machine), "kernels": kernels}


def bench_kernels(
    shape: str, *, batch: int, context: int, budget: int, repeats: int, dtype: torch.dtype, device: torch.device
) -> KernelTimes:
    """Time each kernel over all layers of a decode step, and the learner's log-probs over the vocabulary.

    Raises:
        BenchError: there is no shape of this name, or the context is no whole number of pages.
    """
    sizes = find_shape(shape)
    if context % PAGE_SIZE:
        raise BenchError(
            f"a context of {context} tokens is no whole number of pages of {PAGE_SIZE}: try {-(-context // PAGE_SIZE) * PAGE_SIZE}"
        )
    kernels = choose_backend(device).kernels
    group = sizes.heads // sizes.kv_heads
    workload = Workload(batch, context, sizes.layers, sizes.kv_heads, group, sizes.head_size, budget, dtype, device)
    candidates = _decode_candidates(workload, kernels) + _linear_candidates(sizes, batch, kernels, dtype, device)
    candidates += _elementwise_candidates(sizes, kernels, dtype, device)
    candidates += _logprob_candidates(sizes, kernels, dtype, device)
    rows = measure(candidates, repeats, device)
    return KernelTimes(describe_machine(device, dtype, [measure_limits(device, dtype)]), tuple(rows))


def _decode_candidates(workload: Workload, kernels: Kernels) -> list[Candidate]:
    data = StepData(workload)
    table, last = data.table.long(), workload.length - 1
    pages = data.select(kernels, data.caches[0])
    chunk = torch.arange(min(ROWS, workload.length), device=workload.device)
    step_slots = table[:, last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    chunk_slots = table[0, chunk // PAGE_SIZE] * PAGE_SIZE + chunk % PAGE_SIZE
    listed_bytes = workload.cache_bytes * workload.list_width / workload.pages
    return [
        data.floor(kernels),
        _append("append, a decode step", data, kernels, step_slots),
        _append(f"append, {len(chunk)} tokens of prefill", data, kernels, chunk_slots),
        Candidate(
            f"select, {workload.list_width} of {workload.pages} pages",
            data.every_layer(lambda cache: data.select(kernels, cache)),
            workload.centroid_bytes,
        ),
        Candidate("attend, dense", data.every_layer(lambda cache: data.attend(kernels, cache)), workload.cache_bytes),
        Candidate(
            f"attend, {workload.list_width} of {workload.pages} pages",
            data.every_layer(lambda cache: data.attend(kernels, cache, pages)),
            listed_bytes,
        ),
        _attend_prompt(data, kernels, len(chunk)),
    ]


def _append(name: str, data: StepData, kernels: Kernels, slots: Tensor) -> Candidate:
    """Writing one new token into each slot of all layers, with its query rotated in place."""
    w, tokens = data.workload, len(slots)
    keys, values = (torch.randn(tokens, w.kv_heads, w.head_size).to(w.device, w.dtype) for _ in range(2))
    query = torch.randn(tokens, w.kv_heads * w.group, w.head_size).to(w.device, w.dtype)
    cosines, sines = (torch.full((tokens, w.head_size), 0.5**0.5).to(w.device, w.dtype) for _ in range(2))

    new = NewTokens(keys, values, slots, query, cosines, sines)
    return Candidate(
        name, data.every_layer(lambda cache: kernels.append(cache, new)), 2 * (keys.nbytes + values.nbytes + query.nbytes) * w.layers
    )


def _attend_prompt(data: StepData, kernels: Kernels, tokens: int) -> Candidate:
    """Attention of the last tokens of one sequence, as of one chunk of prefill."""
    w = data.workload
    query = torch.randn(tokens, w.kv_heads * w.group, w.head_size).to(w.device, w.dtype)
    bounds, starts = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([w.length - tokens], dtype=torch.int32)

    attention = PromptAttention(query, data.table[:1], bounds, starts, data.scale)
    run = data.every_layer(lambda cache: kernels.attend_prompts(cache, attention))
    return Candidate(f"attend, {tokens} tokens of prefill", run, w.cache_bytes / w.batch + 2 * query.nbytes * w.layers)


def _linear_candidates(shape: Shape, batch: int, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """One of the widest linear layers of all layers, for a decode step and for a chunk of prefill."""
    weights = [torch.randn(shape.intermediate, shape.hidden).to(device, dtype) for _ in range(shape.layers)]

    def candidate(rows: int) -> Candidate:
        x = torch.randn(rows, shape.hidden).to(device, dtype)
        moved = rows * (shape.hidden + shape.intermediate) * dtype.itemsize * shape.layers

        def multiply() -> None:
            for weight in weights:
                kernels.linear(x, weight)

        return Candidate(f"linear, {rows} tokens", multiply, _bytes(weights) + moved)

    return [candidate(batch), candidate(ROWS)]


def _elementwise_candidates(shape: Shape, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """What lies between the matrix products of all layers, for a chunk of prefill."""
    hidden, delta = ([torch.randn(ROWS, shape.hidden).to(device, dtype) for _ in range(shape.layers)] for _ in range(2))
    gates, values = ([torch.randn(ROWS, shape.intermediate).to(device, dtype) for _ in range(shape.layers)] for _ in range(2))
    weight = torch.ones(shape.hidden, dtype=dtype, device=device)

    def norms() -> None:
        for stream, change in zip(hidden, delta, strict=True):
            kernels.add_norm(stream, change, weight, 1e-6)

    def activations() -> None:
        for left, right in zip(gates, values, strict=True):
            kernels.gate(left, right)

    return [
        Candidate(f"sum and norm, {ROWS} tokens", norms, 2 * (_bytes(hidden) + _bytes(delta))),
        Candidate(f"gate, {ROWS} tokens", activations, 3 * _bytes(gates)),
    ]


def _logprob_candidates(shape: Shape, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """The log-probs of a micro-batch from its hidden states and back, as the learner has them and from whole logits."""
    weight = torch.randn(shape.vocabulary, shape.hidden).to(device, dtype).requires_grad_()
    hidden = torch.randn(ROWS, shape.hidden).to(device, dtype).requires_grad_()
    targets, head = torch.arange(ROWS, device=device) % shape.vocabulary, Head(weight)

    def pieces() -> None:
        torch.autograd.grad(token_logprobs(kernels, head, hidden, targets).sum(), (hidden, weight))

    def whole() -> None:
        logits = head(hidden).float()
        torch.autograd.grad((logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)).sum(), (hidden, weight))

    moved = 3 * weight.nbytes + 2 * hidden.nbytes  # the weight is read by both passes, its gradient written
    return [
        Candidate(f"log-probs of {ROWS} tokens and back", pieces, moved),
        Candidate(f"log-probs of {ROWS} tokens and back, whole logits", whole, moved),
    ]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
