"""Counter-based noise: reproducible, in the open unit interval, uniform, and independent along each of its four coordinates."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from swarm_node.rollout.noise import node_seed, streams, uniforms


def numbers(seed: int, keys: list[int], completions: list[int], position: int) -> NDArray[np.float64]:
    return uniforms(streams(seed, np.array(keys, dtype=np.uint64), np.array(completions, dtype=np.uint64)), position)


def test_the_same_coordinates_give_the_same_number_whatever_else_is_asked_for() -> None:
    together = numbers(7, [1, 1, 2, 2**64 - 1], [0, 1, 0, 3], 5)
    assert together[3] == numbers(7, [2**64 - 1], [3], 5)[0]
    assert together[1] == numbers(7, [1], [1], 5)[0]


def test_the_stream_is_the_same_on_every_machine() -> None:
    # The same with Python integers; a change of the hash changes every seeded run.
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    gamma, seed, key, completion, position = 0x9E3779B97F4A7C15, 3, 12345678901234567890, 4, 17
    start = mix((seed + gamma) & mask)
    stream = mix((mix((start + key * gamma) & mask) + (completion + 1) * gamma) & mask)
    bits = mix((stream + (position + 1) * gamma) & mask)
    assert numbers(seed, [key], [completion], position)[0] == ((bits >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**80 + 1])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 < numbers(seed, [0], [0], 0)[0] < 1


def test_the_extreme_bit_patterns_stay_inside_the_open_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr("swarm_node.rollout.noise._mix", lambda value: extremes)
    low, high = uniforms(extremes, 0)
    assert low == 2.0**-53
    assert high == 1 - 2.0**-53 < 1


@pytest.mark.parametrize("along", ["seed", "key", "completion", "position"])
def test_numbers_are_uniform_and_uncorrelated_along_every_coordinate(along: str) -> None:
    count = 20_000
    if along == "seed":
        sample = np.array([numbers(seed, [1], [1], 1)[0] for seed in range(count)])
    elif along == "key":
        sample = numbers(1, list(range(count)), [1] * count, 1)
    elif along == "completion":
        sample = numbers(1, [1] * count, list(range(count)), 1)
    else:
        stream = streams(1, np.array([1], dtype=np.uint64), np.array([1], dtype=np.uint64))
        sample = np.array([uniforms(stream, position)[0] for position in range(count)])
    observed = np.histogram(sample, bins=100, range=(0, 1))[0]
    chi_square = float(((observed - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 148.2, "99 degrees of freedom: exceeded once in a thousand draws"
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(sample[:-lag], sample[lag:])[0, 1]) < 4 / count**0.5
    assert len(np.unique(sample)) == count


def test_neighbouring_groups_and_completions_are_independent_of_each_other() -> None:
    grid = np.stack([numbers(5, [key] * 64, list(range(64)), 3) for key in range(256)])
    off_diagonal = np.asarray(np.corrcoef(grid.T))[~np.eye(64, dtype=bool)]
    assert np.abs(off_diagonal).max() < 5 / 256**0.5


def test_nodes_with_one_seed_draw_different_noise() -> None:
    assert node_seed(0, "ada") != node_seed(0, "ben")
    assert node_seed(0, "ada") != node_seed(1, "ada")
    # SHA-256 of "0 ada", its first eight bytes as a little-endian number without the lowest bit.
    assert node_seed(0, "ada") == int.from_bytes(hashlib.sha256(b"0 ada").digest()[:8], "little") // 2
