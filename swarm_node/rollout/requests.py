"""What every engine asks of the requests that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_node.rollout.engine import GroupRequest


def check_requests(requests: Sequence[GroupRequest], max_new_tokens: int, context: int | None) -> None:
    """Raise ValueError for an empty prompt, a group of size 0, budgets that are not one positive number a completion, or a
    prompt that leaves no room for `max_new_tokens` in the model's context of so many tokens (None: unlimited)."""
    for index, request in enumerate(requests):
        if len(request.prompt) < 1 or request.size < 1:
            raise ValueError(f"request {index} has {len(request.prompt)} prompt tokens and size {request.size}; both must be at least 1")
        if request.budgets is not None and (len(request.budgets) != request.size or min(request.budgets) < 1):
            raise ValueError(
                f"request {index} has {len(request.budgets)} budgets, the smallest {min(request.budgets, default=0)}, for {request.size} "
                "completions: give each at least one page"
            )
        if context is not None and len(request.prompt) + max_new_tokens > context:
            raise ValueError(
                f"request {index}: {len(request.prompt)} prompt tokens and max_new_tokens {max_new_tokens} exceed the model's context "
                f"of {context} tokens; lower rollout.max_new_tokens"
            )
