"""The argument structures of the C interface, field for field as in the headers beside this file."""

from __future__ import annotations

import ctypes

import torch

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def _fields(pointers: str, strides: str, integers: str) -> list[tuple[str, type]]:
    kinds = ((pointers, ctypes.c_void_p), (strides, ctypes.c_int64), (integers, ctypes.c_int32))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class AppendArguments(ctypes.Structure):
    """See `append.h`."""

    _fields_ = _fields(
        "keys values query cosines sines slots cache_keys cache_values centroids",
        "key_token key_head value_token value_head query_token query_head angle_token page_stride head_stride centroid_page centroid_head",
        "dtype tokens kv_heads query_heads head_size page_size threads",
    )


class SelectArguments(ctypes.Structure):
    """See `selection.h`."""

    _fields_ = _fields(
        "query centroids table lengths budgets pages",
        "query_sequence query_head centroid_page centroid_head table_sequence",
        "dtype batch kv_heads group head_size page_size list_width threads",
    )


class AttendArguments(ctypes.Structure):
    """See `attention.h`."""

    _fields_ = [
        *_fields(
            "query keys values table lengths pages out lse partial",
            "query_sequence query_head page_stride head_stride table_sequence pages_sequence pages_head out_sequence out_head",
            "dtype batch kv_heads group head_size page_size list_width window splits threads",
        ),
        ("scale", ctypes.c_float),
    ]


class DecodeArguments(ctypes.Structure):
    """See `decode.h`."""

    _fields_ = [("append", AppendArguments), ("select", SelectArguments), ("attend", AttendArguments), ("sparse", ctypes.c_int32)]


class LogprobArguments(ctypes.Structure):
    """See `logprob.h`."""

    _fields_ = _fields(
        "logits targets sharpness top mass chosen lse scale gradient", "row_stride gradient_stride", "dtype rows columns threads"
    )


class NormArguments(ctypes.Structure):
    """See `elementwise.h`."""

    _fields_ = [*_fields("hidden delta weight total out", "", "dtype rows columns threads"), ("epsilon", ctypes.c_float)]


class GateArguments(ctypes.Structure):
    """See `elementwise.h`."""

    _fields_ = _fields("gates values out", "count", "dtype threads")


class Product(ctypes.Structure):
    """See `linear.h`."""

    _fields_ = _fields("weight bias out a b", "", "outputs rank")


class LinearArguments(ctypes.Structure):
    """See `linear.h`."""

    _fields_ = [("product", Product), *_fields("input packed", "", "rows inputs threads")]


class NormWeight(ctypes.Structure):
    """See `stack.h`."""

    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class LayerArguments(ctypes.Structure):
    """See `stack.h`."""

    _fields_ = [
        *((name, NormWeight) for name in ("input_norm", "query_norm", "key_norm", "middle_norm")),
        *((name, Product) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *_fields("cache_keys cache_values centroids", "", ""),
        ("scale", ctypes.c_float),
        *_fields("", "", "window rotary sparse"),
    ]


class PromptArguments(ctypes.Structure):
    """See `prompt.h`."""

    _fields_ = [
        *_fields(
            "query keys values bounds starts table out",
            "query_token query_head page_stride head_stride table_sequence out_token out_head",
            "chunks kv_heads group head_size page_size window threads",
        ),
        ("scale", ctypes.c_float),
    ]


class StackArguments(ctypes.Structure):
    """See `stack.h`."""

    _fields_ = [
        ("step", DecodeArguments),
        ("prompt", PromptArguments),
        ("layers", ctypes.POINTER(LayerArguments)),
        ("final_norm", NormWeight),
        *_fields("hidden normed delta query keys values attended gates ups packed inner_product", "", "rows width inner count threads"),
    ]


class DrawArguments(ctypes.Structure):
    """See `draw.h`."""

    _fields_ = [
        *_fields("logits uniforms ids logprobs", "row_stride", "dtype rows columns"),
        ("temperature", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


STRUCTURES = (
    AppendArguments,
    SelectArguments,
    AttendArguments,
    DecodeArguments,
    LogprobArguments,
    NormArguments,
    GateArguments,
    LinearArguments,
    LayerArguments,
    StackArguments,
    DrawArguments,
    PromptArguments,
)
