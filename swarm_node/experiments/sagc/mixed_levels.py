"""`chain-sum` with several levels in one stream: a task on which the length of an answer depends on what is known of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarm_node.tasks.base import Problem, Reward, Split, Task
from swarm_node.tasks.chain_sum import ChainSum
from swarm_node.tasks.draws import hash64


class MixedLevels(Task):
    """Sums whose level is drawn per index, all levels equally often; prompts, answers and splits are those of the levels."""

    def __init__(self, levels: Sequence[int]) -> None:
        self.levels = tuple(levels)
        self.name = f"chain-sum-mix:{'-'.join(map(str, levels))}"
        self._tasks = [ChainSum(level) for level in self.levels]

    def problem(self, seed: int, index: int, split: Split = "train") -> Problem:
        """The problem of the level drawn for this seed and index, under this task's name."""
        chosen = self._tasks[hash64(self.name, seed, index) % len(self._tasks)]
        return replace(chosen.problem(seed, index, split), task=self.name)

    def reward(self, problem: Problem, completion: str) -> Reward:
        """As `ChainSum.reward`, which is the same for all levels."""
        return self._tasks[0].reward(problem, completion)
