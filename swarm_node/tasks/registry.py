"""From a task's name to the task: `chain-sum`, `chain-sum:3`, `word-sum`, `gsm8k:FOLDER`, `reasoning-gym:NAME`."""

from __future__ import annotations

from collections.abc import Callable

from swarm_protocols.limits import DEFAULT_LIMITS

from swarm_node.tasks.base import Task, TaskError
from swarm_node.tasks.chain_sum import ChainSum
from swarm_node.tasks.gsm8k import load_gsm8k
from swarm_node.tasks.gym import load_gym
from swarm_node.tasks.word_sum import WordSum


def load_task(spec: str) -> Task:
    """The task that `spec` names. Its `name` is canonical: equal tasks have equal names, on every machine.

    Raises:
        TaskError: no such task, level or data set, its data cannot be read, or its name is longer than the wire carries.
    """
    kind, colon, argument = spec.partition(":")
    if kind not in _KINDS or (colon and not argument):
        raise TaskError(f"unknown task {spec!r}: choose {', '.join(_FORMS)}")
    task = _KINDS[kind](argument)
    if len(task.name) > DEFAULT_LIMITS.text_bytes:
        raise TaskError(f"{task.name} travels with every group and is longer than {DEFAULT_LIMITS.text_bytes} bytes: give fewer options")
    return task


def _levelled(kind: type[ChainSum]) -> Callable[[str], Task]:
    def load(argument: str) -> Task:
        if not argument:
            return kind()
        if not (argument.isascii() and argument.isdigit() and len(argument) <= 2):
            raise TaskError(f"{kind.kind}:{argument} is not a level: write a number, for example {kind().name}")
        return kind(int(argument))

    return load


_KINDS: dict[str, Callable[[str], Task]] = {
    "chain-sum": _levelled(ChainSum),
    "word-sum": _levelled(WordSum),
    "gsm8k": load_gsm8k,
    "reasoning-gym": load_gym,
}
_FORMS = ("chain-sum", "chain-sum:LEVEL", "word-sum", "word-sum:LEVEL", "gsm8k", "gsm8k:PATH", "reasoning-gym:NAME")
