# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""RMS norm of rows, alone or behind the addition of a residual, and of the heads of queries and keys in place.

RMSNorm (Zhang and Sennrich 2019) over the last dimension; statistics and product are in float32 and the result is
rounded once, as in :func:`foreword.ops.cpu.elementwise.rms_norm`. How a row is summed up follows from its width alone.

No GPU has run this kernel yet; it is tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ROWS = 16
_ELEMENTS = 2048
"""Of a program, as far as its rows are short."""


@triton.jit(do_not_specialize=["num_rows"])  # other numbers need no other code
def norm_kernel(
    x, residual, weight, key_weight, total, output, num_rows, x_stride, residual_stride, output_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, QUERY_HEADS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows of head ``program_id(1)``. ``x, output [N, HEADS, WIDTH]``; heads from ``QUERY_HEADS``
    on have ``key_weight``. With ``RESIDUAL``: of ``x + residual``, which is rounded and kept in ``total``."""
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    wide = row.to(tl.int64)
    place = head * WIDTH + column
    values = tl.load(x + (wide * x_stride)[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        values += tl.load(
            residual + (wide * residual_stride)[:, None] + place[None, :], mask=inside, other=0.0
        ).to(tl.float32)  # fmt: skip
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + (wide * WIDTH)[:, None] + place[None, :], rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, axis=1) / WIDTH
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    chosen = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if QUERY_HEADS < HEADS:
        of_key = tl.load(key_weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        chosen = tl.where(head < QUERY_HEADS, chosen, of_key)
    result = values * factor[:, None] * chosen[None, :]
    target = output + (wide * output_stride)[:, None] + place[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=inside)


def norm_options(
    width: int, *, heads: int = 1, query_heads: int | None = None, residual: bool = False
) -> dict[str, Any]:
    """The compile-time parameters of :func:`norm_kernel`, which follow from the model alone."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(_MOST_ROWS, _ELEMENTS // block))
    return {
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": rows,
        "HEADS": heads,
        "QUERY_HEADS": heads if query_heads is None else query_heads,
        "RESIDUAL": residual,
        "num_warps": max(1, min(16, rows * block // 512)),
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of ``x [N, D]`` or ``[N, heads, D]``, whose rows may be parts of wider ones; ``weight [D]``, possibly
    of another dtype than ``x``.

    Raises:
        ValueError: heads that do not lie side by side.
    """
    heads = x.shape[1] if x.dim() == 3 else 1
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, weight, x, output, eps, norm_options(x.shape[-1], heads=heads))
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + residual``, both ``[N, D]``, and its norm: the bits of the addition and the norm one after the other."""
    total, output = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, weight, total, output, eps, norm_options(x.shape[-1], residual=True))
    return total, output


def norm_heads(qkv: Tensor, num_heads: int, query_weight: Tensor, key_weight: Tensor, eps: float) -> None:
    """Norm every head of queries and keys in place: ``qkv [N, heads, D]``, of which the first ``num_heads`` are the
    queries' and the others the keys'; rows may be parts of wider ones.

    Raises:
        ValueError: heads that do not lie side by side.
    """
    options = norm_options(qkv.shape[-1], heads=qkv.shape[1], query_heads=num_heads)
    _launch(qkv, None, query_weight, key_weight, qkv, qkv, eps, options)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    key_weight: Tensor,
    total: Tensor,
    output: Tensor,
    eps: float,
    options: dict[str, Any],
) -> None:
    width, heads = options["WIDTH"], options["HEADS"]
    for part in (x, x if residual is None else residual):
        if part.shape != x.shape or part.stride()[1:] != (width, 1)[3 - x.dim() :]:
            raise ValueError(f"rows of shape {tuple(part.shape)} and strides {part.stride()}: their elements must lie "
                             f"side by side, as many as in {tuple(x.shape)}")  # fmt: skip
    if len(x):
        norm_kernel[triton.cdiv(len(x), options["ROWS"]), heads](
            x, x if residual is None else residual, weight, key_weight, total, output, len(x), x.stride(0),
            0 if residual is None else residual.stride(0), output.stride(0), eps, **options,
        )  # fmt: skip
