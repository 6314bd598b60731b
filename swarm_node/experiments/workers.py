"""Runs of an experiment in processes of their own, a few at a time; finished runs are kept, so that an interrupted experiment goes on.

A worker is a module that is run as `python -m MODULE OUT SPEC`: it does what the JSON text SPEC says and writes JSON to OUT in one go,
with the spec in it under `spec`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ExperimentError(ValueError):
    """A run failed; the message holds what it said last."""


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    """Of its file, without the ending."""
    module: str
    spec: Mapping[str, Any]


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """The result of an earlier run of the same spec, or None."""
    try:
        result: dict[str, Any] = json.loads((folder / f"{job.name}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return result if result.get("spec") == json.loads(json.dumps(job.spec)) else None


def run_jobs(jobs: Sequence[Job], folder: Path, workers: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Results of all jobs in their order; those whose result is in `folder` are not run again.

    Raises:
        ExperimentError: a run failed. Results of others that have finished are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {job.name: result for job in jobs if (result := finished(job, folder)) is not None}
    if results:
        say(f"{len(results)} of {len(jobs)} runs are kept from before")
    stopping = threading.Event()
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(_run, job, folder, stopping): job for job in jobs if job.name not in results}
        try:
            for future in as_completed(futures):
                results[futures[future].name] = future.result()
                say(f"run {len(results)} of {len(jobs)}: {futures[future].name}")
        finally:
            stopping.set()
            pool.shutdown(cancel_futures=True)
    return [results[job.name] for job in jobs]


def _run(job: Job, folder: Path, stopping: threading.Event) -> dict[str, Any]:
    out = folder / f"{job.name}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", job.module, str(out), json.dumps(job.spec)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=os.environ | threads, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                _, errors = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if stopping.is_set():
                    process.terminate()
    result = finished(job, folder)
    if result is None:
        last = "\n".join(errors.strip().splitlines()[-5:])
        raise ExperimentError(
            f"run {job.name} failed with exit code {process.returncode}; finished runs are kept, so start again once it is mended:\n{last}"
        )
    return result
