"""Products with weights of every format against torch's, and the small kernels beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from foreword.cli.bench import number
from foreword.ops import grouped
from foreword.ops.protocol import Draw
from foreword.ops.quantize import dequantize, quantize
from foreword.ops.triton import activation, norms, sampling
from foreword.ops.triton.matmul import multiply
from foreword.ops.triton.packing import PackedWeight, pack_grouped, pack_plain, pack_quantized

from .attention import compare
from .device import LEAST_COLD, Device
from .sizes import Sizes

if TYPE_CHECKING:
    from torch import Tensor

    from .results import Report

FORMS = ("int8", "int4", "fp8", "exact")
"""``exact``: plain weights, deterministic."""
_INNER = 20
"""Launches of a small kernel in one graph: its end and the next one's begin are part of it, as in a model."""


def packed(form: str, weight: Tensor) -> tuple[PackedWeight, Tensor]:
    """A weight as the kernels read it, and its values ``[out, in]``."""
    if form == "exact":
        return pack_plain(weight), weight
    if form == "fp8":
        scale = weight.float().abs().amax(1) / 448
        rounded = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
        return pack_grouped(grouped.fp8(rounded, scale.unsqueeze(0))), rounded.float() * scale[:, None]
    blocks = quantize(weight, "int8" if form == "int8" else "int4")
    return pack_quantized(blocks), dequantize(blocks)


def measure(device: Device, sizes: Sizes, report: Report) -> None:
    """Every product of a layer for each number of rows, cold weights, as a table of microseconds and ratios."""
    shown = [["out x in", "rows", "bf16, us", *(f"{form}, x" for form in FORMS)]]
    layer = {rows: dict.fromkeys(("bf16", *FORMS), 0.0) for rows in sizes.rows}
    for out, inputs in sizes.shape.products():
        weight = (torch.randn(out, inputs, device=device.name) * 0.02).bfloat16()
        inputs_of = {rows: torch.randn(rows, inputs, device=device.name).bfloat16() for rows in sizes.rows}
        plain = [weight.clone() for _ in range(_copies(device, weight.nbytes))]
        theirs = {
            rows: device.seconds(*(partial(F.linear, x, each) for each in plain)).median
            for rows, x in inputs_of.items()
        }
        del plain
        ours = {form: _packed_times(device, form, weight, inputs_of) for form in FORMS}
        for rows, seconds in theirs.items():
            ratios = [number(seconds / ours[form][rows]) for form in FORMS]
            shown.append([f"{out} x {inputs}", f"{rows:,}", number(seconds * 1e6), *ratios])
            layer[rows]["bf16"] += seconds
            for form in FORMS:
                layer[rows][form] += ours[form][rows]
    for rows, seconds_of in layer.items():
        ratios = [number(seconds_of["bf16"] / seconds_of[form]) for form in FORMS]
        shown.append(["all of a layer", f"{rows:,}", number(seconds_of["bf16"] * 1e6), *ratios])
    report.tabulate("Products, torch's bf16 time by ours", shown)


def _packed_times(device: Device, form: str, weight: Tensor, inputs_of: dict[int, Tensor]) -> dict[int, float]:
    """Seconds by the number of rows."""
    first, values = packed(form, weight)
    exact = form == "exact"
    for x in inputs_of.values():
        wanted = x.float() @ values.bfloat16().float().t()
        compare(f"{form} product of {len(x)} rows", multiply(x, first, deterministic=exact), wanted)
    copies = [
        dataclasses.replace(first, values=first.values.clone(), factors=first.factors.clone())
        for _ in range(_copies(device, first.values.nbytes))
    ]
    return {
        rows: device.seconds(*[partial(multiply, x, each, deterministic=exact) for each in copies]).median
        for rows, x in inputs_of.items()
    }


def _copies(device: Device, size: int) -> int:
    """Of a weight, so that each is read from memory when its turn comes."""
    return 1 if device.rehearsal else max(1, -(-LEAST_COLD // size))


def measure_small(device: Device, sizes: Sizes, report: Report) -> None:
    """Norms, activations and sampling, in microseconds."""
    shape, inner = sizes.shape, 1 if device.rehearsal else _INNER
    weight = torch.ones(shape.hidden, device=device.name).bfloat16()
    for rows in (1, sizes.batch):
        x, residual = (torch.randn(rows, shape.hidden, device=device.name).bfloat16() for _ in range(2))
        gate_up = torch.randn(rows, 2 * shape.inner, device=device.name).bfloat16()
        logits = torch.randn(rows, shape.vocabulary, device=device.name) * 5
        ways = [Draw(temperature=0.8, top_k=50, top_p=0.9, u=0.5)] * rows
        kernels: dict[str, Callable[[], object]] = {
            "residual and norm": partial(norms.add_rms_norm, x, residual, weight, 1e-5),
            "activation": partial(activation.gated_activation, gate_up, "silu"),
            "most likely token": partial(sampling.argmax, logits),
        }
        for name, run in kernels.items():
            spread = device.seconds(*[run] * inner)
            report.add(f"{name}, {rows} rows, in a graph", spread.times(1e6), "us")
        for name, how in (("greedy", [Draw()] * rows), ("top-k 50 and top-p 0.9", ways)):
            sampling.draw(logits, how)
            spread = device.wall(partial(sampling.draw, logits, how), repeats=1 if inner == 1 else 20)
            report.add(f"sampling, {name}, {rows} rows, by the clock", spread.times(1e6), "us")
