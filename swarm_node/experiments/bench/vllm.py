"""vLLM as a contender: a process in the environment that holds it, which stays for the whole benchmark so that runs can alternate."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm_node.experiments.bench.shapes import BenchError, check_tokens

WORKER = Path(__file__).with_name("vllm_worker.py")
_LOAD_SECONDS = 1800.0
"""vLLM compiles the model when it meets it for the first time, which takes minutes on few cores."""
_RUN_SECONDS = 1800.0


class VllmWorker:
    """`vllm_worker.py` in another environment."""

    name = "vllm"

    def __init__(self, python: Path, script: Path = WORKER) -> None:
        """
        Raises:
            BenchError: `python` cannot be started.
        """
        self.version = ""
        self._python = python
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the process
        try:
            self._process = subprocess.Popen(
                [python, "-I", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            raise BenchError(
                f"--vllm-python {python} cannot be started ({error.strerror}): give the python of the environment that holds vLLM, "
                "for example /opt/vllm/bin/python"
            ) from error

    def __enter__(self) -> VllmWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def load(self, model: str, *, dtype: str, context: int, batch: int, threads: int, cache_gib: int, random: bool) -> None:
        """Load a model folder; with `random` only its configuration is read.

        Raises:
            BenchError: vLLM is not there or cannot load the model.
        """
        answer = self._ask(
            _LOAD_SECONDS,
            {
                "op": "load",
                "model": model,
                "dtype": dtype,
                "context": context,
                "batch": batch,
                "threads": threads,
                "cache_gib": cache_gib,
                "random": random,
            },
        )
        self.version = str(answer["version"])

    def seconds(self, prompts: Sequence[NDArray[np.int32]], tokens: int) -> float:
        """Seconds of sampling exactly `tokens` for each prompt, from nothing. Raises BenchError."""
        return self._generate(prompts, tokens, forget=True)

    def resumed_seconds(self, prompts: Sequence[NDArray[np.int32]], tokens: int) -> float:
        """As `seconds`, with the prompts in vLLM's prefix cache if they were there before. Raises BenchError."""
        return self._generate(prompts, tokens, forget=False)

    def close(self) -> None:
        """End the process."""
        process = self._process
        if process.stdin:
            with suppress(BrokenPipeError):  # of a request that an ended process never read
                process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()
        self._errors.close()

    def _generate(self, prompts: Sequence[NDArray[np.int32]], tokens: int, *, forget: bool) -> float:
        request = {"op": "generate", "prompts": [prompt.tolist() for prompt in prompts], "tokens": tokens, "forget": forget}
        answer = self._ask(_RUN_SECONDS, request)
        check_tokens(self.name, answer["tokens"], tokens * len(prompts))
        return float(answer["seconds"])

    def _ask(self, limit: float, request: dict[str, Any]) -> dict[str, Any]:
        what = f"vLLM in {self._python} ({request['op']})"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{what}: the process has ended. It said last:\n{self._last_words()}") from None
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        if not ready:
            raise BenchError(f"{what}: no answer within {limit:.0f} s. It said last:\n{self._last_words()}")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{what}: the process has ended. It said last:\n{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{what}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-5:])
