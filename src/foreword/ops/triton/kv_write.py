# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Rotary embedding of queries and keys, and keys and values into the paged pool, in one launch.

The pool's layer is ``[num_kv_heads, num_slots, row_width]``; see :class:`foreword.kv.pool.KVPool`. Formats:

- float32, float16, bfloat16: as they are;
- int8: a scale of its own for every row behind the row's bytes, as in :mod:`foreword.ops.kv_int8`;
- float8_e4m3fn: without a scale, as the format is a floating one: values beyond 448 become 448, and those below 2**-10
  zero. Keys and values of usual models stay within; int8 is the safe choice for one whose do not.

The rotation is the half-split form of RoFormer's rotary embedding (Su et al. 2021), in float32; what is stored is
rounded once, from the rotated float32.

No GPU has run this kernel yet; it is tested under Triton's interpreter and compiled ahead of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from foreword.ops.kv_int8 import SCALE_BYTES
from foreword.ops.triton.numeric import encode_e4m3, round_even

if TYPE_CHECKING:
    from torch import Tensor

    from foreword.ops.protocol import KVLayer, Rotation

TOKENS = 8
"""Tokens of a program."""
NUM_WARPS = 4


class KVFormat(NamedTuple):
    """How a row of KV lies in the pool.

    Attributes:
        name: "plain", "int8" or "fp8".
        width: elements of a row, the scale included.
    """

    name: str
    width: int


def kv_format(layer: KVLayer, head_dim: int) -> KVFormat:
    """The format of a layer of the pool.

    Raises:
        ValueError: a dtype or shape that is none of the formats.
    """
    dtype, width = layer.key.dtype, layer.key.shape[-1]
    names = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
    name = names.get(dtype, "plain" if dtype in (torch.float32, torch.float16, torch.bfloat16) else "")
    expected = head_dim + (SCALE_BYTES if name == "int8" else 0)
    if not name:
        raise ValueError(f"KV of {dtype} is not supported; give float32, float16, bfloat16, int8 or float8_e4m3fn")
    if width != expected or layer.value.shape != layer.key.shape:
        raise ValueError(f"rows of {dtype} KV of {head_dim} must have {expected} elements, not {width}")
    if layer.key.shape[1] * width >= 2**31:
        raise ValueError(f"{layer.key.shape[1]} slots of {width} elements are beyond 32-bit offsets; make fewer blocks")
    return KVFormat(name, width)


def raw(x: Tensor) -> Tensor:
    """A pool tensor as the kernels take it: 8-bit floats as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def scales(x: Tensor) -> Tensor:
    """The scales of an int8 pool tensor: the same memory as float32; of another, the tensor itself (not read)."""
    return x.view(torch.float32) if x.dtype == torch.int8 else raw(x)


@triton.jit(do_not_specialize=["num_tokens", "num_stored"])  # other numbers need no other code
def kv_write_kernel(
    query, key, value, key_pool, value_pool, key_scales, value_scales, slots, positions, cos, sin,
    num_tokens, num_stored, query_stride, key_stride, value_stride, pool_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr,
    WIDTH: tl.constexpr, FORMAT: tl.constexpr, TURN: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: ``TOKENS`` tokens of one head; first the query heads, then the keys', then the values'.

    A row is two halves of the rotated part and the tail that is not rotated, each in a tile of its own: so every load
    is of elements that lie side by side. ``BLOCK``: of a half; ``TAIL``: of the tail, 0 if there is none.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    alive = token < num_tokens
    if head < NUM_HEADS:
        rows = query + token.to(tl.int64) * query_stride + head * HEAD_DIM
        low, high, tail = _read(rows, alive, HEAD_DIM, ROTATED, BLOCK, TAIL)
        low, high = _turn(low, high, token, alive, positions, cos, sin, ROTATED, HAS_POSITIONS, BLOCK)
        _write(rows, alive, low, high, tail, HEAD_DIM, ROTATED, BLOCK, TAIL, "plain")
    else:
        stored = alive & (token < num_stored)
        slot = tl.load(slots + token, mask=stored, other=-1)
        stored &= slot >= 0
        if head < NUM_HEADS + NUM_KV_HEADS:
            number = head - NUM_HEADS
            rows = key + token.to(tl.int64) * key_stride + number * HEAD_DIM
            low, high, tail = _read(rows, stored, HEAD_DIM, ROTATED, BLOCK, TAIL)
            if TURN:
                low, high = _turn(low, high, token, stored, positions, cos, sin, ROTATED, HAS_POSITIONS, BLOCK)
            _store(key_pool, key_scales, number, slot, stored, low, high, tail, pool_stride,
                   HEAD_DIM, ROTATED, WIDTH, FORMAT, BLOCK, TAIL)  # fmt: skip
        else:
            number = head - NUM_HEADS - NUM_KV_HEADS
            rows = value + token.to(tl.int64) * value_stride + number * HEAD_DIM
            low, high, tail = _read(rows, stored, HEAD_DIM, ROTATED, BLOCK, TAIL)
            _store(value_pool, value_scales, number, slot, stored, low, high, tail, pool_stride,
                   HEAD_DIM, ROTATED, WIDTH, FORMAT, BLOCK, TAIL)  # fmt: skip


@triton.jit
def _read(rows, alive, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """The three parts of ``rows`` in float32, ``[TOKENS, BLOCK]`` twice and ``[TOKENS, TAIL]``."""
    HALF: tl.constexpr = ROTATED // 2
    column = tl.arange(0, BLOCK)
    inside = alive[:, None] & (column < HALF)[None, :]
    first = rows[:, None] + column[None, :]
    low = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    tail = low
    if TAIL:
        rest = tl.arange(0, TAIL)
        here = alive[:, None] & (rest < HEAD_DIM - ROTATED)[None, :]
        tail = tl.load(rows[:, None] + ROTATED + rest[None, :], mask=here, other=0.0).to(tl.float32)
    return low, high, tail


@triton.jit
def _turn(
    low, high, token, alive, positions, cos, sin,
    ROTATED: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTATED // 2
    column = tl.arange(0, BLOCK)
    inside = alive[:, None] & (column < HALF)[None, :]
    row = token
    if HAS_POSITIONS:
        row = tl.load(positions + token, mask=alive, other=0)
    angle = row[:, None] * HALF + column[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    return low * c - high * s, high * c + low * s


@triton.jit
def _store(
    pool, scales, number, slot, alive, low, high, tail, pool_stride,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    start = number.to(tl.int64) * pool_stride
    if FORMAT == "int8":
        largest = tl.maximum(_largest(low), _largest(high))
        if TAIL:
            largest = tl.maximum(largest, _largest(tail))
        finite = largest < float("inf")
        inverse = tl.where(finite & (largest > 1e-30), tl.div_rn(127.0, tl.maximum(largest, 1e-30)), 0.0)[:, None]
        low, high = _quantized(low, inverse), _quantized(high, inverse)
        if TAIL:
            tail = _quantized(tail, inverse)
        target = scales + start // 4 + slot * (WIDTH // 4) + HEAD_DIM // 4
        tl.store(target, tl.where(finite, tl.div_rn(largest, 127.0), float("nan")), mask=alive)
    rows = pool + start + slot * WIDTH
    _write(rows, alive, low, high, tail, HEAD_DIM, ROTATED, BLOCK, TAIL, FORMAT)


@triton.jit
def _largest(part):
    """Magnitude of each row's largest value; infinite if one is not a number."""
    size = tl.abs(part)
    return tl.max(tl.where(size == size, size, float("inf")), axis=1)


@triton.jit
def _quantized(part, inverse):
    """To whole numbers; zero where a value or the scale is not finite."""
    scaled = part * inverse
    return tl.where(tl.abs(scaled) <= 127.5, round_even(scaled), 0.0)


