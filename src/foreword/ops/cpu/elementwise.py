"""Norm, activation and rotary embedding on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.protocol import Activation

_VECTOR = 64
"""Elements of the widest unrolled vector loop (two AVX512 registers of bf16)."""
_SERIAL = 16384
"""Up to so many elements torch runs silu and gelu on one thread."""
_GRAIN = 32768
"""Elements per thread from which on torch splits an elementwise operation."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, statistics and product in float32, rounded once at the end."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def gated_activation(gate_up: Tensor, kind: Activation) -> Tensor:
    """``act(gate) * up``; see :class:`foreword.ops.protocol.Ops`."""
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    return _activate(gate, kind).mul_(up)


def _activate(gate: Tensor, kind: Activation) -> Tensor:
    """The activation with every element in a full vector.

    torch computes the ends of a loop that fill no vector with scalar code, whose exp and tanh differ in the last bit.
    So that a row's bits do not depend on where it lies, no loop may have such an end: rows are padded to whole
    vectors, and split where torch's threads would split within one.
    """
    rows, width = gate.shape
    padding = -width % _VECTOR
    if padding:
        return _activate(F.pad(gate, (0, padding)), kind)[:, :width].contiguous()
    pieces = [_apply(piece, kind) for piece in _whole_vector_pieces(gate, torch.get_num_threads())]
    return pieces[0] if len(pieces) == 1 else _join(pieces, rows, width)


def _apply(gate: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(gate)
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    raise ValueError(f"activation {kind!r} is not supported")


def _whole_vector_pieces(gate: Tensor, threads: int) -> Iterator[Tensor]:
    """Parts of ``gate`` whose elements torch's threads divide at multiples of a vector."""
    rows, width = gate.shape
    used = min(threads, -(-rows * width // _GRAIN))
    quantum = math.lcm(max(used, 1), threads)
    if rows * width <= _SERIAL or rows % quantum == 0:
        yield gate
    elif rows > quantum:
        whole = rows - rows % quantum
        yield from _whole_vector_pieces(gate[:whole], threads)
        yield from _whole_vector_pieces(gate[whole:], threads)
    else:
        for row in gate.split(1):
            yield from row.split(_SERIAL, dim=1)


def _join(pieces: list[Tensor], rows: int, width: int) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]).view(rows, width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split form, in float32; see :class:`foreword.ops.protocol.Ops`."""
    half = cos.shape[-1]
    if 2 * half < x.shape[-1]:
        rotated = rotate(x[..., : 2 * half], cos, sin)
        return torch.cat((rotated, x[..., 2 * half :]), dim=-1)
    pairs = x.float().view(*x.shape[:-1], 2, half)  # [N, heads, 2, D / 2]
    cos, sin = cos[:, None, None], sin[:, None, None]  # [N, 1, 1, D / 2]
    result = pairs * cos
    crossed = pairs.flip(-2) * sin
    result[..., 0, :] -= crossed[..., 0, :]
    result[..., 1, :] += crossed[..., 1, :]
    return result.view(x.shape).to(x.dtype)
