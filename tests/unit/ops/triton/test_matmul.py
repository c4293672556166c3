"""Products against double precision, and bit for bit whatever rows are beside.

Under Triton's interpreter bfloat16 is computed in float32 and what is converted to it is cut instead of rounded.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foreword.ops import grouped
from foreword.ops.quantize import dequantize, quantize
from foreword.ops.triton import matmul
from foreword.ops.triton.matmul import choose_tiles, multiply, split_steps
from foreword.ops.triton.numeric import INTERPRETED
from foreword.ops.triton.packing import PackedWeight, WeightFormat, pack_grouped, pack_plain, pack_quantized
from interpreter import dot

from .pages import DEVICE

FORMATS = ("plain", "int8", "int4", "awq", "fp8")
LAST_PLACE = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", LAST_PLACE, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """See :func:`interpreter.dot`."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that short weights have several of."""
    monkeypatch.setattr(matmul, "_LEAST_SPLIT", 128)


def made(form: str, out: int, inputs: int, dtype: torch.dtype) -> tuple[PackedWeight, Tensor]:
    """A packed weight on the device, and its values in double precision."""
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, inputs, generator=generator)
    if form == "plain":
        return pack_plain(weight.to(dtype).to(DEVICE)), weight.to(dtype).double()
    if form == "fp8":
        scale = weight.abs().amax(1) / 448
        rounded = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        packed = pack_grouped(grouped.fp8(rounded.to(DEVICE), scale.to(DEVICE).unsqueeze(0)))
        return packed, rounded.double() * scale[:, None].double()
    if form == "awq":
        group = 128 if inputs % 128 == 0 else 32
        qweight, qzeros = (
            torch.randint(-(2**31), 2**31, (rows, out // 8), generator=generator, dtype=torch.int32)
            for rows in (inputs, inputs // group)
        )
        scales = (0.05 + torch.rand(inputs // group, out, generator=generator) / 9).half()
        four_bits = grouped.awq(qweight.to(DEVICE), qzeros.to(DEVICE), scales.to(DEVICE))
        return pack_grouped(four_bits), dequantize(four_bits).cpu().double()
    quantized = quantize(weight, "int8" if form == "int8" else "int4")
    on_device = type(quantized)(quantized.scheme, quantized.blocks.to(DEVICE), quantized.shape)
    return pack_quantized(on_device), dequantize(quantized).double()


def check(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """What differs: the rounding of the weight's values and of the result to the dtype, and that of float32 sums."""
    assert result.dtype == x.dtype
    expected = x.double() @ weight.t() + (0 if bias is None else bias.double())
    size = x.double().norm(dim=1)[:, None] * weight.norm(dim=1)
    bound = LAST_PLACE[x.dtype] * (expected.abs() + size) + 2**-21 * size
    assert ((result.cpu().double() - expected).abs() <= bound).all()


@DTYPES
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rows", "out", "inputs"), [(3, 136, 128), (18, 40, 96)])
def test_against_double_precision(form: str, rows: int, out: int, inputs: int, dtype: torch.dtype) -> None:
    """Few rows and many, outputs and inputs that fill no tile; rows may be parts of wider ones."""
    packed, weight = made(form, out, inputs, dtype)
    wide, bias = torch.randn(rows, inputs + 5).to(dtype), torch.randn(out).to(dtype)
    x = wide[:, 3 : 3 + inputs]
    given = wide.to(DEVICE)[:, 3 : 3 + inputs]
    check(multiply(given, packed), x, weight)
    check(multiply(given, packed, bias.to(DEVICE)), x, weight, bias)
    check(multiply(given, packed, bias.to(DEVICE), deterministic=True), x, weight, bias)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("form", FORMATS)
def test_split_inputs(form: str) -> None:
    """Partial sums, and the scales and the bias behind them."""
    packed, weight = made(form, 24, 384, torch.float16)
    x, bias = torch.randn(2, 384).half(), torch.randn(24).half()
    assert split_steps(packed.shape, 128, 2 * packed.half) * 2 * packed.half < 384
    check(multiply(x.to(DEVICE), packed, bias.to(DEVICE)), x, weight, bias)


@pytest.mark.usefixtures("small_splits", "rows_alike")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMATS)
def test_deterministic_rows(form: str, dtype: torch.dtype) -> None:
    """A row has the same bits alone, with few others, whose sums are split among programs, and with many, for which a
    program walks over all splits: wherever in the batch it is."""
    packed, _ = made(form, 40, 256, dtype)
    x, bias = torch.randn(70, 256).to(dtype).to(DEVICE), torch.randn(40).to(dtype).to(DEVICE)
    whole = multiply(x, packed, bias, deterministic=True)
    for begin, end in ((0, 1), (69, 70), (30, 47), (5, 70)):
        assert torch.equal(multiply(x[begin:end], packed, bias, deterministic=True), whole[begin:end])


@pytest.mark.usefixtures("small_splits", "rows_alike")
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_few_rows_and_many(form: str) -> None:
    """Without ``deterministic``, a row has the same bits among any number of up to 16 rows, and of up to 64."""
    packed, _ = made(form, 40, 256, torch.float16)
    x = torch.randn(36, 256).half().to(DEVICE)
    few, many = multiply(x[:16], packed), multiply(x, packed)
    assert torch.equal(multiply(x[7:8], packed), few[7:8])
    assert torch.equal(multiply(x[3:36], packed), many[3:36])


def test_tiles_and_splits() -> None:
    """A deterministic product has one height of tiles; splits follow from the weight alone, cover it and are no shorter
    than worth it."""
    for dtype in LAST_PLACE:
        assert len({choose_tiles(dtype, 32, rows, deterministic=True) for rows in (1, 16, 17, 64, 65, 999)}) == 1
    assert [split_steps((out, 4096), 128, 64) for out in (1, 4096, 14336, 128256)] == [8, 8, 16, 64]
    assert split_steps((64, 64), 32, 64) == 1
    assert split_steps((64, 1100), 32, 64) == 9


def test_what_does_not_fit_is_refused() -> None:
    """Inputs of another number or, with a plain weight, another dtype; no rows are no trouble."""
    packed, _ = made("plain", 8, 64, torch.float32)
    for x in (torch.zeros(2, 32), torch.zeros(2, 64).half()):
        with pytest.raises(ValueError, match=r"does not fit a weight of shape \(8, 64\) torch.float32"):
            multiply(x.to(DEVICE), packed)
    assert multiply(torch.zeros(0, 64, device=DEVICE), packed).shape == (0, 8)


@pytest.mark.soak
@pytest.mark.usefixtures("small_splits", "rows_alike")
@DTYPES
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("out", "inputs"), [(72, 576), (200, 1056), (264, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_everything_together(
    form: WeightFormat, out: int, inputs: int, dtype: torch.dtype, deterministic: bool
) -> None:
    """Larger shapes, and every number of rows around the borders."""
    packed, weight = made(form, out, inputs, dtype)
    x, bias = torch.randn(150, inputs).to(dtype), torch.randn(out).to(dtype)
    whole = multiply(x.to(DEVICE), packed, bias.to(DEVICE), deterministic=deterministic)
    check(whole, x, weight, bias)
    for rows in (1, 15, 16, 17, 63, 64, 65, 129):
        part = multiply(x[:rows].to(DEVICE), packed, bias.to(DEVICE), deterministic=deterministic)
        check(part, x[:rows], weight, bias)
        if deterministic:
            assert torch.equal(part, whole[:rows])
