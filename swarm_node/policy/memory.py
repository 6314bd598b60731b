"""Where a policy's weights lie: on the CPU in pages of 2 MiB, which are read faster than pages of 4 KiB."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn

_PAGE = 2 << 20
"""Bytes of a huge page, and what it must be aligned to."""
_BUFFER = 256 << 20
"""Most bytes of parameters a buffer, unless one alone has more: how much of a model is there twice while it moves."""
_LINE = 64
"""Bytes of a cache line; every parameter begins with one, as those that torch allocates do."""


def move_to_huge_pages(model: nn.Module) -> None:
    """Move a model's parameters on the CPU, bit for bit, to private memory that Linux may back with pages of 2 MiB.

    A page is larger than most parameters, so they lie side by side in few buffers. Each still has a storage of its own, and is the same
    `nn.Parameter` as before: ties, copies, optimisers and files do not notice. A buffer is freed with the last tensor that lies in it.

    Nothing is moved where there is nothing to gain: another system or device, less than one page in all, a kernel without such pages.
    """
    if sys.platform != "linux":
        return
    tensors = chain(model.parameters(), model.buffers())
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type == "cpu")
    # Parameters that are views of one storage would no longer change together.
    alone = [parameter for parameter in model.parameters() if parameter.numel() and users[parameter.untyped_storage().data_ptr()] == 1]
    if sum(parameter.nbytes for parameter in alone) < _PAGE:
        return
    for parameters in _split(alone):
        try:
            _move(parameters)
        except OSError:  # the kernel has no huge pages, or no memory for a second copy: the weights are as good where they are
            return
        _return_freed_memory()


def _split(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if part and size + _room(parameter) > _BUFFER:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += _room(parameter)
    yield part


def _move(parameters: Sequence[nn.Parameter]) -> None:
    """Raises OSError before anything is moved."""
    buffer, offset = _allocate(sum(_room(parameter) for parameter in parameters))
    for parameter in parameters:
        new = torch.frombuffer(buffer, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
        parameter.data = new.view(parameter.shape).copy_(parameter.detach())
        offset += _room(parameter)


def _allocate(size: int) -> tuple[mmap.mmap, int]:
    """A buffer of whole pages, and the offset of the first of them: mmap promises no more than pages of 4 KiB.

    The memory is private, so that a forked child writes to a copy of its own.
    """
    pages = -(-size // _PAGE)
    buffer = mmap.mmap(-1, (pages + 1) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(buffer, dtype=torch.uint8, count=1).data_ptr()
    return buffer, -address % _PAGE


def _return_freed_memory() -> None:
    """glibc keeps what is freed for later use, and never uses it if a thread allocated it that has ended, as those that load a model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _room(parameter: nn.Parameter) -> int:
    """Bytes that a parameter takes in a buffer."""
    return -(-parameter.nbytes // _LINE) * _LINE
