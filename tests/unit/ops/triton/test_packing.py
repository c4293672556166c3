"""Repacked weights hold the values that they had: read back as products with the identity."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foreword.ops.protocol import Quantization
from foreword.ops.quantize import dequantize, quantize
from foreword.ops.triton.matmul import multiply
from foreword.ops.triton.packing import PackedWeight, pack_awq, pack_fp8, pack_gptq, pack_plain, pack_quantized

from .pages import DEVICE

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that AutoAWQ puts in each nibble of a word, from the lowest: ``order_map`` of its ``from_linear``."""


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


def random_4_bit(out: int, inputs: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers ``[in, out]`` below 16, scales and zero points ``[groups, out]``."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (inputs, out), generator=generator)
    scales = (0.01 + torch.rand(inputs // group, out, generator=generator)).half()
    return numbers, scales, torch.randint(0, 16, (inputs // group, out), generator=generator)


def words(numbers: Tensor, nibbles: tuple[int, ...]) -> Tensor:
    """Eight neighbours of a row in 32 bits; ``nibbles``: which of them is in each nibble, from the lowest."""
    result = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, which in enumerate(nibbles):
        result |= numbers[:, which::8] << (4 * place)
    return (result - (result >> 31 << 32)).int()


@pytest.mark.parametrize(("inputs", "group"), [(64, 32), (96, 96), (256, 128), (192, 64)])
def test_awq(inputs: int, group: int) -> None:
    """As AutoAWQ's ``WQLinear_GEMM.from_linear`` packs: outputs interleaved, zero points as they are."""
    numbers, scales, zeros = random_4_bit(24, inputs, group)
    packed = pack_awq(*on_device(words(numbers, AWQ_NIBBLES), words(zeros, AWQ_NIBBLES), scales))
    each = torch.arange(inputs) // group
    expected = (numbers - zeros[each]) * scales.float()[each]
    assert (packed.group, packed.zero_points) == (group, True)
    assert (read(packed) - expected.t()).abs().max() <= 2**-15


@pytest.mark.parametrize(("checkpoint_format", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize(("inputs", "group", "shuffled"), [(64, 32, False), (128, 128, False), (192, 64, True)])
def test_gptq(inputs: int, group: int, shuffled: bool, checkpoint_format: str, offset: int) -> None:
    """As AutoGPTQ's ``QuantLinear.pack`` packs: inputs in order, zero points less one; and with ``desc_act``."""
    numbers, scales, zeros = random_4_bit(24, inputs, group)
    zeros = zeros.clamp(min=offset)
    each = torch.arange(inputs) // group
    if shuffled:
        each = each[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    qweight = words(numbers.t(), tuple(range(8))).t().contiguous()
    qzeros = words(zeros - offset, tuple(range(8)))
    tensors = on_device(qweight, qzeros, scales, each.int())
    packed = pack_gptq(*tensors) if checkpoint_format == "gptq" else pack_gptq(*tensors, zero_offset=0)
    expected = (numbers - zeros[each]) * scales.float()[each]
    assert (packed.order is not None) == shuffled
    assert (read(packed) - expected.t()).abs().max() <= 2**-15
    if not shuffled:
        without = pack_gptq(*tensors[:3], zero_offset=offset)
        assert torch.equal(without.values, packed.values)


def test_words_of_the_published_layouts() -> None:
    """By hand: AutoAWQ's word of the outputs 0 .. 7 from the lowest nibble is 0, 2, 4, 6, 1, 3, 5, 7; AutoGPTQ's of
    the inputs 0 .. 7 is as they come."""
    scales, zeros = torch.ones(1, 8).half(), torch.zeros(1, 1, dtype=torch.int32)
    awq = torch.full((32, 1), 0x75316420, dtype=torch.int32)
    assert torch.equal(read(pack_awq(*on_device(awq, zeros, scales)))[:, 5], torch.arange(8.0))
    gptq = torch.full((4, 8), 0x76543210, dtype=torch.int32)
    packed = pack_gptq(*on_device(gptq, zeros, scales), zero_offset=0)
    assert torch.equal(read(packed)[3], torch.arange(8.0).repeat(4))


def test_fp8() -> None:
    """Every finite e4m3, with a scale for each output."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8).repeat(3, 1)
    weight, scale = codes.view(torch.float8_e4m3fn), torch.tensor([1.0, 0.37, 1e-4])
    packed = pack_fp8(*on_device(weight, scale))
    assert torch.equal(read(packed), weight.float() * scale[:, None])
    with pytest.raises(ValueError, match="not finite"):
        pack_fp8(torch.tensor([[math.nan]]).to(torch.float8_e4m3fn), torch.ones(1))
    with pytest.raises(ValueError, match=r"torch\.float32 with 2 scales: give 3 outputs"):
        pack_fp8(torch.ones(3, 4), torch.ones(2))


def test_plain() -> None:
    weight = torch.randn(20, 50)
    assert torch.equal(read(pack_plain(weight.to(DEVICE))), weight)


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, groups, scales beyond float16, and inputs in groups of unequal size."""
    numbers, scales, zeros = random_4_bit(16, 64, 32)
    qweight, qzeros = words(numbers, AWQ_NIBBLES), words(zeros, AWQ_NIBBLES)
    with pytest.raises(ValueError, match="16 outputs and 64 inputs does not fit scales"):
        pack_awq(qweight, qzeros[:1], scales)
    with pytest.raises(ValueError, match="groups of 16 inputs"):
        pack_awq(qweight[:32], qzeros, scales)
    with pytest.raises(ValueError, match="not finite in float16"):
        pack_awq(qweight, qzeros, scales.float() * 1e6)
    by_inputs = words(numbers.t(), tuple(range(8))).t()
    with pytest.raises(ValueError, match="2 groups of 32 inputs each"):
        pack_gptq(by_inputs, qzeros, scales, torch.tensor([0] * 40 + [1] * 24))
