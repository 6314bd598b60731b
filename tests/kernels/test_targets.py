"""Every Triton kernel compiles ahead of time for the GPUs that volunteers have, without spills; -s prints the table."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from swarm_kernels.gpu.append import append_tokens, write_centroids
from swarm_kernels.gpu.attention import attend_split, merge_splits
from swarm_kernels.gpu.backend import ATTEND_STAGES, ATTEND_WARPS, BLOCK_TOKENS, SCORE_BLOCK
from swarm_kernels.gpu.selection import keep_best, score_pages
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, "gfx942": 65_536}
"""What one program may have: the opt-in maximum of the CUDA programming guide's table of compute capabilities; 64 KiB on CDNA 3."""
INDEX_POINTERS = {
    "table": "*i32",
    "lengths": "*i32",
    "pages": "*i32",
    "budgets": "*i32",
    "lists": "*i32",
    "slots": "*i64",
}
FLOAT_POINTERS = ("lse", "sums", "stats", "scores")
SCALARS = {"scale_log2": "fp32"}
INTEGERS = re.compile(r"window|list_width|width|splits|.*_(sequence|head|stride|page|token)$")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Configuration:
    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    dtype: str = "bf16"


def attention(head: int, page: int, group: int, dtype: str, listed: bool, whole: bool) -> Configuration:
    constants = {
        "GROUP": group,
        "HEAD": head,
        "HEAD_PADDED": triton.next_power_of_2(head),
        "PAGE": page,
        "BLOCK": BLOCK_TOKENS[DTYPES[dtype]],
    }
    constants |= {"LISTED": listed, "WHOLE": whole, "WIDEN": False}
    name = f"attend {'sparse' if listed else 'dense'} D{head} page {page}"
    return Configuration(name, attend_split, constants, ATTEND_WARPS, ATTEND_STAGES[DTYPES[dtype]], dtype)


COVER = [
    attention(64, 16, 3, "bf16", listed=True, whole=False),
    attention(128, 16, 8, "bf16", listed=True, whole=False),
    attention(128, 32, 4, "fp16", listed=False, whole=True),
    attention(96, 32, 8, "fp32", listed=True, whole=True),
    Configuration("merge D128", merge_splits, {"HEAD": 128, "HEAD_PADDED": 128, "SPLITS_PADDED": 64}, 4),
    Configuration("score D128", score_pages, {"GROUP": 8, "HEAD": 128, "HEAD_PADDED": 128, "PAGE": 16, "BLOCK": SCORE_BLOCK}, 4),
    Configuration("keep best of 2048", keep_best, {"PAGE": 16, "RESERVED": 3, "PADDED": 2048}, 4),
    Configuration("append D128", append_tokens, {"KV_HEADS": 8, "HEAD": 128, "HEAD_PADDED": 128, "PAGE": 16, "ROTATE": True}, 1),
    Configuration("centroids D128", write_centroids, {"HEAD": 128, "HEAD_PADDED": 128, "PAGE": 32}, 1),
]
GRID = [
    attention(head, page, 8, dtype, listed, whole)
    for head in (32, 64, 96, 128)
    for page in (16, 32)
    for dtype in ("bf16", "fp16", "fp32")
    for listed in (True, False)
    for whole in (True, False)
]


def source(configuration: Configuration) -> ASTSource:
    """The kernel with types as `TritonKernels` passes them; pointers and strides are multiples of 16, as allocations and head sizes are."""
    signature, multiples = {}, {}
    for index, name in enumerate(configuration.kernel.arg_names):
        if name in configuration.constants:
            signature[name] = "constexpr"
            continue
        if name in SCALARS:
            signature[name] = SCALARS[name]
        elif name in INDEX_POINTERS:
            signature[name] = INDEX_POINTERS[name]
        elif name in FLOAT_POINTERS:
            signature[name] = "*fp32"
        elif INTEGERS.fullmatch(name):
            signature[name] = "i32"
        else:
            signature[name] = f"*{configuration.dtype}"
        if signature[name].startswith("*") or name.endswith(("_sequence", "_head", "_stride", "_page", "_token")):
            multiples[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(configuration.kernel, signature, dict(configuration.constants), multiples)


def compile_for(target: int | str, configuration: Configuration) -> tuple[int, int]:
    """Shared memory in bytes and spilled registers (bytes on CUDA, a count on ROCm)."""
    gpu = GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64)
    stages = configuration.stages if isinstance(target, int) else min(configuration.stages, 2)
    compiled = triton.compile(source(configuration), target=gpu, options={"num_warps": configuration.warps, "num_stages": stages})
    if isinstance(target, str):
        assert "hsaco" in compiled.asm
        spills = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        return compiled.metadata.shared, sum(map(int, spills))
    assert "cubin" in compiled.asm
    return compiled.metadata.shared, spilled_bytes(compiled.asm["ptx"])


def spilled_bytes(ptx: str) -> int:
    """What ptxas says, since the driver that would know is not here. Of the assemblers that Triton ships, one knows this version of PTX."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    architecture = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert architecture is not None
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        for tool in sorted(tools.glob("ptxas*")):
            command = [str(tool), "-v", f"--gpu-name={architecture.group(1)}", str(file), "-o", str(Path(folder) / "kernel.cubin")]
            reports.append(subprocess.run(command, capture_output=True, text=True, check=False).stderr)
            if spills := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", reports[-1]):
                return int(spills.group(1)) + int(spills.group(2))
    raise AssertionError("\n".join(reports))


def check(target: int | str, configurations: list[Configuration]) -> None:
    limit = SHARED_BYTES[target]
    label = f"sm_{target}" if isinstance(target, int) else target
    print(f"\n{label:>8}  {'kernel':<26} {'type':<5} {'shared':>7} {'limit':>7}  spills")
    for configuration in configurations:
        shared, spills = compile_for(target, configuration)
        print(f"{label:>8}  {configuration.name:<26} {configuration.dtype:<5} {shared:>7} {limit:>7}  {spills}")
        assert shared <= limit, f"{configuration.name} needs {shared} bytes of shared memory on {label}, which has {limit}"
        assert spills == 0, f"{configuration.name} spills on {label}"


@pytest.mark.parametrize("target", SHARED_BYTES, ids=str)
def test_kernels_fit_the_target_without_spills(target: int | str) -> None:
    check(target, COVER)


@pytest.mark.slow
@pytest.mark.parametrize("target", SHARED_BYTES, ids=str)
def test_every_configuration_of_attention_fits_the_target_without_spills(target: int | str) -> None:
    check(target, GRID)
