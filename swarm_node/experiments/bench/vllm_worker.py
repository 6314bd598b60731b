"""Runs in the environment that holds vLLM, and imports nothing of ours: one JSON object a line in, one out, until the input ends.

    {"op": "load", "model": FOLDER, "dtype": "bfloat16", "context": 8192, "batch": 32, "threads": 2, "cache_gib": 4, "random": false}
        -> {"version": "0.32.0"}
    {"op": "generate", "prompts": [[1, 2, 3], ...], "tokens": 64, "forget": true}
        -> {"seconds": 1.25, "tokens": 512}     greedy, exactly `tokens` a prompt; `forget` drops the prompts that are cached first

A request that fails is answered with {"error": TEXT}. Everything that vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Worker:
    """One vLLM engine, at its defaults: compiled, in this process."""

    def load(self, model: str, dtype: str, context: int, batch: int, threads: int, cache_gib: int, random: bool) -> dict[str, Any]:
        """Start the engine; `context` is in tokens, `batch` in sequences, `cache_gib` the memory of its cache."""
        # All of this is read when vLLM is imported. A process of its own for the engine would compete for the cores.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib)
        if hasattr(os, "sched_getaffinity"):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        import vllm
        from torch import cuda

        memory: dict[str, Any] = {}
        if cuda.is_available():  # the other engines live on the same GPU
            memory = {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": cache_gib << 30}
        self.llm = vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=batch,
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format="dummy" if random else "auto",
            enable_prefix_caching=True,
            seed=0,
            **memory,
        )
        return {"version": vllm.__version__}

    def generate(self, prompts: list[list[int]], tokens: int, forget: bool) -> dict[str, Any]:
        """Sample greedily, exactly `tokens` a prompt, and say how many seconds it took."""
        from vllm import SamplingParams

        if forget:
            self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


def main() -> None:
    """Answer requests until the input ends. Standard output is for answers alone, so everything else is sent to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("op"))(**request)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the other side has to be told
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
