"""What `swarm-node bench rollout` times: the cases, cut down to what the model and the memory allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_node.experiments.bench.shapes import BenchError

PAGE = 16
_FULL_CONTEXT = 8192
_QUICK_SHARE = 8
_LEAST_PROMPT = 16


@dataclass(frozen=True)
class ShortCase:
    """Decode after short prompts: ours against transformers and vLLM, each from nothing."""

    batch: int
    prompt: int = 64
    tokens: int = 64

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"b{self.batch}"


@dataclass(frozen=True)
class LongCase:
    """Decode over long contexts: our dense and sparse steps in turn over one batch, and who else is asked to."""

    key: str
    batch: int
    context: int
    """Tokens of a sequence at the end."""
    steps: int
    """Of a block."""
    rounds: int
    shared: bool = False
    """Whether the sequences are one group over one prompt, whose pages they share; else each has a prompt and pages of its own."""
    rivals: bool = False
    """Whether transformers and vLLM take part."""

    @property
    def tokens(self) -> int:
        """That each completion has: all blocks of two modes and a round to warm up, and the steps while the batch fills."""
        return 2 * self.steps * (self.rounds + 1) + self.batch + 1

    @property
    def prompt(self) -> int:
        """Tokens of the prompt: what the completion leaves of the context."""
        return self.context - self.tokens


@dataclass(frozen=True)
class Plan:
    """All cases of one call."""

    rounds: int
    short: tuple[ShortCase, ...]
    shared_prompt: int
    """Tokens of the prompt that a group shares."""
    shared_group: int
    long: tuple[LongCase, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """Key and reason of long cases that cannot be run."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a rival is given."""
        rivals = [case.context for case in self.long if case.rivals]
        return max([case.prompt + case.tokens for case in self.short] + rivals)

    def rival_tokens(self) -> int:
        """Tokens that a rival's cache holds at once at most."""
        long = [case.batch * case.context for case in self.long if case.rivals]
        return max([case.batch * (case.prompt + case.tokens) for case in self.short] + long)


def make_plan(limit: int | None, *, rounds: int, quick: bool, accelerator: bool) -> Plan:
    """The cases for a model whose positions end at `limit`; contexts shrink with it, keys keep their names. `quick` takes an eighth of all
    contexts and a quarter of all tokens.

    Raises:
        BenchError: the model's context is too short for any case.
    """
    whole = min(limit or _FULL_CONTEXT, _FULL_CONTEXT)
    longest = min(whole, _FULL_CONTEXT // _QUICK_SHARE) if quick else whole
    rounds, steps, tokens = (min(rounds, 2), 4, 16) if quick else (rounds, 16, 64)
    short = tuple(ShortCase(batch, prompt=min(64, whole // 4), tokens=min(tokens, whole // 4)) for batch in (8, 32))
    half, full = _whole_pages(longest // 2), _whole_pages(longest)
    long = [
        LongCase("4k_b8", 8, half, steps, rounds, rivals=True),
        LongCase("8k_b8", 8, full, steps, rounds),
        LongCase("8k_b32", 32, full, steps, rounds),
        LongCase("4k_b8_shared", 8, half, steps, rounds, shared=True),
    ]
    if accelerator and not quick and (limit or 0) >= 2 * _FULL_CONTEXT:
        long.append(LongCase("16k_b8", 8, 2 * _FULL_CONTEXT, steps, rounds))
    shared_prompt = _whole_pages(longest // 4)
    fitting = tuple(case for case in long if case.prompt >= _LEAST_PROMPT)
    if not fitting:
        least = min(case.tokens for case in long) + _LEAST_PROMPT
        raise BenchError(
            f"the model's context of {limit} tokens is too short: half of it must hold {least}. Choose another model or fewer --repeats"
        )
    too_short = tuple(
        (case.key, f"a context of {case.context} tokens leaves no room for {case.tokens} new ones") for case in long if case not in fitting
    )
    return Plan(rounds, short, shared_prompt, 8, fitting, too_short)


def fit_memory(plan: Plan, token_bytes: int, free: float) -> Plan:
    """Leave out the long cases whose cache would take more than 70 % of the free bytes."""
    kept, left = [], list(plan.left_out)
    for case in plan.long:
        sequences = 1 if case.shared else case.batch
        need = sequences * case.context * token_bytes + case.batch * case.tokens * token_bytes
        if need <= 0.7 * free:
            kept.append(case)
        else:
            left.append((case.key, f"its cache of {need / 2**30:.1f} GiB does not fit into {free / 2**30:.1f} GiB of free memory"))
    return replace(plan, long=tuple(kept), left_out=tuple(left))


def _whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE
