"""How many pages the cache of a rollout has: what the step can use, within what the machine can give."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
from swarm_kernels.layout import PageLayout

from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.options import RolloutOptions

FREE_SHARE = 0.4
"""Of the memory that is free when the cache is made, what it may take by itself; the learner needs the rest."""


class CacheTooSmall(ValueError):
    """One completion by itself does not fit into the cache."""


def cache_pages(layout: PageLayout, requests: Sequence[GroupRequest], max_new_tokens: int, options: RolloutOptions) -> int:
    """Pages for a call of `generate`: as many as its completions need if all that may run at once grow to the limit, or as many as the
    memory allows.

    Args:
        layout: Of the cache, with any number of pages.

    Raises:
        CacheTooSmall: the memory does not hold one completion of the longest prompt.
    """
    size = layout.page_size
    # A completion may hold a copy of its prompt's partial last page besides its own pages.
    most = sorted(
        (-(-(len(request.prompt) + max_new_tokens) // size) + 1 for request in requests for _ in range(request.size)), reverse=True
    )
    useful = sum(most[: options.max_batch])
    allowed = int(_bytes(layout, options) // layout.page_bytes)
    if allowed < most[0]:
        need, have = (pages * layout.page_bytes / 2**20 for pages in (most[0], allowed))
        raise CacheTooSmall(
            f"one completion of up to {most[0] * size} tokens needs {need:.3g} MiB of cache and {have:.3g} MiB are allowed: "
            "raise rollout.cache_gib, or lower rollout.max_new_tokens"
        )
    return min(useful, allowed)


def _bytes(layout: PageLayout, options: RolloutOptions) -> float:
    if options.cache_gib is not None:
        return options.cache_gib * 2**30
    device = torch.device(layout.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return FREE_SHARE * free
