"""Start vLLM inside this process, for one policy's architecture, within the memory that a rollout may take."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from swarm_node.policy.parts import unwrap
from swarm_node.policy.policy import Policy
from swarm_node.rollout.options import RolloutOptions
from swarm_node.rollout.paged.cache import FREE_SHARE

_SHARE_KEPT = 0.1
"""Of the free memory, what the cache may take where it cannot be given back while learning."""
_PAGE = 128
"""Tokens of the largest page that vLLM chooses by itself; it keeps a page or two for its own use."""

_started: list[Any] = []
"""Every `LLM` of this process. When one of them is collected, vLLM takes down what all of them share."""


class VllmError(ValueError):
    """vLLM is not here, or cannot run this policy as asked. The message says what to do."""


@dataclass(frozen=True)
class CachePlan:
    """The KV cache that vLLM is given, for as long as it lives."""

    size: int
    """Bytes."""
    context: int
    """Tokens of one sequence at most, prompt and completion together."""


def import_vllm() -> Any:
    """The `vllm` module, told to stay in this process. Raises VllmError when it cannot be imported."""
    # Both are read when vLLM starts: it would run its core as another process, and report the machine that it runs on to its makers.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
        import vllm.platforms
        import vllm.sampling_params
    except ImportError as error:
        raise VllmError(
            f"rollout.engine = 'vllm' needs vLLM, which cannot be imported here ({error}): make an environment that has it with "
            "`make setup-vllm` (docs/vllm.md) and start the node from there, or use rollout.engine = 'sparse'"
        ) from error
    return vllm


def start_vllm(vllm: Any, policy: Policy, options: RolloutOptions, plan: CachePlan) -> Any:
    """An `LLM` of the policy's architecture; its weights are arbitrary until they are handed over.

    Raises:
        VllmError: vLLM cannot run this architecture, type or device.
    """
    set_num_threads = torch.set_num_threads
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about vLLM's own code
        unwrap(policy.model).config.save_pretrained(folder)
        try:
            llm = vllm.LLM(
                folder,
                dtype=str(policy.dtype).removeprefix("torch."),
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                # By default vLLM reports the distribution before the temperature.
                logprobs_mode="processed_logprobs",
                worker_extension_cls="swarm_node.rollout.vllm.worker.PolicyWeights",
                max_model_len=plan.context,
                max_num_seqs=options.max_batch,
                max_num_batched_tokens=options.prefill_tokens + options.max_batch,
                kv_cache_memory_bytes=plan.size,
                gpu_memory_utilization=_share_of_device(policy.device, plan.size),
                enable_prefix_caching=True,
                enable_sleep_mode=sleeps(vllm),
                # On a CPU a compiled graph holds on to the packed matrices that it was traced with, which a hand-over replaces.
                enforce_eager=policy.device.type == "cpu",
            )
        except (ValueError, NotImplementedError) as error:
            raise cannot_run(policy, error) from error
        finally:
            # vLLM's CPU worker replaces it by a function that does nothing, and exempts all that lives from garbage collection.
            torch.set_num_threads = set_num_threads
            gc.unfreeze()
    _started.append(llm)
    return llm


def cannot_run(policy: Policy, error: Exception) -> VllmError:
    """What to raise when vLLM fails with a model that is new to it."""
    reason = " ".join(str(error).split())[:300]
    return VllmError(f"vLLM cannot run {policy.name}: {reason}. Use rollout.engine = 'sparse' or 'reference'.")


def sleeps(vllm: Any) -> bool:
    """Whether vLLM can give its memory back on this platform."""
    return bool(vllm.platforms.current_platform.is_sleep_mode_available())


def check_device(vllm: Any, device: torch.device) -> None:
    """Raise VllmError unless vLLM, which takes the first device of its kind, computes where the policy lives."""
    own = str(vllm.platforms.current_platform.device_type)
    if own != device.type or (device.index or 0) != 0:
        raise VllmError(
            f"this vLLM computes on the first {own} device and the policy is on {device}: set model.device = '{own}', show the wanted GPU "
            "alone (CUDA_VISIBLE_DEVICES), or install the vLLM that is made for the policy's device"
        )


def plan_cache(policy: Policy, options: RolloutOptions, returned: bool) -> CachePlan:
    """As much as `max_batch` completions of the whole context need, or as the memory allows: `cache_gib`, else a share of what is free.

    Args:
        policy: Its architecture, type and context.
        options: `cache_gib` and `max_batch`.
        returned: Whether the memory is given back while learning.

    Raises:
        VllmError: it would hold too few tokens to sample anything.
    """
    config = unwrap(policy.model).config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * head_size * policy.dtype.itemsize
    share = FREE_SHARE if returned else _SHARE_KEPT
    allowed = options.cache_gib * 2**30 if options.cache_gib is not None else share * _memory(policy.device)[0]
    tokens = int(allowed) // token
    if policy.context is not None:
        tokens = min(tokens, options.max_batch * (policy.context + _PAGE) + 2 * _PAGE)
    context = min(policy.context or tokens, tokens - 3 * _PAGE)
    if context < _PAGE:
        raise VllmError(
            f"vLLM's cache may take {allowed / 2**20:.0f} MiB and would hold {tokens} tokens, of which it needs {3 * _PAGE} for itself: "
            "raise rollout.cache_gib"
        )
    return CachePlan(tokens * token, context)


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes: free, total."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _share_of_device(device: torch.device, cache: int) -> float:
    """What vLLM asks to find free at its start: the cache, of the whole memory."""
    return max(0.01, min(0.95, cache / _memory(device)[1]))
