"""Repacked weights hold the values that they had: read back as products with the identity."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foreword.ops import grouped
from foreword.ops.protocol import Quantization
from foreword.ops.quantize import dequantize, quantize
from foreword.ops.triton.matmul import multiply
from foreword.ops.triton.packing import PackedWeight, pack_grouped, pack_plain, pack_quantized
from quantized_checkpoints import awq_tensors, gptq_tensors, round_to_four_bits

from .pages import DEVICE


def read(weight: PackedWeight) -> Tensor:
    """``[out, in]`` float32."""
    return multiply(torch.eye(weight.shape[1], device=DEVICE), weight).cpu().t()


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(40, 64), (33, 96)])
def test_our_own(scheme: Quantization, shape: tuple[int, int]) -> None:
    """Whole steps, and inputs that do not fill the last one; also groups that are zero."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[3, 32:64] = 0.0
    quantized = quantize(weight, scheme)
    packed = pack_quantized(type(quantized)(scheme, quantized.blocks.to(DEVICE), shape))
    expected = dequantize(quantized)
    assert (read(packed) - expected).abs().max() <= 2**-15 * expected.abs().max() / 7
    stored = packed.values.numel() + 4 * packed.factors.numel()
    assert stored <= quantized.blocks.numel() * math.ceil(shape[1] / 64) * 64 / shape[1]  # not a byte more


@pytest.mark.parametrize(
    ("inputs", "group", "shuffled"),
    [(64, 32, False), (96, 96, False), (256, 128, False), (192, 64, True), (128, 128, True)],
)
def test_four_bits_of_checkpoints(inputs: int, group: int, shuffled: bool) -> None:
    """In groups of any size, of inputs that are side by side or anywhere; read on the device."""
    expected = round_to_four_bits(torch.randn(24, inputs), group, shuffled=shuffled, least_zero=1)
    packed = pack_grouped(grouped.gptq(*on_device(*gptq_tensors(expected).values())))
    assert (packed.group, packed.zero_points) == (group, True)
    assert (packed.order is not None) == (shuffled and group < inputs)
    assert (read(packed) - expected.values).abs().max() <= 2**-15
    if not shuffled:
        interleaved = pack_grouped(grouped.awq(*on_device(*awq_tensors(expected).values())))
        assert torch.equal(interleaved.values, packed.values)
        assert torch.equal(interleaved.factors, packed.factors)


def test_fp8() -> None:
    """Every finite e4m3, with a scale for each output; several are for others to multiply by."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8).repeat(3, 1)
    weight, scale = codes.view(torch.float8_e4m3fn), torch.tensor([[1.0, 0.37, 1e-4]])
    packed = pack_grouped(grouped.fp8(*on_device(weight, scale)))
    assert torch.equal(read(packed), weight.float() * scale.t())
    with pytest.raises(ValueError, match="with 2 scales for an output: give one"):
        pack_grouped(grouped.fp8(weight, scale.repeat(2, 1)))


def test_plain() -> None:
    weight = torch.randn(20, 50)
    assert torch.equal(read(pack_plain(weight.to(DEVICE))), weight)
