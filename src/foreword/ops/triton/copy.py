# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Copies of slots within a pool (copy-on-write) and between the device's pool and one in pinned main memory.

The same kernel does both: pinned memory has an address on the device, so a copy of many small pieces, one per layer and
head, is one launch instead of as many calls. It goes to the current stream, as all kernels do; see
:mod:`foreword.ops.triton.streams` for others.

No GPU has run this kernel yet; it is tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from foreword.ops.protocol import SlotCopy
from foreword.ops.transfer import upload

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""32-bit words of a program."""
NUM_WARPS = 4


@triton.jit
def copy_kernel(source, target, copies, source_stride, target_stride, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: ``BLOCK`` words of one copy in one plane (layer, keys or values, head).

    ``copies [C, 3]``: first slots of source and target, number of slots; ``WORDS``: of a slot; strides in words.
    """
    copy = copies + tl.program_id(0) * 3
    plane = tl.program_id(1).to(tl.int64)
    first = tl.load(copy).to(tl.int64)
    second = tl.load(copy + 1).to(tl.int64)
    words = tl.load(copy + 2) * WORDS
    offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < words
    data = tl.load(source + plane * source_stride + first * WORDS + offset, mask=inside)
    tl.store(target + plane * target_stride + second * WORDS + offset, data, mask=inside)


def copy_slots(source: Tensor, target: Tensor, copies: Sequence[SlotCopy]) -> None:
    """Carry out ``copies``, in this order, from ``source`` to ``target``: pools ``[num_layers, 2, num_kv_heads,
    num_slots, row_width]`` of one geometry, or the same pool. Nothing waits for their end.

    Raises:
        ValueError: pools that differ in more than their slots, or rows that are no multiple of 4 bytes.
    """
    shapes = [(*pool.shape[:3], pool.shape[4]) for pool in (source, target)]
    if shapes[0] != shapes[1] or source.dtype != target.dtype:
        raise ValueError(f"pools of {shapes[0]} {source.dtype} and {shapes[1]} {target.dtype}; give one geometry")
    row_bytes = source.shape[4] * source.element_size()
    if row_bytes % 4:
        raise ValueError(f"rows of {row_bytes} bytes cannot be copied; their size must be a multiple of 4")
    planes = source.shape[0] * source.shape[1] * source.shape[2]
    device = target.device if source.device.type == "cpu" else source.device
    words = row_bytes // 4
    for round_ in rounds(copies) if source is target else [copies]:
        if not round_:
            continue
        longest = max(copy.length for copy in round_) * words
        copy_kernel[len(round_), planes, triton.cdiv(longest, BLOCK)](
            source.view(torch.int32), target.view(torch.int32), upload(np.array(round_, np.int32), device),
            source.shape[3] * words, target.shape[3] * words, WORDS=words, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


def rounds(copies: Sequence[SlotCopy]) -> Iterator[list[SlotCopy]]:
    """``copies`` in runs that may be done side by side: none writes what another of its run reads or writes."""
    run: list[SlotCopy] = []
    for copy in copies:
        if any(_conflict(copy, other) for other in run):
            yield run
            run = []
        run.append(copy)
    yield run


def _conflict(one: SlotCopy, two: SlotCopy) -> bool:
    """One of the two writes where the other reads or writes."""

    def meet(first: int, second: int) -> bool:
        return first < second + two.length and second < first + one.length

    return meet(one.target, two.target) or meet(one.target, two.source) or meet(one.source, two.target)
