"""Rotation and the pool's formats against the same in torch.

Under Triton's interpreter what is converted to bfloat16 is cut instead of rounded: it may differ in the last place.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foreword.ops.cpu.elementwise import rotate
from foreword.ops.kv_int8 import dequantize_rows, quantize_rows, scale_width
from foreword.ops.protocol import KVLayer, Rotation
from foreword.ops.triton.kv_write import rotate_and_store, store

from .pages import DEVICE

HEADS, KV_HEADS, SLOTS, TOKENS = 3, 2, 48, 11
LAST_PLACE = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}
FORMATS = pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(dtype, kv) for dtype in LAST_PLACE for kv in (dtype, torch.int8, torch.float8_e4m3fn)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)


def empty_layer(kv_dtype: torch.dtype, dim: int, heads: int = KV_HEADS) -> KVLayer:
    shape = (heads, SLOTS, dim + scale_width(kv_dtype))
    return KVLayer(*(torch.full(shape, 3, device=DEVICE).to(kv_dtype) for _ in range(2)))


def angles(count: int, rotated: int) -> Rotation:
    turn = 10 * torch.rand(count, rotated // 2)
    return Rotation(turn.cos().to(DEVICE), turn.sin().to(DEVICE))


def close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    bound = LAST_PLACE[dtype] * expected.double().abs() + 1e-6
    return bool(((result.cpu().double() - expected.double()).abs() <= bound).all())


def check_rows(pool: Tensor, slots: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """``expected [N, heads, dim]`` float32 is in ``slots`` and nothing else has been touched."""
    stored, expected = pool.cpu()[:, slots.cpu().long()], expected.transpose(0, 1)
    if pool.dtype == torch.int8:
        quantized = quantize_rows(expected)
        width = expected.shape[-1]
        assert ((stored.int() - quantized.int())[..., :width].abs() <= 1).all()  # ties, and torch's rounded inverse
        scale = [rows[..., width:].contiguous().view(torch.float32) for rows in (stored, quantized)]
        assert torch.allclose(*scale, rtol=1e-6)
        largest = expected.abs().amax(-1, keepdim=True)
        assert ((dequantize_rows(stored) - expected).abs() <= 0.51 * largest / 127).all()
    elif pool.dtype == torch.float8_e4m3fn:
        codes = [rows.view(torch.uint8).int() for rows in (stored, expected.to(pool.dtype))]
        assert (codes[0] != codes[1]).float().mean() <= (0.0 if DEVICE == "cpu" else 0.01)
        assert ((codes[0] - codes[1]).abs() <= 1).all()
    else:
        assert close(stored, expected, dtype)
    rest = torch.ones(SLOTS, dtype=torch.bool)
    rest[slots.cpu().long()] = False
    assert (pool.cpu()[:, rest].float() == 3).all()


@FORMATS
@pytest.mark.parametrize(("dim", "rotated"), [(64, 64), (80, 80), (80, 32), (96, 96), (256, 64)])
def test_rotate_and_store(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, rotated: int) -> None:
    """Queries in place, keys and values in their slots; the last token has no slot; all are parts of one tensor."""
    torch.manual_seed(0)
    wide = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, dim).to(dtype)
    before = wide.clone()
    wide = wide.to(DEVICE)
    query, key, value = wide.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    slots = torch.randperm(SLOTS)[: TOKENS - 1].int()
    rotation, layer = angles(TOKENS, rotated), empty_layer(kv_dtype, dim)
    rotate_and_store(query, key, value, layer, slots.to(DEVICE), rotation)
    turned = rotate(before[:, : HEADS + KV_HEADS].float(), rotation.cos.cpu(), rotation.sin.cpu())
    assert close(query, turned[:, :HEADS], dtype)
    assert torch.equal(wide[:, HEADS:].cpu(), before[:, HEADS:])
    check_rows(layer.key, slots, turned[: TOKENS - 1, HEADS:], dtype)
    check_rows(layer.value, slots, before[: TOKENS - 1, HEADS + KV_HEADS :].float(), dtype)


@FORMATS
def test_store(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Without a rotation; a negative slot is passed over."""
    torch.manual_seed(0)
    key, value = torch.randn(2, TOKENS, KV_HEADS, 64).to(dtype)
    slots = torch.randperm(SLOTS)[: TOKENS - 2].int()
    slots[4] = -1
    layer, kept = empty_layer(kv_dtype, 64), slots >= 0
    store(key.to(DEVICE), value.to(DEVICE), layer, slots.to(DEVICE))
    check_rows(layer.key, slots[kept], key[: len(slots)][kept].float(), dtype)
    check_rows(layer.value, slots[kept], value[: len(slots)][kept].float(), dtype)


