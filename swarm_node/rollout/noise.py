"""Counter-based noise: one number per (seed, group key, completion, position), whatever else is in the batch."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

# The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", variant 13) and its increment.
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def node_seed(seed: int, peer_id: str) -> int:
    """A node's own seed, in [0, 2^63): nodes that were given one seed must not sample the same completions."""
    return int.from_bytes(hashlib.sha256(f"{seed} {peer_id}".encode()).digest()[:8], "little") >> 1


def streams(seed: int, keys: NDArray[np.uint64], completions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One random stream per completion: a hash (B,) of the seed, the group's key (B,) and the completion's index in the group (B,)."""
    with np.errstate(over="ignore"):
        start = _mix(np.full(len(keys), seed % 2**64, dtype=np.uint64) + _INCREMENT)
        return _mix(_mix(start + keys * _INCREMENT) + (completions + np.uint64(1)) * _INCREMENT)


def uniforms(streams: NDArray[np.uint64], positions: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """The number of each stream (B,) at a token position, one for all or one a stream: uniform in the open interval (0, 1), a multiple of
    2^-53."""
    with np.errstate(over="ignore"):
        counters = np.atleast_1d(np.asarray(positions, dtype=np.int64)).astype(np.uint64) + np.uint64(1)
        bits = _mix(streams + counters * _INCREMENT)
    # 52 bits and a half: neither 0 nor 1 can come out, and every value is exact in float64.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
