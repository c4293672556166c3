"""What is compiled ahead of time of the kernels around attention: products, norms, activations and sampling.

See :mod:`foreword.ops.triton.compiled`, which has the cases of attention and of the pool, and measures all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from foreword.ops.protocol import Activation
from foreword.ops.triton import activation, matmul, norms, sampling
from foreword.ops.triton.matmul import choose_tiles, product_options
from foreword.ops.triton.packing import PackedWeight, WeightFormat

ELEMENTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration that is launched.

    Attributes:
        types: of the run-time parameters; pointers, strides and sizes of weights are multiples of 16, as those of real
            tensors are.
        constants: the compile-time parameters.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True

    @property
    def aligned(self) -> list[str]:
        """The run-time parameters that are multiples of 16."""
        sizes = ("stride", "num_inputs", "num_outputs")
        return [name for name, kind in self.types.items() if kind.startswith("*") or name.endswith(sizes)]


def product_case(
    arch: int,
    dtype: torch.dtype,
    form: WeightFormat,
    num_rows: int,
    *,
    group: int = 0,
    zero_points: bool = False,
    deterministic: bool = False,
    partial: bool = False,
) -> Case:
    """A launch of :func:`foreword.ops.triton.matmul.product_kernel` for ``num_rows`` rows; with ``partial`` it leaves
    partial sums."""
    nothing = torch.empty(0)
    weight = PackedWeight(form, nothing, nothing, (4096, 4096), group, zero_points)
    tiles = choose_tiles(dtype, weight.half, num_rows, deterministic=deterministic)
    options = product_options(
        dtype, weight, tiles, fold=deterministic and not partial, partial=partial, bias=not partial,
        native_fp8=arch >= 89,
    )  # fmt: skip
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    element = "*" + ELEMENTS[dtype]
    types = {"x": element, "bias": element, "output": "*fp32" if partial else element}
    types["weight"] = element if form == "plain" else "*u8"
    types["factors"] = {"plain": element, "fp8": "*fp32"}.get(form, "*i32")
    types |= dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "x_stride", "num_steps", "split"), "i32")
    flags = f"{f' {group}' if group else ''}{' zero' if zero_points else ''}{' fold' if options['FOLD'] else ''}"
    name = f"product {ELEMENTS[dtype]} {form}{flags}{' partial' if partial else ''} tile {tiles.rows}x{tiles.columns}"
    return Case(name, matmul.product_kernel, types, options, warps, stages)


def sum_case(dtype: torch.dtype, form: WeightFormat, *, bias: bool) -> Case:
    """A launch of :func:`foreword.ops.triton.matmul.sum_kernel`."""
    element = "*" + ELEMENTS[dtype]
    types = {"partial": "*fp32", "factors": "*fp32" if form == "fp8" else "*i32", "bias": element, "output": element}
    types |= dict.fromkeys(("num_outputs", "splits", "split_stride"), "i32")
    constants = {"FORMAT": form, "BIAS": bias, "BLOCK": matmul.SUM_BLOCK}
    return Case(f"sum {ELEMENTS[dtype]} {form}", matmul.sum_kernel, types, constants, matmul.SUM_WARPS, 1)


def norm_case(dtype: torch.dtype, width: int, *, heads: int = 1, query_heads: int = 1, residual: bool = False) -> Case:
    """A launch of :func:`foreword.ops.triton.norms.norm_kernel`."""
    options = norms.norm_options(width, heads=heads, query_heads=query_heads, residual=residual)
    warps = options.pop("num_warps")
    types = dict.fromkeys(("x", "residual", "weight", "key_weight", "total", "output"), "*" + ELEMENTS[dtype])
    types |= dict.fromkeys(("num_rows", "x_stride", "residual_stride", "output_stride"), "i32") | {"eps": "fp32"}
    name = f"norm {ELEMENTS[dtype]} {heads} x {width}{' residual' if residual else ''}"
    return Case(name, norms.norm_kernel, types, options, warps, 1)


def activation_case(dtype: torch.dtype, width: int, kind: Activation, *, bias: bool = False) -> Case:
    """A launch of :func:`foreword.ops.triton.activation.activation_kernel`."""
    options = activation.activation_options(width, kind, bias=bias)
    warps = options.pop("num_warps")
    types = dict.fromkeys(("gate_up", "bias", "output"), "*" + ELEMENTS[dtype]) | {"stride": "i32"}
    name = f"activation {ELEMENTS[dtype]} {kind} {width}{' bias' if bias else ''}"
    return Case(name, activation.activation_kernel, types, options, warps, 1)


def sampling_cases(vocabulary: int, digits: Iterable[tuple[bool, tuple[int, int]]]) -> Iterator[Case]:
    """The launches of :func:`foreword.ops.triton.sampling.draw`, those of ``digits``, by weight or not, among them."""
    kinds = dict.fromkeys(("logits", "values"), "*fp32") | dict.fromkeys(("tokens", "output", "best"), "*i32")
    kinds |= dict.fromkeys(("cut", "bins", "kept", "sums"), "*i64") | {"settings": "*fp64"}
    kinds |= dict.fromkeys(("stride", "width", "parts"), "i32")

    def case(name: str, kernel: Any, constants: dict[str, Any], num_warps: int = sampling.NUM_WARPS) -> Case:
        return Case(
            name, kernel, {each: kinds[each] for each in kernel.arg_names if each in kinds}, constants, num_warps, 1
        )

    block, parts = {"BLOCK": sampling.BLOCK}, sampling.part_constants(vocabulary)
    yield case("largest logits", sampling.largest_kernel, block)
    yield case(f"argmax of {vocabulary}", sampling.argmax_kernel, parts, 1)
    for by_weight, (shift, bits) in digits:
        digit = {"BY_WEIGHT": by_weight, "SHIFT": shift, "BITS": bits, "BINS": sampling.BINS}
        name = f"by {'weight' if by_weight else 'number'} {shift}"
        yield case(f"histogram {name}", sampling.histogram_kernel, digit | block)
        yield case(f"cut {name} of {vocabulary}", sampling.cut_kernel, digit | parts)
    yield case("sums", sampling.sum_kernel, {"MIN_P": True} | block)
    yield case(f"draw of {vocabulary}", sampling.draw_kernel, block | parts)


def some_layer_cases(arch: int) -> Iterator[Case]:
    """A few that cover all kernels and formats."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield product_case(arch, bf16, "int4", 1, group=32, partial=True)
    yield product_case(arch, bf16, "int4", 512, group=32)
    yield product_case(arch, fp16, "int4", 1, group=128, zero_points=True)
    yield product_case(arch, bf16, "int8", 1, group=32, partial=True)
    yield product_case(arch, bf16, "fp8", 1, partial=True)
    yield product_case(arch, bf16, "plain", 1, deterministic=True)
    yield product_case(arch, fp32, "plain", 1, deterministic=True)
    yield sum_case(bf16, "fp8", bias=True)
    yield norm_case(bf16, 4096, residual=True)
    yield norm_case(bf16, 128, heads=40, query_heads=32)
    yield activation_case(bf16, 14336, "silu")
    yield activation_case(bf16, 14336, "gelu_tanh", bias=True)
    yield from sampling_cases(128256, [(True, sampling.DIGITS[0])])


