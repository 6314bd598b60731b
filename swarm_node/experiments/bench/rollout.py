"""The rollout benchmark: our dense and sparse decoding, transformers and vLLM, in turn in one call (`swarm-node bench rollout`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarm_node import __version__
from swarm_node.experiments.bench.cost_model import shape_of
from swarm_node.experiments.bench.engines import Contender, OwnEngine, Prompts, Rival, TransformersEngine, cache_bytes, run_paced
from swarm_node.experiments.bench.machine import Limits, describe_machine, measure_limits
from swarm_node.experiments.bench.pace import Mode, Pacemaker
from swarm_node.experiments.bench.plan import LongCase, Plan, ShortCase, fit_memory
from swarm_node.experiments.bench.results import Decode, Predictor, Prefill, make_predictor, ratios, times_apart
from swarm_node.experiments.bench.vllm import VllmWorker
from swarm_node.policy import catalogue
from swarm_node.policy.hardware import free_memory
from swarm_node.policy.parts import unwrap
from swarm_node.policy.policy import Policy
from swarm_node.rollout.sparsity.schedule import Schedule

Say = Callable[[str], None]
NO_VLLM = "no second environment: give the python of one that holds vLLM with --vllm-python"


@dataclass
class Measurements:
    """Everything that one call timed."""

    decodes: list[Decode] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)
    """The group over one prompt against one completion of it."""
    limits: list[Limits] = field(default_factory=list)
    """Of the machine, before every case and at the end."""


def bench_rollout(
    policy: Policy, plan: Plan, schedule: Schedule | None, why: str, *, vllm_python: Path | None, quick: bool, random: bool, say: Say
) -> dict[str, Any]:
    """Time every case of the plan and return one JSON object.

    Args:
        policy: The model, on the device that is timed.
        plan: The cases; those that do not fit into memory are left out, and the result says so.
        schedule: Of the sparse steps; None leaves them out.
        why: Where the schedule comes from, or why there is none.
        vllm_python: The interpreter of an environment that holds vLLM; None leaves vLLM out.
        quick: Noted in the result; the plan is what makes a run quick.
        random: Whether the policy's weights are random: vLLM then makes up its own.
        say: Gets progress, line by line.

    Raises:
        BenchError: vLLM cannot be used, or an engine sampled another number of tokens than it was asked to.
        Unsupported: our engine does not know the architecture.
    """
    measured = Measurements()

    def limits() -> None:
        measured.limits.append(measure_limits(policy.device, policy.dtype))

    limits()
    say(describe_machine(policy.device, policy.dtype, measured.limits).describe())
    plan = fit_memory(plan, cache_bytes(policy, 1), free_memory(policy.device))
    for key, reason in plan.left_out:
        say(f"case {key} is left out: {reason}")
    say(f"sparse: {why}")
    with _vllm(policy, plan, vllm_python, random, say) as vllm:
        _short_cases(policy, plan, vllm, measured, say)
        _shared_prompt(policy, plan, measured, say)
        for case in plan.long:
            limits()
            _long_case(policy, case, schedule, vllm, measured, say)
        version = vllm.version if vllm else None
    limits()
    machine = describe_machine(policy.device, policy.dtype, measured.limits)
    shape = shape_of(
        unwrap(policy.model).config,
        sum(parameter.numel() for parameter in policy.model.parameters()),
        weight_bytes=policy.dtype.itemsize,
        cache_bytes=policy.dtype.itemsize,
    )
    predictor = make_predictor(shape, machine.flops, machine.read_bytes_per_second, measured.decodes)
    missing = dict(plan.left_out) | ({} if vllm_python else {"vllm": NO_VLLM}) | ({} if schedule else {"sparse": why})
    return {
        "benchmark": "rollout",
        "version": __version__,
        "model": policy.name,
        "quick": quick,
        "vllm": version,
        "machine": asdict(machine)
        | {"intensity": machine.intensity, "description": machine.describe(), "limits": [asdict(limit) for limit in measured.limits]},
        "schedule": None if schedule is None else asdict(schedule) | {"why": why},
        "ratios": ratios(measured.decodes, predictor, missing),
        "cases": [asdict(decode) | _derived(decode, predictor) for decode in measured.decodes],
        "overhead_seconds": {str(batch): seconds for batch, seconds in predictor.overheads.items()},
        "shared_prompt": measured.shared,
        "prefill": [asdict(prefill) for prefill in measured.prefills],
        "left_out": [{"case": key, "reason": reason} for key, reason in plan.left_out],
    }


def _derived(decode: Decode, predictor: Predictor) -> dict[str, Any]:
    """What follows from a case's seconds. Of shared pages nobody knows how often they are read, so there is no floor."""
    known = not decode.shared
    return {
        "ms_per_step": decode.step_seconds * 1e3,
        "tokens_per_second": decode.tokens_per_second,
        "floor_tokens_per_second": decode.batch / predictor.floor_seconds(decode) if known else None,
        "share_of_floor": predictor.floor_seconds(decode) / decode.step_seconds if known else None,
        "predicted_tokens_per_second": decode.batch / predictor.step_seconds(decode) if known else None,
    }


