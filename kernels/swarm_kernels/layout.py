"""Where keys and values lie: pages of tokens, per layer and KV head.

One layer is one tensor of shape (KV heads, pages, 2, page size, head size). Keys and values of one page and head are neighbours, so that
a sparse read of a bf16 page of 16 tokens with heads of 64 is one run of 4 KiB; pages with neighbouring numbers are neighbours within a
head, so that a sequence whose pages were taken in order is read as one stream. Kernels take keys and values as strided views of shape
(pages, KV heads, page size, head size).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_SIZES = (32, 64, 96, 128)
PAGE_SIZES = (16, 32)
MAX_GROUP = 16
"""Query heads that may share one KV head: the rows of one tensor-core tile."""
RESERVED_PAGES = 3
"""Pages that a sparse step always reads: the first, and the last two, of which the partial one is the last."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PageLayout:
    """The shape of a paged cache."""

    layers: int
    pages: int
    kv_heads: int
    head_size: int
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.head_size not in HEAD_SIZES:
            raise ValueError(f"head size {self.head_size} has no kernel; sizes with one: {HEAD_SIZES}")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"pages of {self.page_size} tokens have no kernel; sizes with one: {PAGE_SIZES}")
        if self.dtype not in DTYPES:
            raise ValueError(f"a cache of {self.dtype} has no kernel; types with one: {DTYPES}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: keys, values and centroids."""
        return self.layers * self.kv_heads * (2 * self.page_size + 1) * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's pages."""

    keys: Tensor
    """(pages, KV heads, page size, head size); the last two dimensions are contiguous. Keys are stored rotated."""
    values: Tensor
    """As `keys`, with the same strides."""
    centroids: Tensor
    """(pages, KV heads, head size), of the cache's type: the mean of a page's keys, set when its last slot is written."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[2]


def allocate(layout: PageLayout) -> list[LayerCache]:
    """One `LayerCache` a layer, uninitialised: kernels never read a slot that no token was written to. All layers are one piece of memory,
    because huge pages do not begin or end inside a small one."""
    shape = (layout.layers, layout.kv_heads, layout.pages)
    pages = torch.empty(*shape, 2, layout.page_size, layout.head_size, dtype=layout.dtype, device=layout.device).transpose(1, 2)
    centroids = torch.empty(*shape, layout.head_size, dtype=layout.dtype, device=layout.device).transpose(1, 2)
    for part in (pages, centroids):
        use_huge_pages(part)
    return [LayerCache(layer[:, :, 0], layer[:, :, 1], means) for layer, means in zip(pages, centroids, strict=True)]


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back a CPU tensor with 2 MiB pages: reads of scattered KV pages are a third faster. Elsewhere nothing happens."""
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.untyped_storage().nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)


def gather(cache: LayerCache, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence in token order, for dense prefill over what is cached already.

    `pages` is the sequence's row of the page table, (n,), n * page size >= length. Returns two tensors (KV heads, length, head size).
    """
    count = -(-length // cache.page_size)
    _, heads, _, size = cache.keys.shape
    index = pages[:count].long()
    keys, values = (part[index].transpose(0, 1).reshape(heads, -1, size)[:, :length] for part in (cache.keys, cache.values))
    return keys, values


def copy_pages(caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
    """Copy whole pages in every layer (copy-on-write of a shared page). `source` and `target` are (n,) page numbers."""
    for cache in caches:
        for part in (cache.keys, cache.values, cache.centroids):
            part[target] = part[source]
