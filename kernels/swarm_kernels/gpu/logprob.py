"""Log-softmax-gather over one piece of the vocabulary in Triton, forward and backward; see `fused.py` for the pieces."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logprob_forward(logits, targets, sharpness, top, mass, chosen, columns, row_stride, BLOCK: tl.constexpr):
    """One program a row: fold the piece into the row's running maximum and sum, and pick the target's logit if it is here."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(sharpness + row)
    highest = tl.load(top + row)
    total = tl.load(mass + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + column, mask=column < columns, other=float("-inf")).to(tl.float32) * factor
        new = tl.maximum(highest, tl.max(x, axis=0))
        anchor = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(highest - anchor) + tl.sum(tl.exp(x - anchor), axis=0)
        highest = new
    tl.store(top + row, highest)
    tl.store(mass + row, total)
    target = tl.load(targets + row)
    if (target >= 0) & (target < columns):
        tl.store(chosen + row, tl.load(logits + row * row_stride + target).to(tl.float32) * factor)


@triton.jit
def logprob_backward(logits, targets, sharpness, lse, scale, gradient, columns, row_stride, gradient_stride, BLOCK: tl.constexpr):
    """One program a (row, block of columns): scale / temperature * (1 at the target - softmax); `gradient` may be `logits`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(sharpness + row)
    x = tl.load(logits + row * row_stride + column, mask=column < columns, other=float("-inf")).to(tl.float32) * factor
    share = tl.exp(x - tl.load(lse + row))
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    result = (hit - share) * (tl.load(scale + row) * factor)
    tl.store(gradient + row * gradient_stride + column, result.to(gradient.dtype.element_ty), mask=column < columns)
