"""Find a model's schedule: the sparse policy generates, the dense one rescores, and per bin the smallest budget that holds is taken.

One prompt is prefilled once for all budgets. Only tokens whose attention was sparse count: one that read everything says nothing of a
budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from swarm_node.options import Options
from swarm_node.policy.policy import Policy
from swarm_node.rollout.calibration.log import CalibrationLog, Place, Sample
from swarm_node.rollout.calibration.prompts import Part, Prompts
from swarm_node.rollout.engine import GroupRequest
from swarm_node.rollout.paged.engine import SparseEngine
from swarm_node.rollout.sparsity.acceptance import RESERVED, Acceptance, fifth_percentile, is_sparse, rescore, summarise
from swarm_node.rollout.sparsity.schedule import BIN_TOKENS, DENSE, MAX_BINS, PAGE_SIZE, Schedule

RESAMPLES = 200
"""Bootstrap draws of whole prompts, whose tokens are not independent."""


class CalibrationError(ValueError):
    """Nothing can be calibrated as asked. The message says what to do."""


class CalibrationOptions(Options):
    """What to measure."""

    budgets: tuple[Annotated[int, Field(ge=1, lt=DENSE)], ...] = Field((29, 45, 61, 93, 125, 189, 253), min_length=1)
    """Pages to try, besides the reserved three."""
    context: int = Field(8000, ge=64)
    """Positions to calibrate, at most the model's own."""
    prompts: int = Field(8, ge=1)
    """Prompts a bin to choose budgets on."""
    held_out: int = Field(4, ge=1)
    """Prompts a bin, not among those, to verify the schedule on; each gets four completions."""
    completions: int = Field(2, ge=1)
    """Completions a prompt and budget."""
    new_tokens: int = Field(128, ge=2)
    """Tokens of a completion at most."""
    threshold: float = Field(0.86, gt=0, lt=1)
    """What the 5th percentile must hold."""
    margin: float = Field(1.0, ge=0)
    """By how many of its standard errors it must exceed that on the prompts of the search, because it is estimated from few of them."""
    temperature: float = Field(1.0, ge=0.05, le=4)
    """Sampling temperature."""
    seed: int = Field(0, ge=0)
    """Of prompts and noise."""


HELD_OUT_COMPLETIONS = 4


@dataclass(frozen=True)
class Cell:
    """What was measured in one bin with one budget."""

    bin: int
    budget: int
    acceptance: Acceptance
    error: float
    """Standard error of the 5th percentile, by a bootstrap over prompts; NaN of a single one."""


@dataclass(frozen=True)
class Calibration:
    """What came out."""

    schedule: Schedule
    cells: tuple[Cell, ...]
    """Of the search, by bin and budget; a budget that covers a whole bin is missing there."""
    held_out: tuple[Cell, ...]
    """Under the schedule, on prompts that the search did not see: each sparse bin holds the threshold; a dense one has no tokens."""


Progress = Callable[[Place, int, int], None]
"""Called after each prompt with what was done, how many are done, and how many there are."""


