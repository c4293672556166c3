"""Weights in groups of 32: what is stored, how far it is from the weight, what is refused."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.ops.quantize import GROUP, dequantize, joined, quantize

SCHEMES: list[Any] = ["int8", "int4"]
schemes = pytest.mark.parametrize("scheme", SCHEMES)
GGML = {"int8": gguf.GGMLQuantizationType.Q8_0, "int4": gguf.GGMLQuantizationType.Q4_1}
BYTES = {"int8": 34, "int4": 20}


def random_weight(out: int = 40, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))


@schemes
@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (5000, 32)], ids=str)
def test_blocks_are_those_of_gguf(scheme: Any, shape: tuple[int, int]) -> None:
    """The reference in the gguf package reads them as we do, bit for bit."""
    weight = quantize(random_weight(*shape), scheme)
    assert weight.blocks.dtype == torch.uint8
    assert weight.blocks.shape == (shape[0], shape[1] // GROUP * BYTES[scheme])
    assert weight.shape == shape
    assert np.array_equal(gguf.quants.dequantize(weight.blocks.numpy(), GGML[scheme]), dequantize(weight).numpy())


@schemes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_within_half_a_step(scheme: Any, dtype: torch.dtype) -> None:
    """8 bits: half of the largest over 127. 4 bits: on average far better than half of the range over 15."""
    weight = random_weight(seed=3).to(dtype)
    groups = weight.float().reshape(-1, GROUP)
    error = (dequantize(quantize(weight, scheme)).reshape(-1, GROUP) - groups).abs()
    if scheme == "int8":
        step = groups.abs().amax(1, keepdim=True) / 127
        assert (error <= 0.5 * step * 1.07).all()  # the scale is rounded to 11 bits, which 127 steps feel
    else:
        step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
        assert (error.square().mean(1, keepdim=True).sqrt() <= step / math.sqrt(12) * 1.25).all()


@schemes
def test_four_bits_are_better_than_plain_rounding(scheme: Any) -> None:
    """No group is worse than with the full range, and all together are better; 8 bits beat 4 by far."""
    weight = random_weight(200, 320, seed=5)
    groups = weight.reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    minimum = low.half().float()
    plain = ((groups - minimum) / scale).round().clamp(0, 15) * scale + minimum
    ours = dequantize(quantize(weight, scheme)).reshape(-1, GROUP)
    ours_error, plain_error = ((x - groups).square().sum(1) for x in (ours, plain))
    assert (ours_error <= plain_error * 1.02).all()
    assert ours_error.sum() < (0.95 if scheme == "int4" else 0.01) * plain_error.sum()


@schemes
def test_quantising_what_was_quantised_changes_little(scheme: Any) -> None:
    once = dequantize(quantize(random_weight(), scheme))
    twice = dequantize(quantize(once, scheme))
    step = once.abs().max() / (127 if scheme == "int8" else 7)
    assert (twice - once).abs().max() < 0.1 * step


@schemes
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.3, -1e-3, 700.0])
def test_constant_groups_stay_what_they_are(scheme: Any, value: float) -> None:
    """To the precision of a float16; zero exactly, and next to it nothing is lost."""
    weight = torch.zeros(3, 64)
    weight[1] = value
    weight[2, 32:] = value
    found = dequantize(quantize(weight, scheme))
    assert torch.equal(found == 0, weight == 0)
    torch.testing.assert_close(found, weight, rtol=1e-3, atol=0)


@schemes
def test_one_value_among_zeros_survives(scheme: Any) -> None:
    weight = torch.zeros(32, 32)
    weight[range(32), range(32)] = torch.linspace(-3, 3, 32)
    found = dequantize(quantize(weight, scheme))
    torch.testing.assert_close(found, weight, rtol=2e-3, atol=2e-3)


@given(st.integers(0, 10_000), st.floats(-3, 3), st.sampled_from(SCHEMES))
def test_any_scale_and_offset_is_kept(seed: int, exponent: float, scheme: Any) -> None:
    """Relative to the group's size, the error does not grow with the weights' size or offset."""
    offset = torch.randn(4, 1, generator=torch.Generator().manual_seed(seed))
    weight = (random_weight(4, 64, seed) + offset) * 10**exponent
    groups = weight.reshape(-1, GROUP)
    error = (dequantize(quantize(weight, scheme)).reshape(-1, GROUP) - groups).abs().amax(1)
    size = groups.abs().amax(1)
    assert (error <= size * (0.005 if scheme == "int8" else 0.16)).all()


@schemes
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(scheme: Any, bad: float) -> None:
    weight = random_weight()
    weight[17, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, scheme)


@schemes
def test_weights_too_large_for_their_scales_are_refused(scheme: Any) -> None:
    weight = random_weight()
    weight[17, 5] = 1e8
    with pytest.raises(ValueError, match=r"too large.*1e\+08"):
        quantize(weight, scheme)


@schemes
def test_a_width_that_is_no_multiple_of_a_group_is_refused(scheme: Any) -> None:
    with pytest.raises(ValueError, match="48 inputs"):
        quantize(torch.ones(4, 48), scheme)


@schemes
def test_joined_weights_lie_one_above_the_other(scheme: Any) -> None:
    parts = [quantize(random_weight(rows, seed=rows), scheme) for rows in (5, 1, 18)]
    whole = joined(parts)
    assert whole.shape == (24, 96)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))
    assert joined(parts[:1]).blocks is parts[0].blocks
