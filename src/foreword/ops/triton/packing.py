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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from foreword.ops.protocol import GroupedWeight, QuantizedWeight
from foreword.ops.quantize import BLOCK_BYTES, GROUP, nibbles

if TYPE_CHECKING:
    from torch import Tensor

WeightFormat = Literal["plain", "int8", "int4", "fp8"]
STEP = 64
"""Inputs of a step that does not depend on groups."""


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


def pack_grouped(weight: GroupedWeight) -> PackedWeight:
    """One of a quantised checkpoint's, on this device; of the bits, nothing is lost.

    Raises:
        ValueError: 8-bit floats with several scales for an output.
    """
    if weight.zeros is not None:
        factors = weight.scales, weight.zeros
        return _int4(weight.numbers, *factors, weight.group, zero_points=True, order=weight.order)
    if len(weight.scales) > 1:
        raise ValueError(f"8-bit floats with {len(weight.scales)} scales for an output: give one")
    values = _padded(weight.numbers.view(torch.uint8), STEP)
    values = values.view(len(values), -1, STEP).transpose(0, 1).contiguous()
    return PackedWeight("fp8", values, weight.scales[0], weight.shape)


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
