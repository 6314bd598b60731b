"""Which schedule a node decodes with: what its options, its home folder and its model's name lead to."""

from __future__ import annotations

from pathlib import Path

from swarm_node.rollout.schedule import FILE, PUBLISHED, Schedule, ScheduleError, load_schedule
from swarm_node.rollout.sparsity_options import SparsityOptions

_DATA = Path(__file__).parent / "data"
_CAREFUL = "qwen3-1.7b@0.92"
"""Where the closed loop starts for a model that nobody has measured: the largest budgets published for a small model."""


def known_schedules() -> dict[str, Schedule]:
    """The published schedules and those measured by this project, by `model@threshold`."""
    measured = (load_schedule(path) for path in sorted(_DATA.glob("*.json")))
    return dict(PUBLISHED) | {schedule.source: schedule for schedule in measured}


def choose_schedule(options: SparsityOptions, model: str, home: Path | None = None) -> tuple[Schedule | None, str]:
    """The schedule to start with, None for dense attention, and a sentence that says why.

    `auto` takes the home folder's calibrated schedule if it is of this model; else the known one of this model whose threshold is nearest
    to the wanted one, not below it where there is a choice; else a careful one if the closed loop will correct it; else dense attention.

    Args:
        model: The policy's name; of a path or hub id the last part counts, in lower case.

    Raises:
        ScheduleError: an unknown name, or a file that cannot be read.
    """
    if options.schedule == "dense":
        return None, "attention dense, as asked"
    known = known_schedules()
    if options.schedule != "auto":
        if options.schedule in known:
            return known[options.schedule], f"schedule {options.schedule}, as asked"
        path = Path(options.schedule).expanduser()
        if not path.is_file():
            raise ScheduleError(
                f"there is no schedule {options.schedule!r}: give auto, dense, one of {', '.join(sorted(known))}, or the path of a file "
                "that `swarm-node calibrate` wrote"
            )
        return load_schedule(path), f"schedule {path}, as asked"

    short = Path(model).name.lower()
    ours = home / FILE if home is not None else None
    if ours is not None and ours.is_file():
        schedule = load_schedule(ours)
        if schedule.model in ("", short):
            return schedule, f"schedule {ours}: calibrated here at {schedule.threshold:g}"
    fitting = [schedule for schedule in known.values() if schedule.model == short]
    if fitting:
        above = [schedule for schedule in fitting if schedule.threshold >= options.threshold]
        best = min(above or fitting, key=lambda schedule: abs(schedule.threshold - options.threshold))
        return best, f"schedule {best.source}: known for this model"
    make = f"`swarm-node calibrate --model {model}` measures one"
    if options.closed_loop:
        return known[_CAREFUL], f"schedule {_CAREFUL}: none is known for {short}, the closed loop corrects it; {make}"
    return None, f"attention dense: no schedule is known for {short} and the closed loop is off; {make}"
