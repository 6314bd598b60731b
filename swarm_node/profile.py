"""`join --profile`: where one step's time goes, once the first steps have warmed everything up."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

WARM_STEPS = 2
"""Steps of this start that are left alone: they build kernels and fill caches."""
ROWS = 40
Row = TypeVar("Row")


class StepProfiler:
    """Profiles one step by Python's functions, and the next by torch's operations; every other step runs as it is."""

    def __init__(self, home: Path, say: Callable[[str], None]) -> None:
        """The files `profile-functions.txt`, `profile-operations.txt` and `profile-trace.json.gz` are written into `home`."""
        self._home = home
        self._say = say
        self._steps = 0

    def run(self, step: Callable[[], Row]) -> Row:
        """Call `step`, profiled when it is its turn."""
        self._steps += 1
        if self._steps == WARM_STEPS + 1:
            return self._by_function(step)
        if self._steps == WARM_STEPS + 2:
            return self._by_operation(step)
        return step()

    def close(self) -> None:
        """Say so where there was no turn."""
        if self._steps < WARM_STEPS + 2:
            self._say(f"no whole profile: it takes {WARM_STEPS + 2} steps, and this start took {self._steps}")

    def _by_function(self, step: Callable[[], Row]) -> Row:
        profile = cProfile.Profile()
        row = profile.runcall(step)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(ROWS).sort_stats("tottime").print_stats(ROWS)
        self._write("profile-functions.txt", text.getvalue())
        return row

    def _by_operation(self, step: Callable[[], Row]) -> Row:
        import torch
        from torch.profiler import ProfilerActivity

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        with torch.profiler.profile(activities=activities) as profiler:
            row = step()
        self._write("profile-operations.txt", profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS))
        self._keep("profile-trace.json.gz", lambda path: profiler.export_chrome_trace(str(path)))
        return row

    def _write(self, name: str, text: str) -> None:
        self._keep(name, lambda path: path.write_text(text, encoding="utf-8"))

    def _keep(self, name: str, write: Callable[[Path], object]) -> None:
        path = self._home / name
        try:
            write(path)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's own writer
            self._say(f"no profile in {path}: {error}")
        else:
            self._say(f"profile: {path}")
