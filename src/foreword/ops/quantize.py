"""Weights in groups of 32 inputs, as GGUF files store them: 8 bits with a scale, 4 bits with a scale and a minimum."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.ops.protocol import GroupedWeight, Quantization, QuantizedWeight

GROUP = 32
BLOCK_BYTES: dict[Quantization, int] = {"int8": 34, "int4": 20}
"""Bytes of a group."""

_LARGEST: dict[Quantization, float] = {"int8": 127 * 65504.0, "int4": 65504.0}
"""Values up to here have a scale, and a minimum, that float16 holds."""

_CANDIDATES = 16
"""Ranges tried per 4-bit group: the full one and ever narrower ones, which give up extremes for a finer grid."""


def quantize(weight: Tensor, scheme: Quantization) -> QuantizedWeight:
    """Quantise ``weight [out, in]``; ``in`` is a multiple of 32.

    Raises:
        ValueError: it is not, or the weight holds values that are not finite or whose scales float16 cannot hold.
    """
    out, inputs = weight.shape
    if inputs % GROUP:
        raise ValueError(f"a weight of {inputs} inputs cannot be quantised in groups of {GROUP}")
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds values that are not finite")
    if weight.numel() and (largest := weight.abs().max().item()) > _LARGEST[scheme]:
        raise ValueError(f"the weight holds values too large for float16 scales: up to {largest:.3g}")
    parts = [_BLOCKS[scheme](rows.float().reshape(-1, GROUP)).reshape(len(rows), -1) for rows in weight.split(4096)]
    return QuantizedWeight(scheme, torch.cat(parts), (out, inputs))


def dequantize(weight: QuantizedWeight | GroupedWeight) -> Tensor:
    """``[out, in]`` float32, the inputs in their own order."""
    if isinstance(weight, GroupedWeight):
        values = weight.numbers.float().unflatten(1, (len(weight.scales), -1))  # [out, groups, inputs]
        if weight.zeros is not None:
            values -= weight.zeros.t().unsqueeze(-1)
        values = (values * weight.scales.t().float().unsqueeze(-1)).flatten(1)
        return values if weight.order is None else torch.empty_like(values).index_copy_(1, weight.order, values)
    unpack = unpack_q8_0 if weight.scheme == "int8" else unpack_q4_1
    return unpack(weight.blocks.reshape(-1, BLOCK_BYTES[weight.scheme])).reshape(weight.shape)


def unpack_q8_0(blocks: Tensor) -> Tensor:
    """``[G, 34]`` bytes, of a block the scale (2) and the signed values (32), to ``[G, 32]`` float32."""
    return half_at(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def unpack_q4_1(blocks: Tensor) -> Tensor:
    """``[G, 20]`` bytes, of a block the scale (2), the minimum (2) and the values (16), to ``[G, 32]`` float32."""
    return half_at(blocks, 0) * nibbles(blocks[:, 4:]).float() + half_at(blocks, 2)


def half_at(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, in float32 ``[G, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """``[G, 16]`` bytes to ``[G, 32]`` values below 16: all low halves come first, then all high ones."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=1)


def q4_1_blocks(scales: Tensor, minimums: Tensor, values: Tensor) -> Tensor:
    """``scales, minimums [G, 1]`` float16 and ``values [G, 32]`` uint8 below 16 to ``[G, 20]`` bytes."""
    packed = values[:, :16] | values[:, 16:] << 4
    return torch.cat((scales.view(torch.uint8), minimums.view(torch.uint8), packed), dim=1)


def joined(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """Several weights of one scheme and one number of inputs, one above the other."""
    first = weights[0]
    blocks = first.blocks if len(weights) == 1 else torch.cat([weight.blocks for weight in weights])
    return QuantizedWeight(first.scheme, blocks, (sum(weight.shape[0] for weight in weights), first.shape[1]))


def _int8_blocks(groups: Tensor) -> Tensor:
    """``[G, 32]`` float to ``[G, 34]`` bytes."""
    scale = (groups.abs().amax(1, keepdim=True) / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    values = (groups * inverse).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), values.view(torch.uint8)), dim=1)


def _int4_blocks(groups: Tensor) -> Tensor:
    """``[G, 32]`` float to ``[G, 20]`` bytes: of several ranges the one with the least squared error, refined by a
    least-squares fit of scale and minimum to the values chosen."""
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best = torch.zeros(len(groups), GROUP, dtype=torch.uint8, device=groups.device)
    best_scale, best_minimum = torch.zeros_like(low, dtype=torch.float16), low.half()
    for candidate in range(_CANDIDATES):
        shrink = 0.02 * candidate * (high - low) / 2
        scale, minimum = _fit(groups, _nearest(groups, (high - low - 2 * shrink) / 15, low + shrink))
        scale, minimum = scale.half(), minimum.half()
        values = _nearest(groups, scale.float(), minimum.float())
        error = (values * scale.float() + minimum.float() - groups).square_().sum(1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
        best = torch.where(better, values.to(torch.uint8), best)
    return q4_1_blocks(best_scale, best_minimum, best)


def _nearest(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((groups - minimum) * inverse).round_().clamp_(0, 15)


def _fit(groups: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, ``[G, 1]`` each, that bring ``values`` closest to ``groups`` in least squares."""
    mean, center = values.mean(1, keepdim=True), groups.mean(1, keepdim=True)
    spread = (values - mean).square().sum(1, keepdim=True)
    scale = ((values - mean) * (groups - center)).sum(1, keepdim=True) / spread.clamp_min(1e-9)
    return scale, center - scale * mean


_BLOCKS = {"int8": _int8_blocks, "int4": _int4_blocks}
