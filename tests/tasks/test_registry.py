"""Names of tasks: canonical, bounded, and refused with the choices when unknown."""

from __future__ import annotations

import pytest

from swarm_node.tasks.base import TaskError
from swarm_node.tasks.draws import Draws, hash64
from swarm_node.tasks.registry import load_task


@pytest.mark.parametrize(("spec", "name"), [("chain-sum", "chain-sum:2"), ("chain-sum:4", "chain-sum:4"), ("chain-sum:04", "chain-sum:4")])
def test_a_name_is_canonical_and_loads_itself(spec: str, name: str) -> None:
    task = load_task(spec)
    assert task.name == name
    again = load_task(task.name)
    assert again.name == name
    assert again.problem(3, 4) == task.problem(3, 4)


@pytest.mark.parametrize("spec", ["", "nope", "chain-sum:", "chain-sum:x", "chain-sum:-1", "chain-sum:²", "chain-sum:1:2", "a" * 5000])
def test_a_bad_name_is_a_task_error(spec: str) -> None:
    with pytest.raises(TaskError):
        load_task(spec)


def test_an_unknown_name_is_answered_with_the_choices() -> None:
    with pytest.raises(TaskError, match=r"unknown task 'chainsum': choose chain-sum, "):
        load_task("chainsum")


def test_a_name_that_the_wire_does_not_carry_is_refused_at_the_start() -> None:
    widths = "&".join(f"{side}_{what}={5 if side == 'min' else 6}" for what in ("rows", "cols", "transforms") for side in ("min", "max"))
    weights = "&".join(f"w_{what}=2" for what in ("rotate", "hmirror", "vmirror", "dmirror", "cmirror", "map", "crop"))
    with pytest.raises(TaskError, match=r"travels with every group and is longer than 128 bytes: give fewer options"):
        load_task(f"reasoning-gym:manipulate_matrix?{widths}&{weights}")


def test_draws_are_uniform_independent_of_the_platform_and_tell_their_keys_apart() -> None:
    draws = Draws("a", 1)
    counts = [0] * 10
    for _ in range(20_000):
        counts[draws.below(10)] += 1
    # Standard deviation of each count is 42.
    assert all(abs(count - 2000) < 210 for count in counts)
    assert [Draws("a", "bc").below(1000), Draws("ab", "c").below(1000), Draws("abc").below(1000)] == [12, 663, 464]
    assert hash64("1") != hash64(1)
    assert {Draws("x").between(5, 5)} == {5}
