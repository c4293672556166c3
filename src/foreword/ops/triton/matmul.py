# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Products with weights of 4 and 8 bits, which become numbers in registers, and batch-invariant ones with plain ones.

For few rows a product is bound by reading the weight, so the inputs are split among programs until the device is busy
(split-K); each split leaves partial sums, which a second kernel adds in ascending order. For many rows a program walks
over all inputs. The splits follow from the weight's shape alone.

With ``deterministic`` a tile has the same height for all numbers of rows, and programs for many rows walk over the same
splits, each summed up by itself, and add their sums in the same order: so a row's bits depend on nothing but the row.
(He et al. 2025, "Defeating nondeterminism in LLM inference", tells why libraries' products lack that.) Without, a row
may have other bits among up to 16 rows, among up to 64, and among more.

No GPU has run these kernels yet; they are tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from foreword.ops.triton.numeric import INTERPRETED, byte_to_float, decode_e4m3, dot_type, native_fp8

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.triton.packing import PackedWeight

FEW_ROWS = 16
"""Up to so many rows the inputs are split."""
_DETERMINISTIC_ROWS = 64
_PROGRAMS = 512
"""Wanted of a product for few rows: some for each processor of any device."""
_LEAST_SPLIT = 512
"""Inputs. Below these, adding up partial sums costs more than is gained."""
SUM_BLOCK = 256
SUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])  # other numbers need no other code
def product_kernel(
    x, weight, factors, bias, output, num_rows, num_outputs, num_inputs, x_stride, num_steps, split,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ZERO_POINTS: tl.constexpr, EVEN: tl.constexpr,
    NATIVE_FP8: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FOLD: tl.constexpr,
    PARTIAL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``ROWS`` rows, ``program_id(0)``, and ``COLUMNS`` outputs, ``program_id(1)``.

    ``x [num_rows, num_inputs]``; for the weight see :mod:`foreword.ops.triton.packing`; ``bias [num_outputs]``.

    Args:
        output: ``[num_rows, num_outputs]``; with ``PARTIAL`` ``[splits, num_rows, num_outputs]`` float32, of which the
            program leaves the sums of split ``program_id(2)``.
        num_steps: of ``2 * HALF`` inputs; ``split``: steps that are summed up by themselves.
        FOLD: add the sums of all splits; otherwise there is one, or the program has one of them.
        EVEN: the inputs fill whole steps.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = x + tl.minimum(row, num_rows - 1).to(tl.int64) * x_stride  # those that are none repeat the last
    held = tl.minimum(column, num_outputs - 1)
    if FOLD:
        total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        for first in range(0, num_steps, split):
            total += _sum(
                rows, weight, factors, held, num_outputs, num_inputs, first, tl.minimum(first + split, num_steps),
                FORMAT, GROUP, HALF, ZERO_POINTS, EVEN, NATIVE_FP8, DOT, ROWS, COLUMNS,
            )  # fmt: skip
    else:
        first = tl.program_id(2) * split
        total = _sum(
            rows, weight, factors, held, num_outputs, num_inputs, first, tl.minimum(first + split, num_steps),
            FORMAT, GROUP, HALF, ZERO_POINTS, EVEN, NATIVE_FP8, DOT, ROWS, COLUMNS,
        )  # fmt: skip
    inside = (row < num_rows)[:, None] & (column < num_outputs)[None, :]
    target = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    if PARTIAL:
        start = tl.program_id(2).to(tl.int64) * num_rows * num_outputs
        tl.store(output + start + target, total, mask=inside)
    else:
        result = _finished(total, factors, bias, column[None, :], num_outputs, FORMAT, BIAS)
        tl.store(output + target, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _sum(
    rows, weight, factors, column, num_outputs, num_inputs, first, last,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, ZERO_POINTS: tl.constexpr, EVEN: tl.constexpr,
    NATIVE_FP8: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The products of steps ``first .. last - 1``, one step after the other, ``[ROWS, COLUMNS]``."""
    acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    wide = tl.full([], 1, tl.int64) * num_outputs  # a weight may have more bytes than 32 bits count
    if FORMAT == "int4" or FORMAT == "int8":
        within = tl.arange(0, HALF)
        BYTES: tl.constexpr = HALF if FORMAT == "int4" else 2 * HALF
        for step in range(first, last):
            begin = step * (2 * HALF)
            tile = weight + step * wide * BYTES + column[None, :] * BYTES + within[:, None]
            low_x = _inputs(rows, begin + within, num_inputs, EVEN, DOT)
            high_x = _inputs(rows, begin + HALF + within, num_inputs, EVEN, DOT)
            if FORMAT == "int4":
                packed = tl.load(tile).to(tl.uint32)
                word = tl.load(factors + begin // GROUP * wide + column)
                other = word
                if GROUP % (2 * HALF):
                    other = tl.load(factors + (begin + HALF) // GROUP * wide + column)
                low = _int4(packed << 16, word, ZERO_POINTS).to(DOT)
                high = _int4(packed << 12, other, ZERO_POINTS).to(DOT)
            else:
                word = tl.load(factors + step * wide + column)
                low = (byte_to_float(tl.load(tile), 128.0) * _half_float(word)[None, :]).to(DOT)
                high = (byte_to_float(tl.load(tile + HALF), 128.0) * _half_float(word >> 16)[None, :]).to(DOT)
            acc = tl.dot(low_x, low, acc, input_precision="tf32x3")
            acc = tl.dot(high_x, high, acc, input_precision="tf32x3")
    else:
        within = tl.arange(0, 2 * HALF)
        for step in range(first, last):
            place = step * (2 * HALF) + within
            if FORMAT == "fp8":
                tile = weight + step * wide * (2 * HALF) + column[None, :] * (2 * HALF) + within[:, None]
                number = tl.load(tile)
                number = number.to(tl.float8e4nv, bitcast=True).to(DOT) if NATIVE_FP8 else decode_e4m3(number).to(DOT)
            else:
                tile = weight + (column.to(tl.int64) * num_inputs)[None, :] + place[:, None]
                number = (tl.load(tile) if EVEN else tl.load(tile, mask=place[:, None] < num_inputs, other=0.0)).to(DOT)
            acc = tl.dot(_inputs(rows, place, num_inputs, EVEN, DOT), number, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _inputs(rows, place, num_inputs, EVEN: tl.constexpr, DOT: tl.constexpr):
    """``[ROWS, places]``; zeros beyond the inputs."""
    source = rows[:, None] + place[None, :]
    return (tl.load(source) if EVEN else tl.load(source, mask=place[None, :] < num_inputs, other=0.0)).to(DOT)


@triton.jit
def _half_float(word):
    """The float16 in the lowest 16 bits of a word, in float32."""
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _int4(bits, word, ZERO_POINTS: tl.constexpr):
    """Values of the numbers below 16 in bits 16 .. 19 ``[HALF, COLUMNS]``, with scales and offsets ``word [COLUMNS]``.

    The numbers are set in the mantissa of 128, and what that adds is taken from the offset: one operation for each
    value, with an error of less than 2**-16 scales.
    """
    raised = ((bits & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)
    scale = _half_float(word)
    offset = _half_float(word >> 16)
    shift = -(offset + 128.0) * scale if ZERO_POINTS else tl.fma(scale, -128.0, offset)
    return tl.fma(raised, scale[None, :], shift[None, :])


@triton.jit
def _finished(total, factors, bias, column, num_outputs, FORMAT: tl.constexpr, BIAS: tl.constexpr):
    """The sums with the scale of an output and its bias, by the same operations in whichever kernel."""
    inside = column < num_outputs
    shift = 0.0
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if FORMAT == "fp8":
        return tl.fma(total, tl.load(factors + column, mask=inside, other=0.0), shift + tl.zeros_like(total))
    return total + shift


@triton.jit
def sum_kernel(
    partial, factors, bias, output, num_outputs, splits, split_stride,
    FORMAT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` outputs of a row; their partial sums in ascending order, as a program that folds."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_outputs
    start = tl.program_id(0).to(tl.int64) * num_outputs
    total = tl.full([BLOCK], 0.0, tl.float32)
    source = partial + start + column
    for _ in range(splits):
        total += tl.load(source, mask=inside, other=0.0)
        source += split_stride
    result = _finished(total, factors, bias, column, num_outputs, FORMAT, BIAS)
    tl.store(output + start + column, result.to(output.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """Rows and outputs of a program's tile, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def choose_tiles(dtype: torch.dtype, half: int, num_rows: int, *, deterministic: bool) -> Tiles:
    """For ``num_rows`` rows of ``dtype``; of deterministic products the same for all numbers.

    Args:
        half: inputs of half a step of the weight. With 64 the highest tile takes more registers than every device has,
            by the ahead-of-time suite.
    """
    if dtype == torch.float32:
        return Tiles(16, 64, 4, 2)
    if deterministic:
        return Tiles(_DETERMINISTIC_ROWS, 64, 8, 4)
    if num_rows <= FEW_ROWS:
        return Tiles(16, 128, 4, 5)
    return Tiles(64, 128, 4, 3) if num_rows <= 64 or half == 64 else Tiles(128, 128, 8, 3)


def split_steps(weight_shape: tuple[int, int], columns: int, step: int) -> int:
    """Steps of a split of a weight ``(out, in)``, if a program has ``columns`` outputs."""
    out, inputs = weight_shape
    splits = max(1, min(_PROGRAMS // triton.cdiv(out, columns), inputs // _LEAST_SPLIT))
    return int(triton.cdiv(triton.cdiv(inputs, step), splits))


def product_options(
    dtype: torch.dtype, weight: PackedWeight, tiles: Tiles, *, fold: bool, partial: bool, bias: bool, native_fp8: bool
) -> dict[str, Any]:
    """The compile-time parameters of :func:`product_kernel`."""
    return {
        "FORMAT": weight.form,
        "GROUP": weight.group,
        "HALF": weight.half,
        "ZERO_POINTS": weight.zero_points,
        "EVEN": weight.shape[1] % (2 * weight.half) == 0,
        "NATIVE_FP8": native_fp8 and not INTERPRETED,
        "DOT": dot_type(dtype),
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "FOLD": fold,
        "PARTIAL": partial,
        "BIAS": bias,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """``x [N, in]`` float32, float16 or bfloat16 times a packed weight, plus ``bias [out]``; gives ``[N, out]``.

    Raises:
        ValueError: inputs that are not the weight's.
    """
    (num_rows, inputs), out = x.shape, weight.shape[0]
    if inputs != weight.shape[1] or (weight.form == "plain" and x.dtype != weight.values.dtype):
        raise ValueError(f"x of shape {tuple(x.shape)} {x.dtype} does not fit a weight of shape {weight.shape}"
                         f"{f' {weight.values.dtype}' if weight.form == 'plain' else ''}")  # fmt: skip
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    output = torch.empty((num_rows, out), dtype=x.dtype, device=x.device)
    if not num_rows:
        return output
    tiles = choose_tiles(x.dtype, weight.half, num_rows, deterministic=deterministic)
    few = num_rows <= (tiles.rows if deterministic else FEW_ROWS)
    split = split_steps(weight.shape, tiles.columns, 2 * weight.half) if few or deterministic else weight.steps
    splits = triton.cdiv(weight.steps, split)
    partial = few and splits > 1
    target = torch.empty((splits, num_rows, out), dtype=torch.float32, device=x.device) if partial else output
    options = product_options(
        x.dtype, weight, tiles, fold=deterministic and not partial, partial=partial, bias=bias is not None,
        native_fp8=native_fp8(x.device),
    )  # fmt: skip
    shift = weight.factors if bias is None else bias
    product_kernel[triton.cdiv(num_rows, tiles.rows), triton.cdiv(out, tiles.columns), splits if partial else 1](
        x, weight.values, weight.factors, shift, target, num_rows, out, inputs, x.stride(0), weight.steps, split,
        **options,
    )  # fmt: skip
    if partial:
        sum_kernel[num_rows, triton.cdiv(out, SUM_BLOCK)](
            target, weight.factors, shift, output, out, splits, num_rows * out,
            FORMAT=weight.form, BIAS=bias is not None, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS,
        )  # fmt: skip
    return output
