"""Decode steps recorded once and replayed: on a GPU a step of a small model is shorter than the calls that launch it.

A recording reads fixed tensors of fixed shapes, so steps are padded to buckets: of sequences, of pages a sequence, and of pages a list.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

MAX_RECORDINGS = 64
"""Far more than a run's buckets; a bound on the memory of all of them."""
TOLERANCE = 0.05
"""Between a row of a replayed step and of the computed one, relative to its norm: both run the same kernels."""


class StepInputs(NamedTuple):
    """What a decode step reads besides weights and cache, on the policy's device. B sequences, one new token each."""

    tokens: Tensor
    """(B,) int64 ids."""
    positions: Tensor
    """(B,) int64, of these tokens in their sequences."""
    table: Tensor
    """(B, M) int32 physical pages."""
    lengths: Tensor
    """(B,) int32, the new token included; 0: a padded row."""
    slots: Tensor
    """(B,) int64, where the new token goes; -1: a padded row."""
    budgets: Tensor
    """(B,) int32, pages that a sparse layer reads besides the reserved three."""


class Bucket(NamedTuple):
    """The shape of a recording."""

    rows: int
    pages: int
    list_width: int
    """0: every layer is dense."""
    adapted: bool
    """Whether the rollout adapter takes part."""


Compute = Callable[[StepInputs, int], Tensor]
"""A decode step from its inputs and the width of its lists to hidden states (B, H)."""


class Recorder(Protocol):
    """Records what a function does on the device."""

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """What does it again, and the tensor that it writes its result to. Raises RuntimeError when it cannot be recorded."""


class CudaRecorder:
    """CUDA (or HIP) graphs over one pool of memory: a result holds until the next replay, of whichever graph."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.MemPool()  # outlives its graphs: one that was given up with the last of them cannot be recorded into

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """See `Recorder`. Recorded on a stream of its own; other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        # A recording that fails would leave its stream the current one; the stream around it brings back the one before.
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=cast(Any, self._pool.id), stream=self._stream, capture_error_mode="thread_local"),
        ):
            out = function()
        return graph.replay, out


@dataclass(frozen=True, eq=False)
class _Recording:
    inputs: StepInputs
    replay: Callable[[], Any]
    out: Tensor

    def run(self, inputs: StepInputs) -> Tensor:
        _fill(self.inputs, inputs)
        self.replay()
        return self.out[: len(inputs.tokens)]


class StepGraphs:
    """The recordings of one model over one cache. A recording knows the addresses of weights and cache and nothing else of them: values may
    change; tensors may not be moved, nor modules do something else."""

    def __init__(self, record: Recorder) -> None:
        self._record: Recorder | None = record
        self._recordings: dict[Bucket, _Recording] = {}
        self._recorded: object = None
        self._cache: Callable[[], object | None] = lambda: None

    def __len__(self) -> int:
        """How many steps are recorded."""
        return len(self._recordings)

    def prepare(self, recorded: object) -> None:
        """Forget everything unless `recorded`, what the recordings rely on, equals that of the last call."""
        if recorded != self._recorded:
            self._recordings.clear()
            self._recorded = recorded

    def decode(self, compute: Compute, inputs: StepInputs, list_width: int, *, cache: object, adapted: bool) -> Tensor:
        """The result of `compute(inputs, list_width)`, (B, H), which holds until the next call.

        A bucket's first step is computed; a step without sequences is recorded, and replayed with the first step's inputs. Where recording
        fails or the results differ, one warning says so, and every later step is computed.
        """
        if self._record is None:
            return compute(inputs, list_width)
        if self._cache() is not cache:
            self._recordings.clear()
            self._cache = weakref.ref(cache)
        rows, pages = inputs.table.shape
        bucket = Bucket(*bucket_of(rows, pages, list_width), adapted)
        recording = self._recordings.get(bucket)
        if recording is not None:
            return recording.run(inputs)
        if len(self._recordings) == MAX_RECORDINGS:
            self._recordings.clear()
        return self._first(compute, inputs, bucket)

    def _first(self, compute: Compute, inputs: StepInputs, bucket: Bucket) -> Tensor:
        assert self._record is not None
        padded = _empty(inputs, bucket)
        _fill(padded, inputs)
        # Also compiles and allocates what the first call of a shape does, which a recording must not contain. That a step is run several
        # times does no harm: it writes the same keys and values to the same slots.
        expected = compute(padded, bucket.list_width)[: len(inputs.tokens)].clone()
        try:
            _fill(padded, StepInputs(*(part[:0] for part in inputs)))
            recording = _Recording(padded, *self._record(lambda: compute(padded, bucket.list_width)))
            recording.out.fill_(torch.nan)  # what a replay leaves alone is seen
            difference = _distance(recording.run(inputs), expected)
            if not difference <= TOLERANCE:
                raise RuntimeError(f"a replayed step is off by {difference:.3g} of its norm, more than {TOLERANCE}")
        except RuntimeError as error:
            self._record = None
            self._recordings.clear()
            warnings.warn(
                f"decode steps are launched kernel by kernel, because recording one failed: {error}", RuntimeWarning, stacklevel=2
            )
            return expected
        self._recordings[bucket] = recording
        return recording.out[: len(inputs.tokens)]


def bucket_of(rows: int, pages: int, list_width: int) -> tuple[int, int, int]:
    """The smallest bucket that holds a step: 1, 2, 4 or a multiple of 8 sequences; 16, 32, 64, ... pages; lists of a multiple of 16 pages,
    because attention goes through a list to its end."""
    return (rows if rows < 3 else 4 if rows < 5 else _multiple(rows, 8), max(16, 1 << (pages - 1).bit_length()), _multiple(list_width, 16))


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _empty(like: StepInputs, bucket: Bucket) -> StepInputs:
    rows = {name: part.new_empty(bucket.rows) for name, part in like._asdict().items() if name != "table"}
    return StepInputs(table=like.table.new_empty(bucket.rows, bucket.pages), **rows)


def _fill(padded: StepInputs, inputs: StepInputs) -> None:
    """Write a step's inputs into larger tensors; the rows that are left over belong to no sequence, so that nothing of them is read in the
    table, as nothing past a sequence's end is."""
    rows, pages = inputs.table.shape
    padded.table[:rows, :pages].copy_(inputs.table)
    for name in ("tokens", "positions", "lengths", "slots", "budgets"):
        part = getattr(padded, name)
        part[:rows].copy_(getattr(inputs, name))
        part[rows:].fill_(-1 if name == "slots" else 0)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The largest of all rows; a row that is not finite in both is equal: the sampler says what is wrong with it."""
    actual, expected = actual.float(), expected.float()
    distances = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
    broken = ~(actual.isfinite().all(dim=1) | expected.isfinite().all(dim=1))
    return float(torch.where(broken, 0.0, distances).max())
