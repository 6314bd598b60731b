"""Problems as prompts that a policy can answer: training and evaluation leave out the same ones, and say which and why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from swarm_protocols.limits import DEFAULT_LIMITS

from swarm_node.policy.policy import Policy
from swarm_node.tasks.base import Problem, Split, Task, TaskError


class Prompts:
    """Draws problems of one task for one policy. What cannot be made, or leaves no room for a completion, is left out and counted."""

    def __init__(self, policy: Policy, task: Task, max_new_tokens: int, context: int | None) -> None:
        """`context` is the limit of prompt and completion together, in tokens; None: what the wire carries."""
        self._policy = policy
        self._task = task
        self._max_new_tokens = max_new_tokens
        self._context = context or DEFAULT_LIMITS.tokens_per_completion
        self._drawn = 0
        self.left_out = 0
        self.why = ""
        """Why the first of them was left out."""

    def draw(self, seed: int, index: int, split: Split = "train") -> tuple[Problem, NDArray[np.int32]] | None:
        """The problem at `index` and its prompt's token ids (P,), or None where it is left out."""
        self._drawn += 1
        try:
            problem = self._task.problem(seed, index, split)
            prompt = self._policy.encode_prompt(problem.prompt)
            if 0 < len(prompt) <= self._context - self._max_new_tokens:
                return problem, prompt
            why = (
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {self._max_new_tokens} do not fit the context of {self._context}: "
                "choose another task or model, or fewer new tokens"
            )
        except TaskError as error:  # a data set may fail to make one problem
            why = str(error)
        self.why = self.why or why
        self.left_out += 1
        return None

    def check(self) -> None:
        """Whether anything was left.

        Raises:
            TaskError: every problem was left out.
        """
        if self.left_out == self._drawn:
            raise TaskError(
                f"none of {self._drawn} problems of {self._task.name} can be used with a context of {self._context} tokens: {self.why}"
            )