def all_layer_cases(arch: int) -> Iterator[Case]:
    """All that the backend would launch for usual models."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield from some_layer_cases(arch)
    for vocabulary in (32000, 262144):
        yield from sampling_cases(vocabulary, product((False, True), sampling.DIGITS))
    weights: list[tuple[WeightFormat, int, bool]] = [
        ("int8", 32, False), ("int4", 32, False), ("int4", 64, True), ("int4", 128, True), ("fp8", 0, False),
        ("plain", 0, False),
    ]  # fmt: skip
    for dtype in (bf16, fp16, fp32):
        for form, group, zero_points in weights:
            for deterministic in (False, True):
                if form == "plain" and not deterministic:
                    continue  # torch's product
                for rows in (1, 64, 512):
                    options = {"group": group, "zero_points": zero_points, "deterministic": deterministic}
                    yield product_case(arch, dtype, form, rows, **options)  # type: ignore[arg-type]
                    if rows == 1:
                        yield product_case(arch, dtype, form, rows, partial=True, **options)  # type: ignore[arg-type]
        yield sum_case(dtype, "int4", bias=False)
        for width in (576, 1536, 4096, 8192, 16384):
            yield norm_case(dtype, width)
            yield norm_case(dtype, width, residual=True)
        for width in (64, 128, 256):
            yield norm_case(dtype, width, heads=40, query_heads=32)
