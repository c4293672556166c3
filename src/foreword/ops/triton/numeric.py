# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Number formats and functions that the kernels share.

The 8-bit floating point format is e4m3 (4 bits of exponent with bias 7, 3 of mantissa, no infinities, NaN 0x7f), here
as bytes that are coded and decoded in integer and float32 arithmetic: that gives the same bits on every device, also on
those before sm_89, which lack the conversion.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""The kernels run in Triton's interpreter. Its bfloat16 arithmetic is wrong, so there they compute in float32."""

LOG2_E = 1.4426950408889634

_DOT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_type(dtype: torch.dtype) -> Any:
    """What products of ``dtype`` are computed in."""
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _DOT[dtype]


@cache
def native_fp8(device: torch.device) -> bool:
    """The device converts e4m3 by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def round_even(x):
    """float32 of magnitude below 2**22 to the nearest integer, ties to even: the sum has no bits for fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tanh(x):
    """By exp2, as there is no such function everywhere; the absolute error is that of float32 near 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def encode_e4m3(x):
    """float32 to the byte of the nearest e4m3, ties to even; beyond its range to the largest, 448. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    rounded = size.to(tl.uint32, bitcast=True)
    rounded += 0x7FFFF + ((rounded >> 20) & 1)
    normal = (rounded >> 20) - 960  # the exponent's bias from 127 to 7
    subnormal = round_even(size * 512.0).to(tl.uint32)  # multiples of 2**-9
    code = tl.where(size < 0.015625, subnormal, normal)
    return (sign | tl.where(x == x, code, 0x7F)).to(tl.uint8)


@triton.jit
def decode_e4m3(byte):
    """The byte of an e4m3 to float16, exactly: its bits lie as in a float16 whose exponent is 8 too small."""
    code = byte.to(tl.uint16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def byte_to_float(byte, ZERO: tl.constexpr):
    """A byte minus ``ZERO`` in float32: set as the lowest bits of 2**23, which costs less than a conversion."""
    return (byte.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