def calibrate(
    policy: Policy,
    engine: SparseEngine,
    prompts: Prompts,
    options: CalibrationOptions,
    *,
    log: Path | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Measure every bin and budget, choose, and verify. Deterministic but for the rounding of the machine.

    A bin that misses the threshold on the held-out prompts gets the next larger budget and is measured again, until it holds or is dense:
    the held-out prompts can make a schedule more careful and never less.

    Args:
        policy: The model to calibrate, which rescores densely.
        engine: Over the same policy; its schedule is changed.
        prompts: Where prompts of any length are cut from; those of a bin's search and of its verification differ.
        options: Bins, budgets, sizes and the threshold.
        log: A file of finished prompts: those of an interrupted run with the same options are not done again.
        progress: Called after each prompt.

    Raises:
        CalibrationError: nothing would be sparse, or a context that the model does not have.
        PromptError: the prompts' text is too short.
    """
    places = plan(options, policy.context)
    identity = {"model": policy.fingerprint, "prompts": prompts.name}
    identity |= options.model_dump(mode="json", exclude={"prompts", "held_out", "threshold", "margin"})
    done = CalibrationLog(log, identity)
    total = len(places) + len({place.bin for place in places}) * options.held_out
    for number, place in enumerate(places, start=1):
        if done.get(place, None) is None:
            budgets = budgets_of(place.bin, options.budgets, options.context) * options.completions
            done.put(place, None, _measure(policy, engine, prompts, options, place, budgets))
        if progress:
            progress(place, number, total)
    cells = tuple(_cells(places, done, None))
    schedule = choose(cells, options, policy.name)

    checks, chosen = plan(options, policy.context, "held-out"), schedule
    while True:
        engine.schedule = schedule
        for number, place in enumerate(checks, start=len(places) + 1):
            missing = done.get(place, schedule) is None
            if missing:
                done.put(place, schedule, _measure(policy, engine, prompts, options, place, None))
            if progress and (missing or schedule is chosen):
                progress(place, number, total)
        held_out = tuple(_cells(checks, done, schedule))
        careful = raised(schedule, held_out, options)
        if careful == schedule:
            return Calibration(schedule, cells, held_out)
        schedule = careful


def plan(options: CalibrationOptions, model_context: int | None, part: Part = "search") -> list[Place]:
    """The prompts of all bins, their lengths spread evenly over the positions at which some budget is sparse.

    Raises:
        CalibrationError: a context beyond the model's, or one within the smallest budget.
    """
    if model_context is not None and options.context > model_context:
        raise CalibrationError(f"a context of {options.context} tokens is more than the model's {model_context}: lower --context")
    smallest = (min(options.budgets) + RESERVED) * PAGE_SIZE
    if smallest + options.new_tokens >= options.context:
        raise CalibrationError(
            f"with --budgets {min(options.budgets)} a sequence is dense up to {smallest} tokens, and completions of {options.new_tokens} "
            f"leave nothing to measure in a context of {options.context}: give smaller budgets or a larger --context"
        )
    places = []
    for index in range(options.prompts if part == "search" else options.held_out):
        for bin in range(-(-options.context // BIN_TOKENS)):
            low, high = max(bin * BIN_TOKENS, smallest), min((bin + 1) * BIN_TOKENS, options.context) - options.new_tokens
            if high < low or not budgets_of(bin, options.budgets, options.context):
                continue  # a last bin too short for a completion takes what the one before it takes; one that no budget thins is dense
            # Multiples of the golden ratio spread any number of prompts evenly, and the first ones stay where they are when more follow.
            spread = (index + 0.5) * 0.6180339887498949 % 1.0
            places.append(Place(bin, part, index * MAX_BINS + bin, int(low + spread * (high - low))))
    return places


def parse_budgets(text: str) -> tuple[int, ...]:
    """Budgets separated by commas, ascending, each once. Raises CalibrationError."""
    try:
        budgets = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        budgets = (0,)
    if not 1 <= budgets[0] <= budgets[-1] < DENSE:
        raise CalibrationError(f"--budgets {text!r} is not a list of page counts from 1 to {DENSE - 1}: write them like 29,61,93")
    return budgets


def budgets_of(bin: int, budgets: Sequence[int], context: int) -> tuple[int, ...]:
    """Those of the budgets that leave something unread at the end of a bin, ascending."""
    end = min((bin + 1) * BIN_TOKENS, context)
    return tuple(budget for budget in sorted(set(budgets)) if (budget + RESERVED) * PAGE_SIZE < end)


def choose(cells: Sequence[Cell], options: CalibrationOptions, model: str) -> Schedule:
    """Per bin the smallest budget that holds the threshold, as all larger ones do; dense where none does.

    It must hold it with the margin if one of them does. A bin that was not measured takes the budget of the one before.
    """
    pages: list[int] = []
    for bin in range(-(-options.context // BIN_TOKENS)):
        here = sorted((cell for cell in cells if cell.bin == bin and cell.acceptance.count), key=lambda cell: -cell.budget)
        holding = list(takewhile(lambda cell: cell.acceptance.p5 >= options.threshold, here))
        sure = [cell for cell in holding if cell.acceptance.p5 >= options.threshold + options.margin * _known(cell.error)]
        if sure:
            pages.append(sure[-1].budget)
        elif holding:
            pages.append(holding[0].budget)
        else:
            pages.append(DENSE if here or not pages else pages[-1])
    return Schedule(tuple(pages), options.threshold, "calibrated", Path(model).name.lower())


def raised(schedule: Schedule, held_out: Sequence[Cell], options: CalibrationOptions) -> Schedule:
    """The schedule with the next larger budget in every bin that misses the threshold on held-out prompts; dense after the largest.

    A last bin that was not measured follows the bin before it.
    """
    pages = list(schedule.pages)
    measured = {cell.bin for cell in held_out}
    for cell in held_out:
        if cell.acceptance.count and cell.acceptance.p5 < schedule.threshold:
            larger = [budget for budget in budgets_of(cell.bin, options.budgets, options.context) if budget > cell.budget]
            pages[cell.bin] = larger[0] if larger else DENSE
    for bin in range(1, len(pages)):
        if bin not in measured and bin - 1 in measured:
            pages[bin] = pages[bin - 1]
    return replace(schedule, pages=tuple(pages))


def _known(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def _measure(
    policy: Policy,
    engine: SparseEngine,
    prompts: Prompts,
    options: CalibrationOptions,
    place: Place,
    budgets: tuple[int, ...] | None,
) -> list[Sample]:
    """Sample one prompt with every budget, or with the engine's schedule, and rescore."""
    prompt = prompts.prompt(place.part, place.index, place.length)
    size = HELD_OUT_COMPLETIONS if budgets is None else len(budgets)
    request = GroupRequest(prompt, size, key=place.index, budgets=budgets, observe=size)
    rollout = engine.generate([request], seed=options.seed, temperature=options.temperature, max_new_tokens=options.new_tokens)
    completions = rollout.groups[0]
    pairs = [(completions[seen.member].tokens, seen.kept) for seen in rollout.observed]
    samples = []
    for member, acceptances in enumerate(rescore(policy, prompt, pairs, options.temperature)):
        # The first token comes from the prefill; the others were each decoded at the position before their own.
        positions = np.arange(place.length, place.length + len(acceptances) - 1)
        if budgets is not None:
            read: NDArray[np.integer] | int = budgets[member]
        else:
            assert engine.schedule is not None
            read = engine.schedule.budgets_at(positions)
        samples.append(Sample(0 if budgets is None else budgets[member], acceptances[1:][is_sparse(positions, read, PAGE_SIZE)]))
    return samples


def _cells(places: Sequence[Place], done: CalibrationLog, schedule: Schedule | None) -> Iterator[Cell]:
    samples: dict[tuple[int, int], dict[int, list[NDArray[np.floating]]]] = {}
    for place in places:
        for sample in done.get(place, schedule) or ():
            budget = sample.budget if schedule is None else schedule.pages[place.bin]
            samples.setdefault((place.bin, budget), {}).setdefault(place.index, []).append(sample.acceptances)
    for (bin, budget), by_prompt in sorted(samples.items()):
        parts = [np.concatenate(completions) for completions in by_prompt.values()]
        yield Cell(bin, budget, summarise(np.concatenate(parts)), _standard_error(parts))


def _standard_error(parts: list[NDArray[np.floating]]) -> float:
    """Of the 5th percentile over the prompts' tokens (n_i,), by a bootstrap over whole prompts."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return float("nan")
    rng = np.random.default_rng(0)
    draws = [np.concatenate([parts[i] for i in rng.integers(len(parts), size=len(parts))]) for _ in range(RESAMPLES)]
    return float(np.std([fifth_percentile(draw) for draw in draws], ddof=1))
