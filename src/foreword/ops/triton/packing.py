"""Weights as the kernels read them: repacked once, when a model is loaded.

A product walks over a weight's inputs in steps. What a step needs of neighbouring outputs lies side by side, so that a
program reads one run of memory, and a step is two halves whose scales are each the same for a whole row:

    int8   values [steps, out, 64]    uint8, each the value + 128; a half is 32 inputs
           factors [steps, out]       two float16 in 32 bits: the scales of the first and of the second half
    int4   values [steps, out, HALF]  uint8: inputs of the first half in the low bits, of the second in the high ones
           factors [groups, out]      two float16 in 32 bits: the scale, and the minimum or the zero point
    fp8    values [steps, out, 64]    e4m3 as bytes
           factors [out]              float32
    plain  values [out, in]           as it is

HALF is 32, or 64 where groups are multiples of it. Inputs are padded with zeros to whole steps.

The layouts that are read besides our own are those of AutoAWQ (``awq/modules/linear/gemm.py`` of
``casper-hansen/AutoAWQ``) and AutoGPTQ (``auto_gptq/nn_modules/qlinear/qlinear_cuda.py`` of ``AutoGPTQ/AutoGPTQ``),
and they are those of the checkpoints that other programs write for either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from foreword.ops.protocol import QuantizedWeight
from foreword.ops.quantize import BLOCK_BYTES, GROUP, nibbles

if TYPE_CHECKING:
    from torch import Tensor

WeightFormat = Literal["plain", "int8", "int4", "fp8"]
STEP = 64
"""Inputs of a step that does not depend on groups."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs is in the bits ``4 * i .. 4 * i + 3`` of a word."""
GPTQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
_E4M3_NAN = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """See the module.

    Attributes:
        shape: ``(out, in)``.
        group: inputs that share a scale; 0 where a scale is of a whole output, or there is none.
        zero_points: a value is ``(q - zero) * scale``; otherwise ``q * scale + minimum``.
        order: ``[in]``: which input comes at each place; None: they are in order.
    """

    form: WeightFormat
    values: Tensor
    factors: Tensor
    shape: tuple[int, int]
    group: int = 0
    zero_points: bool = False
    order: Tensor | None = None

    @property
    def half(self) -> int:
        """Inputs of half a step."""
        return half_step(self.form, self.group)

    @property
    def steps(self) -> int:
        return -(-self.shape[1] // (2 * self.half))


def half_step(form: WeightFormat, group: int) -> int:
    """Inputs of half a step of a weight."""
    return 64 if form == "int4" and group % 64 == 0 else STEP // 2


def pack_plain(weight: Tensor) -> PackedWeight:
    """``weight [out, in]`` float32, float16 or bfloat16."""
    weight = weight.contiguous()
    return PackedWeight("plain", weight, weight, (weight.shape[0], weight.shape[1]))


def pack_fp8(weight: Tensor, scale: Tensor) -> PackedWeight:
    """``weight [out, in]`` float8_e4m3fn, of which output ``i`` is to be multiplied by ``scale[i]``.

    Raises:
        ValueError: another dtype or shape, or values that are not finite.
    """
    out, inputs = weight.shape
    if weight.dtype != torch.float8_e4m3fn or scale.numel() != out:
        raise ValueError(f"a weight of {weight.dtype} with {scale.numel()} scales: give {out} outputs as many scales, "
                         "and float8_e4m3fn")  # fmt: skip
    values = weight.view(torch.uint8)
    if ((values & 0x7F) == _E4M3_NAN).any() or not scale.isfinite().all():
        raise ValueError("the weight or its scales hold values that are not finite")
    values = _padded(values, STEP).view(out, -1, STEP).transpose(0, 1).contiguous()
    return PackedWeight("fp8", values, scale.reshape(-1).float().contiguous(), (out, inputs))


def pack_quantized(weight: QuantizedWeight) -> PackedWeight:
    """One of the project's own, in the bytes of GGUF files; of the bits, nothing is lost."""
    (out, inputs), size = weight.shape, BLOCK_BYTES[weight.scheme]
    blocks = weight.blocks.reshape(out, inputs // GROUP, size)
    header = size - (GROUP if weight.scheme == "int8" else GROUP // 2)
    factors = blocks[:, :, :header].contiguous().view(torch.float16).movedim(1, 0)  # [groups, out, 1 or 2]
    packed = blocks[:, :, header:].reshape(-1, size - header)
    if weight.scheme == "int4":
        return _int4(nibbles(packed).view(out, inputs), factors[..., 0], factors[..., 1], GROUP, zero_points=False)
    values = _padded(packed.reshape(out, inputs) ^ 0x80, STEP, 0x80)
    scales = _padded_rows(factors[..., 0], values.shape[1] // GROUP)  # [groups, out]
    values = values.view(out, -1, STEP).transpose(0, 1).contiguous()
    return PackedWeight("int8", values, _words(scales[0::2], scales[1::2]), weight.shape, GROUP)


def pack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> PackedWeight:
    """A 4-bit weight of AutoAWQ's: ``qweight [in, out / 8]``, ``qzeros [groups, out / 8]`` int32, ``scales [groups,
    out]``. Eight outputs are in a word, in the order :data:`AWQ_ORDER`.

    Raises:
        ValueError: shapes that do not fit together, groups that are no multiple of 32, or scales beyond float16.
    """
    inputs, out = qweight.shape[0], 8 * qweight.shape[1]
    group = _group(inputs, out, qzeros, scales)
    values = _unpacked(qweight, AWQ_ORDER)
    return _int4(values.t(), scales, _unpacked(qzeros, AWQ_ORDER), group, zero_points=True)


def pack_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, zero_offset: int = 1
) -> PackedWeight:
    """A 4-bit weight of AutoGPTQ's: ``qweight [in / 8, out]``, eight inputs in a word; ``qzeros [groups, out / 8]``,
    eight outputs in a word; both int32, the lowest bits first; ``scales [groups, out]``.

    Args:
        g_idx: ``[in]``, the group of each input; None: they are in order. Where they are not (``desc_act``), the inputs
            are sorted by group and the product's inputs gathered.
        zero_offset: what the stored zero points lack: 1 in ``checkpoint_format`` "gptq", 0 in "gptq_v2".

    Raises:
        ValueError: shapes that do not fit together, groups of unequal size or that are no multiple of 32, or scales
            beyond float16.
    """
    inputs, out = 8 * qweight.shape[0], qweight.shape[1]
    group = _group(inputs, out, qzeros, scales)
    values = _unpacked(qweight.t(), GPTQ_ORDER)  # [out, in]
    order = None
    if g_idx is not None:
        wanted = torch.arange(inputs, device=g_idx.device) // group
        if not torch.equal(g_idx.long(), wanted):
            order = g_idx.argsort(stable=True)
            if not torch.equal(g_idx.long()[order], wanted):
                raise ValueError(f"g_idx does not make {inputs // group} groups of {group} inputs each")
            values = values[:, order.to(values.device)]
    return _int4(values, scales, _unpacked(qzeros, GPTQ_ORDER) + zero_offset, group, zero_points=True, order=order)


def _group(inputs: int, out: int, qzeros: Tensor, scales: Tensor) -> int:
    """Inputs of a group."""
    groups = scales.shape[0]
    if scales.shape != (groups, out) or qzeros.shape != (groups, out // 8) or inputs % groups:
        raise ValueError(f"a weight of {out} outputs and {inputs} inputs does not fit scales of shape "
                         f"{tuple(scales.shape)} and zero points of {tuple(qzeros.shape)}")  # fmt: skip
    if (inputs // groups) % 32:
        raise ValueError(f"groups of {inputs // groups} inputs are not supported; give a multiple of 32")
    return inputs // groups


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """``[R, C]`` int32 to ``[R, 8 * C]`` uint8 below 16: bits ``4 * i ..`` of word ``c`` are ``8 * c + order[i]``."""
    shifts = torch.empty(8, dtype=torch.int32, device=words.device)
    for i, place in enumerate(order):
        shifts[place] = 4 * i
    return ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8).flatten(1)


def _int4(
    values: Tensor, scales: Tensor, offsets: Tensor, group: int, *, zero_points: bool, order: Tensor | None = None
) -> PackedWeight:
    """``values [out, in]`` below 16, ``scales, offsets [groups, out]``."""
    out, inputs = values.shape
    half = half_step("int4", group)
    halves = _padded(values, 2 * half).view(out, -1, 2, half).transpose(0, 1)  # [steps, out, 2, HALF]
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    groups = -(-2 * half * len(packed) // group)
    factors = _words(_padded_rows(scales, groups), _padded_rows(offsets, groups))
    return PackedWeight("int4", packed.contiguous(), factors, (out, inputs), group, zero_points, order)


def _words(low: Tensor, high: Tensor) -> Tensor:
    """Two numbers as float16 in 32 bits each.

    Raises:
        ValueError: one is beyond float16.
    """
    pair = torch.stack((low.half(), high.half()), dim=-1)
    if not pair.isfinite().all():
        raise ValueError("the weight's scales are not finite in float16")
    return pair.view(torch.int32).squeeze(-1).contiguous()


def _padded(values: Tensor, step: int, filling: int = 0) -> Tensor:
    """``[out, in]`` with whole steps."""
    missing = -values.shape[1] % step
    return torch.nn.functional.pad(values, (0, missing), value=filling) if missing else values.contiguous()


def _padded_rows(rows: Tensor, count: int) -> Tensor:
    """With ``count`` rows: groups beyond the inputs have the scale 0."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))