def test_positions_choose_rows_of_a_table() -> None:
    """The rows of the tables for all positions, and the tables themselves with positions: the same bits."""
    torch.manual_seed(0)
    table, positions = angles(100, 64), torch.randint(0, 100, (TOKENS,))
    slots, results = torch.arange(TOKENS).int().to(DEVICE), []
    for rotation, chosen in (
        (Rotation(*(part[positions.to(DEVICE)] for part in table)), None),
        (table, positions.int().to(DEVICE)),
    ):
        generator = torch.Generator().manual_seed(1)
        query, key = (torch.randn(TOKENS, KV_HEADS, 64, generator=generator).to(DEVICE) for _ in range(2))
        layer = empty_layer(torch.float32, 64)
        rotate_and_store(query, key, key, layer, slots, rotation, chosen)
        results.append(torch.cat((query.transpose(0, 1), layer.key), dim=1))
    assert torch.equal(*results)


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
def test_int8_of_what_is_not_finite() -> None:
    """The row's scale becomes NaN, as in the CPU backend; rows of zeros stay zeros."""
    rows = torch.randn(4, 1, 64)
    rows[0, 0, 5], rows[1, 0, 63], rows[2] = math.inf, math.nan, 0.0
    layer = empty_layer(torch.int8, 64, heads=1)
    store(rows.to(DEVICE), rows.to(DEVICE), layer, torch.arange(4).int().to(DEVICE))
    for pool in layer:
        values = dequantize_rows(pool[0, :4].cpu())
        assert values[:2].isnan().all()
        assert (values[2] == 0).all()
        assert values[3].isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")
def test_fp8_of_every_kind() -> None:
    """Subnormal numbers, ties, what is beyond the range, signed zeros and NaN, as torch converts them."""
    numbers = [448.0, 449.0, 1e9, -1e9, math.inf, -math.inf, 0.0, -0.0, math.nan, 2**-10, 3 * 2**-10, 0.0155, 0.015625]
    numbers += [i * 2**-11 for i in range(-60, 60)]
    rows = torch.tensor(numbers + [(-1) ** i * 1.07**i for i in range(64 * 3 - len(numbers))]).view(3, 1, 64)
    layer = empty_layer(torch.float8_e4m3fn, 64, heads=1)
    store(rows.to(DEVICE), rows.to(DEVICE), layer, torch.arange(3).int().to(DEVICE))
    expected = rows.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for pool in layer:
        assert torch.equal(pool[0, :3].cpu().view(torch.uint8), expected[:, 0])


def test_what_does_not_fit_is_refused() -> None:
    """Each with the value that is wrong."""
    key, slots = torch.zeros(2, 1, 64, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    layer = empty_layer(torch.float32, 64, heads=1)
    with pytest.raises(ValueError, match=r"heads of 64 of which 128 are rotated"):
        rotate_and_store(key, key, key, layer, slots, angles(2, 128))
    with pytest.raises(ValueError, match=r"query has shape \(1, 1, 64\)"):
        rotate_and_store(key[:1], key, key, layer, slots, angles(2, 64))
    with pytest.raises(ValueError, match=r"value has shape .* strides \(64, 64, 2\)"):
        store(key, torch.zeros(2, 1, 128)[..., ::2].as_strided((2, 1, 64), (64, 64, 2)), layer, slots)
    with pytest.raises(ValueError, match="must have 64 elements, not 63"):
        store(key, key, KVLayer(*(x[..., 1:] for x in layer)), slots)