@triton.jit
def _write(
    rows, alive, low, high, tail,
    HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROTATED // 2
    column = tl.arange(0, BLOCK)
    inside = alive[:, None] & (column < HALF)[None, :]
    first = rows[:, None] + column[None, :]
    tl.store(first, _stored(low, rows, FORMAT), mask=inside)
    tl.store(first + HALF, _stored(high, rows, FORMAT), mask=inside)
    if TAIL:
        rest = tl.arange(0, TAIL)
        here = alive[:, None] & (rest < HEAD_DIM - ROTATED)[None, :]
        tl.store(rows[:, None] + ROTATED + rest[None, :], _stored(tail, rows, FORMAT), mask=here)


@triton.jit
def _stored(part, rows, FORMAT: tl.constexpr):
    if FORMAT == "fp8":
        return encode_e4m3(part)
    return part.to(rows.dtype.element_ty)


def constants(
    num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, form: KVFormat, *, positions: bool
) -> dict[str, object]:
    """The kernel's compile-time parameters. Rows that are not rotated are two halves all the same."""
    halves = rotated or head_dim
    tail = head_dim - halves
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTATED": halves,
        "WIDTH": form.width,
        "FORMAT": form.name,
        "TURN": rotated > 0,
        "HAS_POSITIONS": positions,
        "BLOCK": triton.next_power_of_2(halves // 2),
        "TAIL": triton.next_power_of_2(tail) if tail else 0,
        "TOKENS": TOKENS,
    }


def store(key: Tensor, value: Tensor, layer: KVLayer, slots: Tensor) -> None:
    """Write the first ``len(slots)`` rows of ``key, value [N, num_kv_heads, D]`` into ``slots`` (int32) of the pool;
    a negative slot is passed over."""
    _launch(None, key, value, layer, slots, None, None)


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: KVLayer,
    slots: Tensor,
    rotation: Rotation,
    positions: Tensor | None = None,
) -> None:
    """Rotate ``query [N, num_heads, D]`` in place; rotate ``key [N, num_kv_heads, D]`` and write it and ``value``, of
    the same shape, into the pool; ``key`` itself stays as it is.

    Each of the three may be a part of a wider tensor, whose rows are further apart.

    Args:
        slots: int32, of the first ``len(slots)`` tokens; a negative slot is passed over.
        rotation: ``[.., R / 2]``: a row per token, or per position if ``positions`` are given. R <= D is rotated.
        positions: ``[N]`` int32.

    Raises:
        ValueError: shapes or strides that do not fit together.
    """
    _launch(query, key, value, layer, slots, rotation, positions)


def _launch(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    layer: KVLayer,
    slots: Tensor,
    rotation: Rotation | None,
    positions: Tensor | None,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not None and (x.shape[0] != num_tokens or x.stride()[1:] != (head_dim, 1)):
            raise ValueError(f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; give {num_tokens} rows of "
                             f"heads of {head_dim} side by side")  # fmt: skip
    rotated = 0 if rotation is None else 2 * rotation.cos.shape[-1]
    if rotated > head_dim or head_dim % 4:
        raise ValueError(f"heads of {head_dim} of which {rotated} are rotated; give a multiple of 4, and no more")
    form = kv_format(layer, head_dim)
    num_heads = 0 if query is None else query.shape[1]
    count = num_tokens if num_heads else min(num_tokens, slots.shape[0])
    if count == 0:
        return
    cos, sin = (slots, slots) if rotation is None else (rotation.cos.contiguous(), rotation.sin.contiguous())
    kv_write_kernel[triton.cdiv(count, TOKENS), num_heads + 2 * num_kv_heads](
        key if query is None else query, key, value, raw(layer.key), raw(layer.value), scales(layer.key),
        scales(layer.value), slots, slots if positions is None else positions, cos, sin,
        count, slots.shape[0], 0 if query is None else query.stride(0), key.stride(0), value.stride(0),
        layer.key.stride(0),
        **constants(num_heads, num_kv_heads, head_dim, rotated, form, positions=positions is not None),
        num_warps=NUM_WARPS,
    )  # fmt: skip
