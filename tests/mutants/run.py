"""Puts every fault of the list into a copy of the project, runs the tests of its room, and prints the faults that no test noticed.

    python -m tests.mutants.run [--only WORDS] [--workers 2]

Exit code 1 when a fault survives that is not known to, when one that is known to survive is noticed after all, or when a room's tests fail
without any fault.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.faults import ROOT, Fault, load_faults

LIMIT_S = 900.0
"""A fault that makes its tests hang has been noticed."""
PASSED, FAILED, BROKEN = 0, 1, 2
"""Pytest's exit codes; a file that cannot even be collected has noticed the fault."""


def run_tests(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Pytest's exit code in that copy of the project, and the last line that it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join(str(copy / top) for top in (".", "kernels", "protocols"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return FAILED, f"hung for {LIMIT_S:.0f} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = failed or done.stdout.splitlines() or done.stderr.splitlines() or [""]
    return done.returncode, lines[-1]


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of the project for so many workers."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            copy = Path(folder) / str(number)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".*cache*", "__pycache__", "runs", "wheelhouse"))
            free.put(copy)
        yield free


def judge(fault: Fault, free: SimpleQueue[Path]) -> tuple[bool, str]:
    """Whether a test noticed the fault, and which, or what went wrong."""
    copy = free.get()
    file = copy / fault.file
    sound = file.read_text(encoding="utf-8")
    try:
        file.write_text(fault.applied(sound), encoding="utf-8")
        code, said = run_tests(copy, fault.tests)
        return code in (FAILED, BROKEN), said
    finally:
        file.write_text(sound, encoding="utf-8")
        free.put(copy)


def main() -> int:
    """Run the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name or file contains this")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    faults = [fault for fault in load_faults() if options.only in f"{fault.name} {fault.file}"]
    began = time.monotonic()
    with copies(options.workers) as free, ThreadPoolExecutor(options.workers) as pool:
        asked = sorted({test for fault in faults for test in fault.tests})
        copy = free.get()
        code, said = run_tests(copy, asked)
        free.put(copy)
        if code != PASSED:
            print(f"the tests fail without any fault: {said}")
            return 1
        survivors, wrong = 0, 0
        for fault, (noticed, said) in zip(faults, pool.map(lambda fault: judge(fault, free), faults), strict=True):
            print(f"{'noticed ' if noticed else 'SURVIVED'}  {fault.file}: {fault.name}: {said}", flush=True)
            survivors += not noticed
            wrong += noticed == bool(fault.survives)
            if fault.survives:
                print(f"          known to survive: {fault.survives}")
    print(f"{len(faults)} faults, {len(faults) - survivors} noticed, {survivors} survived, in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
