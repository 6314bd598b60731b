"""Which device and weight type a policy gets, and why: each choice comes with the sentence that explains it."""

from __future__ import annotations

import psutil
import torch

from swarm_node.policy.errors import ModelError
from swarm_node.policy.options import ModelOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device to use and the reason.

    Raises:
        ModelError: the named device is missing or computes nothing.
    """
    if wanted != "auto":
        device = torch.device(wanted)
        trouble = _trouble_with(device)
        if trouble:
            raise ModelError(f"device {wanted} cannot be used: {trouble}. Choose another one, or leave device = auto.")
        return device, f"device {device}: as asked"
    broken = ""
    for kind, present in (
        ("cuda", torch.cuda.is_available()),
        ("xpu", torch.xpu.is_available()),
        ("mps", torch.backends.mps.is_available()),
    ):
        if not present:
            continue
        device = torch.device(kind)
        trouble = _trouble_with(device)
        if not trouble:
            name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
            return device, f"device {device}: {name} is present and a probe computed on it"
        broken = f" ({kind} is present but {trouble})"
    return torch.device("cpu"), f"device cpu: no usable accelerator{broken}"


def choose_dtype(options: ModelOptions, device: torch.device, parameters: int) -> tuple[torch.dtype, str]:
    """The type of the model's weights and the reason.

    Weights that are trained stay float32 where memory allows: an update of 1e-6 is lost in bfloat16's 8 bits. Frozen weights under
    adapters only need the precision that the forward pass has.
    """
    if options.dtype != "auto":
        return DTYPES[options.dtype], f"dtype {options.dtype}: as asked"
    free = free_memory(device)
    if options.lora:
        if device.type == "cuda":
            return torch.bfloat16, "dtype bfloat16: the base is frozen under float32 adapters"
        if 4 * parameters <= free * 0.6:
            return torch.float32, "dtype float32: frozen weights fit, and float32 log-probs do not depend on the batch's shape"
        return torch.bfloat16, f"dtype bfloat16: {_gib(4 * parameters)} of float32 weights do not fit well into {_gib(free)} of free memory"
    if training_bytes(parameters) <= free * 0.8:
        return torch.float32, "dtype float32: every weight is trained, and small updates vanish in bfloat16"
    return (
        torch.bfloat16,
        f"dtype bfloat16: training in float32 needs {_gib(training_bytes(parameters))} and {_gib(free)} are free; consider --lora",
    )


def training_bytes(parameters: int) -> int:
    """Bytes of float32 weights, gradients and AdamW's two moments."""
    return 16 * parameters


def free_memory(device: torch.device) -> int:
    """Bytes free now where the model would live."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _trouble_with(device: torch.device) -> str:
    """Why the device computes nothing, or empty. A driver can show a GPU that the installed kernels were not built for."""
    try:
        probe = torch.arange(16.0, device=device).reshape(4, 4)
        total = (probe @ probe).sum().item()
    except (RuntimeError, AssertionError) as error:  # torch raises AssertionError where it was built without the backend
        return str(error).splitlines()[0]
    return "" if total == 3920.0 else f"a 4 × 4 product summed to {total} instead of 3920"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
