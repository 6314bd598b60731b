"""Raise the tiny models from a seed, and measure them.

    python examples/raise_tiny_models.py                      # make all three, into swarm_node/policy/tiny
    python examples/raise_tiny_models.py tiny-s --out FOLDER  # make one, elsewhere
    python examples/raise_tiny_models.py --measure            # sample the models and print the table of docs/models.md

Supervised training on the mixture of `tiny_corpus.py`, a few hundred steps a model: minutes on two cores. The same seed, thread count,
machine and torch give the same weights; elsewhere they differ by rounding. A model whose folder is complete is not made again
(`--again` does).
"""

from __future__ import annotations

import argparse
import shutil
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tiny_corpus import SUMS, WORDS, Mix, draw
from tiny_measure import measure
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm_node.tasks.draws import Draws

HOME = Path(__file__).resolve().parent.parent / "swarm_node" / "policy" / "tiny"
PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation
CONTEXT = 2048


class Recipe(NamedTuple):
    """Shape of a model, and how it is raised."""

    hidden: int
    inner: int
    head: int
    mix: Mix
    steps: int


RECIPES = {
    "tiny-s": Recipe(hidden=128, inner=320, head=32, mix=SUMS, steps=500),
    "tiny-m": Recipe(hidden=256, inner=576, head=64, mix=SUMS, steps=450),
    "tiny-m-words": Recipe(hidden=256, inner=576, head=64, mix=WORDS, steps=500),
}
BATCH, MICRO = 128, 4
MATRIX_RATE, OTHER_RATE = 5e-3, 3e-3


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id a character: printable ASCII and the newline, losslessly; anything else is `<unk>`."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """A fresh float32 model with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.head,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def batches(mix: Mix, seed: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Endless batches of BATCH samples, each as MICRO (inputs, targets) of int64 (BATCH / MICRO, T); targets are -100 outside completions.

    Rows of like length meet in a micro-batch, to save padding. Every step sees all lengths: steps of one length each would teach the model
    wrong odds of its styles, because the optimisers do not average gradients linearly.
    """
    draws = Draws("corpus", seed)
    ids = {character: index for index, character in enumerate(CHARACTERS, len(SPECIAL))}
    while True:
        rows = []
        for _ in range(BATCH):
            prompt, completion = draw(mix, draws)
            rows.append((len(prompt), [*(ids[character] for character in prompt + completion), EOS]))
        rows.sort(key=lambda row: len(row[1]))
        size = BATCH // MICRO
        yield [_pad(rows[start : start + size]) for start in range(0, BATCH, size)]


def _pad(rows: list[tuple[int, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for _, row in rows)
    inputs = torch.full((len(rows), width), PAD)
    targets = torch.full((len(rows), width), -100)
    for line, (prompt, row) in enumerate(rows):
        inputs[line, : len(row)] = torch.tensor(row)
        targets[line, prompt - 1 : len(row) - 1] = torch.tensor(row[prompt:])
    return inputs, targets


def raise_model(name: str, seed: int) -> LlamaForCausalLM:
    """Train one model; Muon for the matrices (a third of AdamW's steps here), AdamW for the rest, linear decay over the second half."""
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    model = build_model(recipe)
    matrices = [weight for key, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in key]
    others = [weight for key, weight in model.named_parameters() if weight.ndim != 2 or "embed" in key]
    optimisers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1, (step + 1) / 30, max(0.02, 2 * (1 - step / recipe.steps))))
        for optimiser in optimisers
    ]
    started = time.monotonic()
    for step, batch in zip(range(1, recipe.steps + 1), batches(recipe.mix, seed), strict=False):
        tokens = sum(int((targets != -100).sum()) for _, targets in batch)
        total = 0.0
        for inputs, targets in batch:
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            counted = targets != -100
            loss = cross_entropy(model.lm_head(hidden[counted]), targets[counted], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        model.zero_grad()
        if step % 50 == 0 or step == recipe.steps:
            print(f"{name} step {step}/{recipe.steps} loss {total:.3f} nats/token {time.monotonic() - started:.0f} s", flush=True)
    model.eval()
    return model


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights rounded to bfloat16, tokenizer and stop id, in one rename: a folder that exists is complete."""
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    model.bfloat16().save_pretrained(draft)
    build_tokenizer().save_pretrained(draft)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def main() -> None:
    """Make, or with --measure measure, the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"which of {', '.join(RECIPES)}; all when none is named")
    parser.add_argument("--out", type=Path, default=HOME, help="folder to put them in (default: the package)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="make models that exist already once more")
    parser.add_argument("--measure", action="store_true", help="measure the models instead of making them")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems to measure with")
    options = parser.parse_args()
    unknown = set(options.names) - set(RECIPES)
    if unknown:
        parser.error(f"unknown model {', '.join(sorted(unknown))}: choose from {', '.join(RECIPES)}")
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    folders = [options.out / name for name in options.names or RECIPES]
    if options.measure:
        print(measure(folders, options.problems, options.seed))
        return
    for folder in folders:
        if folder.exists() and not options.again:
            print(f"{folder.name} exists: --again makes it once more")
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        save(raise_model(folder.name, options.seed), folder)


if __name__ == "__main__":
    main()
