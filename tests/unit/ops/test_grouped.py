"""Weights of quantised checkpoints: read from their layouts, joined, and in the blocks of the native kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foreword.ops import create_ops, grouped
from foreword.ops.protocol import GroupedWeight
from foreword.ops.quantize import dequantize, quantize
from quantized_checkpoints import CONFIGS, FourBits, awq_tensors, four_bit_weight, fp8_tensors, gptq_tensors
from support import native_kernels

FOUR_BITS = [name for name in CONFIGS if "bits" in CONFIGS[name]]


def plain(out: int = 24, inputs: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))


def read(name: str, weight: FourBits) -> GroupedWeight:
    """From the tensors that a checkpoint of ``CONFIGS[name]`` has."""
    if name.startswith("awq"):
        return grouped.awq(**awq_tensors(weight))
    version = 2 if "v2" in name else 1
    return grouped.gptq(**gptq_tensors(weight, version=version), zero_offset=2 - version)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits(name: str) -> None:
    """Every value to the last bit; inputs are sorted where their groups are anywhere, and only there."""
    expected = four_bit_weight(plain(), CONFIGS[name])
    weight = read(name, expected)
    assert (weight.shape, weight.group) == ((24, 128), 128 // len(expected.scales))
    assert (weight.order is not None) == ("desc_act" in name)
    assert torch.equal(dequantize(weight), expected.values)


def test_words_by_hand() -> None:
    """AutoAWQ's word of the outputs 0 .. 7 has them, from the lowest bits, in the order 0, 2, 4, 6, 1, 3, 5, 7;
    AutoGPTQ's of the inputs 0 .. 7 in order, and its zero points are one too small."""
    scales = torch.ones(1, 8).half()
    in_order, interleaved = (torch.tensor([[int(word, 16) - 2**32]], dtype=torch.int32) for word in
                             ("FEDCBA98", "FDB9ECA8"))  # fmt: skip
    weight = grouped.awq(interleaved.expand(32, 1), torch.zeros(1, 1, dtype=torch.int32), scales)
    assert weight.numbers[:, 0].tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    weight = grouped.gptq(in_order.expand(4, 8), in_order, scales)
    assert weight.numbers[0].tolist() == [8, 9, 10, 11, 12, 13, 14, 15] * 4
    assert weight.zeros is not None
    assert weight.zeros[0].tolist() == [9, 10, 11, 12, 13, 14, 15, 16]
    assert grouped.gptq(in_order.expand(4, 8), in_order, scales, zero_offset=0).zeros[0, 7] == 15  # type: ignore[index]


@pytest.mark.parametrize("name", ["fp8", "fp8 channels", "fp8 blocks"])
def test_8_bit_floats(name: str) -> None:
    tensors, expected = fp8_tensors(plain(), CONFIGS[name])
    scales = next(tensor for key, tensor in tensors.items() if "weight_scale" in key)
    if scales.dim() < 2:
        scales = scales.view(1, 1)
    scales = scales.t().repeat_interleave(-(-24 // scales.shape[0]), dim=1)[:, :24]
    weight = grouped.fp8(tensors["weight"], scales)
    assert torch.equal(dequantize(weight), expected)
    blocks = grouped.to_blocks(weight)
    assert blocks.scheme == "int8"
    assert torch.equal(blocks.blocks, quantize(expected, "int8").blocks)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_what_blocks_of_32_lose(name: str) -> None:
    """Of four bits in order only the rounding of a group's minimum to float16, less than a hundredth of the scale;
    nothing where it needs none. Others become int8."""
    weight = read(name, four_bit_weight(plain(), CONFIGS[name]))
    blocks = grouped.to_blocks(weight)
    values, found = dequantize(weight), dequantize(blocks)
    if weight.order is not None:
        assert torch.equal(blocks.blocks, quantize(values, "int8").blocks)
        return
    assert weight.zeros is not None
    scales = weight.scales.float().t().repeat_interleave(weight.group, dim=1)
    minimums = (weight.zeros * weight.scales.float()).t().repeat_interleave(weight.group, dim=1)
    lost = (found - values).abs()
    assert blocks.scheme == "int4"
    assert lost.max() > 0
    assert (lost <= 2**-11 * minimums + 1e-6 * scales).all()
    assert (lost < 0.01 * scales).all()
    rounder = GroupedWeight(weight.numbers, (weight.scales.float() * 64).round().half() / 64, weight.zeros)
    assert torch.equal(dequantize(grouped.to_blocks(rounder)), dequantize(rounder))


def test_joined() -> None:
    """One above the other if their groups are alike, else not at all."""
    first, second = (four_bit_weight(plain(16, seed=seed), CONFIGS["gptq desc_act"]) for seed in range(2))
    whole = grouped.joined([read("gptq desc_act", first), read("gptq desc_act", second)])
    assert whole is not None
    assert torch.equal(dequantize(whole), torch.cat([first.values, second.values]))
    other = first._replace(group_of=first.group_of.flip(0))
    in_order, wider = (four_bit_weight(plain(), CONFIGS[name]) for name in ("gptq v2", "gptq"))
    floats = grouped.fp8(fp8_tensors(plain(), CONFIGS["fp8"])[0]["weight"], torch.ones(4, 24))
    for unlike in (read("gptq desc_act", other), read("gptq v2", in_order), read("gptq", wider), floats):
        assert grouped.joined([read("gptq desc_act", first), unlike]) is None
        assert grouped.joined([unlike, read("gptq desc_act", first)]) is None
    several = grouped.joined([floats, floats])
    assert several is not None
    assert torch.equal(dequantize(several), dequantize(floats).repeat(2, 1))


@pytest.mark.parametrize("kernels", ["torch", *native_kernels()[:1]])
def test_products(kernels: str) -> None:
    """Each backend of the CPU takes them."""
    ops = create_ops("cpu", torch.float32, kernels, quantized=True, num_threads=1)
    x, bias = torch.randn(16, 128), torch.randn(24)
    for name in ("awq", "gptq desc_act"):
        weight = read(name, four_bit_weight(plain(), CONFIGS[name]))
        expected = x @ dequantize(weight).t() + bias
        assert (ops.linear(weight, bias)(x) - expected).abs().max() <= (1e-4 if kernels == "torch" else 0.5)


def test_what_makes_no_weight_is_refused() -> None:
    """Groups, scales beyond float16 and inputs in groups of unequal size; numbers that are none."""
    four = four_bit_weight(plain(16, 64), CONFIGS["awq"])
    tensors = awq_tensors(four)
    with pytest.raises(ValueError, match="groups of 16 inputs"):
        grouped.awq(tensors["qweight"][:32], tensors["qzeros"], tensors["scales"])
    with pytest.raises(ValueError, match="not finite in float16"):
        grouped.awq(tensors["qweight"], tensors["qzeros"], tensors["scales"].float() * 1e7)
    by_inputs = gptq_tensors(four) | {"g_idx": torch.tensor([0] * 40 + [1] * 24)}
    with pytest.raises(ValueError, match="2 groups of 32 inputs each"):
        grouped.gptq(**by_inputs)
    with pytest.raises(ValueError, match="beyond float16"):
        grouped.to_blocks(GroupedWeight(torch.ones(1, 32).byte(), torch.full((1, 1), 6e4).half(), torch.ones(1, 1) * 9))
    for weight, scales in ((math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="not finite"):
            grouped.fp8(torch.full((1, 32), weight).to(torch.float8_e4m3fn), torch.full((1, 1), scales))
