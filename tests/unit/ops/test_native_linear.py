"""The native linear layers of every kernel path: right, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword.ops.cpu.native import NativeOps
from foreword.ops.protocol import QuantizedWeight
from foreword.ops.quantize import dequantize, quantize
from support import native_kernels

KINDS: list[Any] = [torch.float32, torch.bfloat16, "int8", "int4"]
SHAPES = [(16, 32), (1, 32), (15, 64), (17, 96), (100, 576), (70, 1536)]  # [out, in]

paths = pytest.mark.parametrize("kernels", native_kernels())
kinds = pytest.mark.parametrize("kind", KINDS, ids=["f32", "bf16", "q8", "q4"])


def native(kernels: str, threads: int = 1) -> NativeOps:
    return NativeOps(torch.float32, kernels, num_threads=threads)


def stored(weight: Tensor, kind: Any) -> Tensor | QuantizedWeight:
    return quantize(weight, kind) if isinstance(kind, str) else weight.to(kind)


def values_of(weight: Tensor | QuantizedWeight) -> Tensor:
    """The stored weight in double precision."""
    return (dequantize(weight) if isinstance(weight, QuantizedWeight) else weight).double()


def seen_by(kind: Any, x: Tensor) -> Tensor:
    """Rows as the layer sees them, in double precision: 8 bits per group of 32 for quantised weights."""
    if not isinstance(kind, str):
        return x.double()
    groups = x.reshape(len(x), -1, 32)
    top = groups.abs().amax(-1, keepdim=True)
    steps = (groups * torch.where(top > 0, 127 / top, 0.0)).round()
    return (steps.double() * (top / 127).double()).reshape(x.shape)


def sample(out: int, inputs: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, rows, bias; groups differ widely in size, and one of each is zero."""
    generator = torch.Generator().manual_seed(out + inputs)
    weight, x = (torch.randn(n, inputs, generator=generator) for n in (out, rows))
    for tensor in (weight, x):
        tensor *= torch.logspace(-2, 1, inputs // 32).repeat_interleave(32)
    weight[-1, :32] = 0
    x[0, :32] = 0
    return weight, x, torch.randn(out, generator=generator)


@paths
@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_products_are_those_of_double_precision(kernels: str, kind: Any, shape: tuple[int, int], biased: bool) -> None:
    """Of the stored weight and the encoded rows: only float32 rounding may remain."""
    weight, x, bias = sample(*shape, 13)
    packed, ops = stored(weight, kind), native(kernels)
    found = ops.linear(packed, bias if biased else None)(x)
    rows, wide = seen_by(kind, x), values_of(packed)
    expected = rows @ wide.T + (bias.double() if biased else 0)
    size = rows.abs() @ wide.abs().T + 1  # what rounding errors are relative to
    assert found.dtype == torch.float32
    assert found.shape == (13, shape[0])
    assert float(((found.double() - expected).abs() / size).max()) < 2e-6


@paths
@kinds
def test_rows_have_the_bits_of_any_larger_batch(kernels: str, kind: Any) -> None:
    """Also at other offsets, and where a batch is cut into blocks of rows."""
    weight, x, bias = sample(70, 576, 300)
    ops = native(kernels)
    product = ops.linear(stored(weight, kind), bias)
    whole = product(x)
    for rows in range(1, 41):
        assert torch.equal(product(x[:rows]), whole[:rows]), rows
        assert torch.equal(product(x[300 - rows :]), whole[300 - rows :]), rows
    assert torch.equal(product(x[7:290]), whole[7:290])


@paths
@kinds
@pytest.mark.parametrize("rows", [1, 2, 3, 31, 300])
def test_any_number_of_threads_gives_the_same_bits(kernels: str, kind: Any, rows: int) -> None:
    weight, x, bias = sample(230, 96, rows)
    packed = stored(weight, kind)
    one = native(kernels)
    expected = one.linear(packed, bias)(x)
    for threads in (2, 3):
        ops = native(kernels, threads)
        product = ops.linear(packed, bias)
        assert all(torch.equal(product(x), expected) for _ in range(5)), threads


@paths
@kinds
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 37, 63])
def test_a_bad_input_spoils_its_own_row_only(kernels: str, kind: Any, bad: float, column: int) -> None:
    """NaN makes the whole row NaN; infinity leaves nothing finite. Other rows keep their bits."""
    weight, x, bias = sample(33, 64, 9)
    ops = native(kernels)
    product = ops.linear(stored(weight + 5, kind), bias)
    before = product(x)
    x[4, column] = bad
    after = product(x)
    assert not torch.isfinite(after[4]).any()
    if math.isnan(bad) or isinstance(kind, str):
        assert torch.isnan(after[4]).all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(after[others], before[others])


@paths
@kinds
def test_extreme_rows_stay_finite_and_right(kernels: str, kind: Any) -> None:
    """Rows of zeros, of tiny and of huge values."""
    weight, x, _ = sample(20, 64, 4)
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 1e30
    x[3] *= 1e-38  # many of them subnormal
    packed, ops = stored(weight, kind), native(kernels)
    found = ops.linear(packed)(x)
    expected = x.double() @ values_of(packed).T
    assert torch.equal(found[0], torch.zeros(20))
    size = x.double().abs() @ values_of(packed).abs().T
    assert float(((found - expected).abs()[2] / size[2]).max()) < (1e-2 if isinstance(kind, str) else 1e-6)
    assert torch.isfinite(found).all()


@paths
def test_extreme_weights_do_not_overflow_the_integer_sums(kernels: str) -> None:
    """All products at their largest, with either sign: exact."""
    ops = native(kernels)
    for scheme in ("int8", "int4"):
        for sign in (1, -1):
            weight = torch.full((17, 1536), 127.0 * sign)
            weight[:, ::32] = 0  # gives the 4-bit groups a range
            packed = quantize(weight, scheme)  # type: ignore[arg-type]
            for x in (torch.full((5, 1536), 127.0), torch.full((5, 1536), -127.0)):
                expected = seen_by(scheme, x) @ values_of(packed).T
                torch.testing.assert_close(ops.linear(packed)(x).double(), expected, rtol=1e-6, atol=0)


def test_kernels_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels='sse1' are not there"):
        NativeOps(torch.float32, "sse1")
