"""Weights of quantised checkpoints, in groups of any size: read from the layouts that such files have.

The layouts are those of AutoAWQ (``awq/modules/linear/gemm.py`` of ``casper-hansen/AutoAWQ``) and AutoGPTQ
(``auto_gptq/nn_modules/qlinear/qlinear_cuda.py`` of ``AutoGPTQ/AutoGPTQ``), in which other programs write too, and
8-bit floats with their scales beside them. Each backend holds what comes of them as its kernels read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.ops.protocol import GroupedWeight, QuantizedWeight
from foreword.ops.quantize import GROUP, dequantize, q4_1_blocks, quantize


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedWeight:
    """A 4-bit weight of AutoAWQ's "gemm": ``qweight [in, out / 8]`` and ``qzeros [groups, out / 8]`` int32, ``scales
    [groups, out]``. Eight outputs are in a word, from the lowest bits in the order 0, 2, 4, 6, 1, 3, 5, 7.

    Raises:
        ValueError: groups that are no multiple of 32, or scales beyond float16.
    """
    numbers, zeros = _interleaved(qweight), _interleaved(qzeros)
    return _four_bits(numbers, scales, zeros.t().contiguous())


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, zero_offset: int = 1
) -> GroupedWeight:
    """A 4-bit weight of AutoGPTQ's: ``qweight [in / 8, out]``, eight inputs in a word; ``qzeros [groups, out / 8]``,
    eight outputs in a word; both int32, the lowest bits first; ``scales [groups, out]``.

    Args:
        g_idx: ``[in]``, the group of each input; None: they are in order. Where they are not (``desc_act``), they are
            sorted by group.
        zero_offset: what the stored zero points lack: 1 in ``checkpoint_format`` "gptq", 0 in "gptq_v2".

    Raises:
        ValueError: groups of unequal size or that are no multiple of 32, or scales beyond float16.
    """
    numbers, order = _nibbles(qweight.t()), None
    if g_idx is not None:
        inputs, groups = len(g_idx), len(scales)
        wanted = torch.arange(inputs, device=g_idx.device) // (inputs // groups)
        if not torch.equal(g_idx.long(), wanted):
            order = g_idx.argsort(stable=True)
            if not torch.equal(g_idx.long()[order], wanted):
                raise ValueError(f"g_idx does not make {groups} groups of {inputs // groups} inputs each")
            numbers = numbers[:, order]
    return _four_bits(numbers, scales, _nibbles(qzeros) + zero_offset, order)


def fp8(weight: Tensor, scales: Tensor) -> GroupedWeight:
    """``weight [out, in]`` float8_e4m3fn and what to multiply it by: ``scales [groups, out]``.

    Raises:
        ValueError: values that are not finite.
    """
    if ((weight.view(torch.uint8) & 0x7F) == 0x7F).any() or not scales.isfinite().all():
        raise ValueError("the weight or its scales hold values that are not finite")
    return GroupedWeight(weight, scales.float().contiguous())


def joined(weights: list[GroupedWeight]) -> GroupedWeight | None:
    """Several weights of the same inputs, one above the other; None if their groups differ."""
    first = weights[0]
    if len({(each.numbers.dtype, len(each.scales)) for each in weights}) > 1:
        return None
    orders = [each.order for each in weights if each.order is not None]
    if orders and not (len(orders) == len(weights) and all(torch.equal(order, orders[0]) for order in orders)):
        return None
    zeros = [each.zeros for each in weights if each.zeros is not None]
    return GroupedWeight(
        torch.cat([each.numbers for each in weights]),
        torch.cat([each.scales for each in weights], dim=1),
        torch.cat(zeros, dim=1) if zeros else None,
        first.order,
    )


def to_blocks(weight: GroupedWeight) -> QuantizedWeight:
    """For kernels that know blocks of 32 inputs only. Four bits in order become "int4" with the same numbers and
    scales: ``-zero * scale`` is the minimum, and its rounding to float16, below a hundredth of a scale, is all that is
    lost. Anything else is quantised anew to "int8".

    Raises:
        ValueError: the inputs are no multiple of 32, or a minimum is beyond float16.
    """
    if weight.zeros is None or weight.order is not None:
        return quantize(dequantize(weight), "int8")
    minimums = (weight.scales.float() * -weight.zeros.float()).half()
    if not minimums.isfinite().all():
        raise ValueError("the weight's zero points times their scales are beyond float16")
    scales, minimums = (
        each.t().repeat_interleave(weight.group // GROUP, dim=1).reshape(-1, 1) for each in (weight.scales, minimums)
    )  # [blocks, 1]
    blocks = q4_1_blocks(scales, minimums, weight.numbers.reshape(-1, GROUP))
    return QuantizedWeight("int4", blocks.reshape(weight.shape[0], -1), weight.shape)


def _four_bits(numbers: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None) -> GroupedWeight:
    weight = GroupedWeight(numbers, scales.half(), zeros, order)
    if weight.group % GROUP:
        raise ValueError(f"groups of {weight.group} inputs are not supported; give a multiple of {GROUP}")
    if not weight.scales.isfinite().all():
        raise ValueError("the weight's scales are not finite in float16")
    return weight


def _nibbles(words: Tensor) -> Tensor:
    """``[R, C]`` int32 to ``[R, 8 * C]`` uint8 below 16, of each word the lowest bits first."""
    packed = words.contiguous().view(torch.uint8)
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1)


def _interleaved(words: Tensor) -> Tensor:
    """``[R, C]`` int32 of AutoAWQ's to ``[8 * C, R]``, all rows in order. Quick, as it moves whole runs of bytes."""
    rows, columns = words.shape
    packed = words.t().clone(memory_format=torch.contiguous_format).view(torch.uint8).view(columns, rows, 2, 2)
    packed = packed.permute(0, 3, 2, 1)  # [C, k, odd, R]: half ``n`` of a byte is row 4 * k + 2 * n + odd of eight
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).reshape(8 * columns, rows)
