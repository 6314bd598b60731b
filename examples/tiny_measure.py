"""Accuracy, lengths and straggler rates of the tiny models, as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from swarm_node.tasks.base import Problem, Split, Task
from swarm_node.tasks.registry import load_task

LIMIT = 192
GROUP = 16
GROUPS = 128
ROWS: tuple[tuple[str, Split], ...] = (("chain-sum", "eval"), ("chain-sum", "ood"), ("chain-sum:1", "eval"), ("word-sum", "eval"))


def measure(folders: Sequence[Path], problems: int, seed: int) -> str:
    """Two tables: accuracy by task and split, then lengths and straggler rates of groups on the default task."""
    accuracy = ["| model | task | split | sampling at T=1 | greedy |", "| --- | --- | --- | --- | --- |"]
    lengths = [
        "| model | length median | p95 | max | at the limit | max/median > 2: G=4 | G=8 | G=16 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for folder in folders:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(seed)
        for name, split in ROWS:
            task = load_task(name)
            asked = [task.problem(seed, index, split) for index in range(problems)]
            sampled, greedy = (_accuracy(task, tokenizer, asked, complete(model, tokenizer, asked, greedy)) for greedy in (False, True))
            accuracy.append(f"| {folder.name} | {task.name} | {split} | {sampled} | {greedy} |")
        task = load_task("chain-sum")
        asked = [task.problem(seed, index, "eval") for index in range(GROUPS) for _ in range(GROUP)]
        sizes = [len(tokens) for tokens in complete(model, tokenizer, asked, greedy=False)]
        rates = " | ".join(f"{_straggler_rate(sizes, size):.2f}" for size in (4, 8, 16))
        ordered = sorted(sizes)
        capped = sum(size == LIMIT for size in sizes) / len(sizes)
        lengths.append(
            f"| {folder.name} | {median(sizes):g} | {ordered[int(0.95 * len(sizes))]} | {ordered[-1]} | {capped:.1%} | {rates} |"
        )
    return "\n".join([*accuracy, "", *lengths])


@torch.no_grad()
def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Problem], greedy: bool) -> list[list[int]]:
    """One completion a problem, as token ids with the stop token."""
    tokenizer.padding_side = "left"
    done: list[list[int]] = []
    for start in range(0, len(asked), 512):
        inputs = tokenizer(
            [problem.prompt for problem in asked[start : start + 512]], return_tensors="pt", padding=True, return_token_type_ids=False
        )
        outputs = model.generate(**inputs, max_new_tokens=LIMIT, **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}))
        for row in outputs[:, inputs.input_ids.shape[1] :].tolist():
            stop = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            done.append(row[:stop])
    return done


def _accuracy(task: Task, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Problem], completions: Sequence[list[int]]) -> str:
    texts = (str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in completions)
    share = sum(task.reward(problem, text).correct for problem, text in zip(asked, texts, strict=True)) / len(asked)
    return f"{share:.3f} ± {(share * (1 - share) / len(asked)) ** 0.5:.3f}"


def _straggler_rate(sizes: Sequence[int], group: int) -> float:
    groups = [sizes[start : start + group] for start in range(0, len(sizes), group)]
    return sum(max(members) > 2 * median(members) for members in groups) / len(groups)