@contextmanager
def _vllm(policy: Policy, plan: Plan, python: Path | None, random: bool, say: Say) -> Iterator[VllmWorker | None]:
    if python is None:
        yield None
        return
    say("vLLM is starting; it compiles a model that it meets for the first time, which can take minutes")
    with VllmWorker(python) as worker, tempfile.TemporaryDirectory() as folder:
        model = policy.name
        if random:
            unwrap(policy.model).config.save_pretrained(folder)
            model = folder
        elif model in catalogue.names():
            model = str(catalogue.find(model).folder)
        elif Path(model).expanduser().is_dir():
            model = str(Path(model).expanduser())
        # A block of vLLM's cache may hold 128 tokens: every sequence may waste one.
        tokens = plan.rival_tokens() + 128 * max(case.batch for case in plan.short)
        worker.load(
            model,
            dtype=str(policy.dtype).removeprefix("torch."),
            context=plan.longest,
            batch=max(case.batch for case in plan.short),
            threads=torch.get_num_threads(),
            cache_gib=-(-cache_bytes(policy, tokens) // 2**30) + 1,
            random=random,
        )
        say(f"vLLM {worker.version}")
        yield worker


def _short_cases(policy: Policy, plan: Plan, vllm: VllmWorker | None, measured: Measurements, say: Say) -> None:
    contenders: list[Contender] = [
        OwnEngine(policy, max(case.batch * case.prompt for case in plan.short)),
        TransformersEngine(policy),
        *([vllm] if vllm else []),
    ]
    for case in plan.short:
        prefills, decodes = zip(*run_short(case, contenders, _prompts(policy, case.batch, case.prompt), plan.rounds), strict=True)
        measured.prefills += prefills
        measured.decodes += decodes
        _say_rates(decodes, say)


def run_short(case: ShortCase, contenders: Sequence[Contender], prompts: Prompts, rounds: int) -> list[tuple[Prefill, Decode]]:
    """Every contender once a round, one token and then all of them; the first round warms up and is dropped."""
    first: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    whole: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds + 1):
        for contender in contenders:
            first[contender.name].append(contender.seconds(prompts, 1))
            whole[contender.name].append(contender.seconds(prompts, case.tokens))
    return [times_apart(case.key, name, case.batch, case.prompt, case.tokens, first[name][1:], whole[name][1:]) for name in first]


def _shared_prompt(policy: Policy, plan: Plan, measured: Measurements, say: Say) -> None:
    """Seconds to the first tokens of a group over one long prompt, and of one completion of it, in turn."""
    engine = OwnEngine(policy, plan.shared_prompt)
    prompts = _prompts(policy, 1, plan.shared_prompt)
    group, one = [], []
    for _ in range(plan.rounds + 1):
        one.append(engine.group_seconds(prompts, 1, 1))
        group.append(engine.group_seconds(prompts, plan.shared_group, 1))
    ratio = float(np.median(group[1:]) / np.median(one[1:]))
    measured.shared = {
        "prompt": plan.shared_prompt,
        "group": plan.shared_group,
        "seconds_one": one[1:],
        "seconds_group": group[1:],
        "group_vs_one": ratio,
    }
    say(f"prefill of {plan.shared_prompt} tokens: a group of {plan.shared_group} takes {ratio:.2f} times as long as one completion")


def _long_case(
    policy: Policy, case: LongCase, schedule: Schedule | None, vllm: VllmWorker | None, measured: Measurements, say: Say
) -> None:
    prompts = _prompts(policy, 1 if case.shared else case.batch, case.prompt)
    transformers = TransformersEngine(policy)
    rivals: list[Rival] = [transformers, *([vllm] if vllm else [])] if case.rivals else []
    times: dict[str, list[float]] = {rival.name: [] for rival in rivals}

    def between() -> None:
        for rival in rivals:
            first = rival.resumed_seconds(prompts, 1) if times[rival.name] else _warm(rival, prompts)
            times[rival.name].append(rival.resumed_seconds(prompts, case.steps + 1) - first)

    modes: tuple[Mode, ...] = ("dense", "sparse") if schedule else ("dense",)
    pacemaker = Pacemaker(modes, batch=case.batch, steps=case.steps, rounds=case.rounds, between=between)
    report = run_paced(policy, prompts, case.batch if case.shared else 1, case.tokens, schedule, pacemaker)
    measured.prefills.append(Prefill(case.key, "dense", report.prefill_tokens, (report.prefill_seconds,)))
    decodes = [
        Decode(
            case.key,
            mode,
            case.batch,
            blocks.context,
            case.steps,
            tuple(blocks.seconds),
            blocks.budget if mode == "sparse" else None,
            shared=case.shared,
        )
        for mode, blocks in pacemaker.blocks.items()
    ]
    decodes += [
        Decode(case.key, name, case.batch, case.prompt + case.steps / 2, case.steps, tuple(seconds[1:])) for name, seconds in times.items()
    ]
    measured.decodes += decodes
    _say_rates(decodes, say)


def _warm(rival: Rival, prompts: Prompts) -> float:
    """Let it compute the prompts; then its time of one more token."""
    rival.resumed_seconds(prompts, 1)
    return rival.resumed_seconds(prompts, 1)


def _prompts(policy: Policy, count: int, length: int) -> Prompts:
    """Random ids, the same for every engine and in every call."""
    generator = np.random.default_rng([count, length])
    return list(generator.integers(0, policy.vocab_size, (count, length), dtype=np.int32))


def _say_rates(decodes: Sequence[Decode], say: Say) -> None:
    rates = ", ".join(f"{decode.engine} {decode.tokens_per_second:.1f}" for decode in decodes)
    say(f"{decodes[0].case}: tokens/s {rates}")
