# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The gated activation of an MLP, with the bias of the products before it if there is one.

SwiGLU and GeGLU (Shazeer 2020). Both activations are ``x * sigmoid(t)``: SiLU with ``t = x``, the tanh form of GELU
(Hendrycks and Gimpel 2016) with ``t = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)``, as ``1 + tanh(t / 2)`` is twice the
sigmoid. They are computed in float32 and rounded once.

No GPU has run this kernel yet; it is tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch
import triton
import triton.language as tl

from foreword.ops.protocol import Activation

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""Elements of a program."""
NUM_WARPS = 4


@triton.jit
def activation_kernel(
    gate_up, bias, output, stride, WIDTH: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: ``BLOCK`` elements of a row of ``output [N, WIDTH]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    turn = gate
    if KIND == "gelu_tanh":
        turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1.0 + tl.exp2(turn * -1.4426950408889634))
    tl.store(output + row * WIDTH + column, (active * up).to(output.dtype.element_ty), mask=inside)


def activation_options(width: int, kind: Activation, *, bias: bool) -> dict[str, Any]:
    """The compile-time parameters of :func:`activation_kernel`."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return {"WIDTH": width, "KIND": kind, "BIAS": bias, "BLOCK": block, "num_warps": NUM_WARPS}


def gated_activation(gate_up: Tensor, kind: Activation, bias: Tensor | None = None) -> Tensor:
    """``act(gate) * up`` for ``gate_up [N, 2 * I]`` with the gate in the first half; gives ``[N, I]``.

    Args:
        bias: ``[2 * I]``, added to ``gate_up`` before.

    Raises:
        ValueError: another activation.
    """
    if kind not in get_args(Activation):
        raise ValueError(f"activation {kind!r} is not supported; give one of {get_args(Activation)}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    output = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        options = activation_options(width, kind, bias=bias is not None)
        activation_kernel[rows, triton.cdiv(width, options["BLOCK"])](
            gate_up, gate_up if bias is None else bias, output, gate_up.stride(0), **options
        )
    return output
