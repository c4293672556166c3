# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The most likely token of each row of logits, found on the device, so that tokens are all that leaves it.

No GPU has run these kernels yet; they are tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2048
"""Logits of a program."""
NUM_WARPS = 4


@triton.jit
def largest_kernel(logits, values, tokens, stride, width, BLOCK: tl.constexpr):
    """One program: ``BLOCK`` logits of row ``program_id(0)``; their largest value and where it is first.

    A NaN counts as infinity: either way the row's result is none.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < width, other=float("-inf"))
    value = tl.where(value == value, value, float("inf"))
    largest = tl.max(value, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(values + place, largest)
    tl.store(tokens + place, tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0))


@triton.jit
def argmax_kernel(values, tokens, output, parts, BLOCK: tl.constexpr):
    """One program: the parts of a row. ``output [R]``: the token, or -1 if its logit is not finite."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < parts
    value = tl.load(values + row * parts + part, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=inside, other=0x7FFFFFFF)
    largest = tl.max(value, axis=0)
    first = tl.min(tl.where(value == largest, token, 0x7FFFFFFF), axis=0)
    tl.store(output + row, tl.where(tl.abs(largest) < float("inf"), first, -1))


def argmax_constants(width: int) -> dict[str, int]:
    """The compile-time parameters of :func:`argmax_kernel` for rows of ``width`` logits."""
    return {"BLOCK": triton.next_power_of_2(triton.cdiv(width, BLOCK))}


def argmax(logits: Tensor) -> Tensor:
    """``[R]`` int32: the index of the largest of each row of ``logits [R, V]`` float32, the first of equals; -1 where a
    NaN is or the largest is infinite. Nothing waits for the device."""
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(width, BLOCK)
    output = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
        largest_kernel[rows, parts](logits, values, tokens, logits.stride(0), width, BLOCK=BLOCK, num_warps=NUM_WARPS)
        argmax_kernel[rows,](values, tokens, output, parts, **argmax_constants(width), num_warps=1)
    return output
