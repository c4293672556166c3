"""KV in 8 bits: what a row loses, and that every kernel path stores, copies and reads the same bytes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from foreword.kv.pool import KVGeometry, KVPool
from foreword.ops import create_ops
from foreword.ops.kv_int8 import SCALE_BYTES, dequantize_rows, quantize_rows
from foreword.ops.protocol import KVLayer, Ops, SlotCopy
from support import native_kernels

HEADS, SLOTS, DIM = 2, 64, 48
paths = pytest.mark.parametrize("kernels", ["torch", *native_kernels()])


def scales(rows: Tensor) -> Tensor:
    return rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def rows_in(layer: Tensor, kernels: str) -> Tensor:
    """Quantised rows ``[2, HEADS, SLOTS, DIM + SCALE_BYTES]`` of a layer, by the layout documented in foreword.h."""
    if kernels == "torch":
        return layer
    groups = layer.reshape(2, HEADS, SLOTS // 16, 16 * (DIM + SCALE_BYTES))
    values = groups[..., : 16 * DIM].reshape(2, HEADS, SLOTS // 16, 16, DIM).clone()
    values[0] = groups[0, ..., : 16 * DIM].reshape(HEADS, SLOTS // 16, DIM, 16).transpose(2, 3)
    scale = groups[..., 16 * DIM :].reshape(2, HEADS, SLOTS // 16, 16, SCALE_BYTES)
    return torch.cat((values, scale), dim=-1).reshape(2, HEADS, SLOTS, DIM + SCALE_BYTES)


def pool(layers: int = 1) -> Tensor:
    """Without any token: every scale is NaN."""
    return torch.full((layers, 2, HEADS, SLOTS, DIM + SCALE_BYTES), -1, dtype=torch.int8)


def store(ops: Ops, layer: Tensor, key: Tensor, value: Tensor, slots: list[int]) -> None:
    ops.store_kv(key, value, KVLayer(layer[0], layer[1]), torch.tensor(slots, dtype=torch.int32))


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4, 1e36])
def test_a_row_comes_back_within_half_a_step(size: float) -> None:
    """Of 254 steps between its extremes; its largest value comes back within rounding."""
    rows = torch.randn(500, DIM, generator=torch.Generator().manual_seed(0)) * size
    rows[:, 7] *= 20  # an outlier
    found = dequantize_rows(quantize_rows(rows))
    largest = rows.abs().amax(1, keepdim=True)
    assert ((found - rows).abs() <= largest / 254 * (1 + 1e-5)).all()
    torch.testing.assert_close(found.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=0)


def test_rows_depend_on_themselves_alone() -> None:
    rows = torch.randn(40, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    together = quantize_rows(rows)
    for number in range(40):
        assert torch.equal(quantize_rows(rows[number : number + 1, 1])[0], together[number, 1])


def test_zeros_tiny_and_huge_values() -> None:
    rows = torch.zeros(5, DIM)
    rows[1, 0], rows[2, 0], rows[3, 0], rows[4] = 1e-44, 1e-31, 3e38, -1e38
    found = dequantize_rows(quantize_rows(rows))
    assert torch.equal(found[:3], torch.zeros(3, DIM))
    torch.testing.assert_close(found[3:], rows[3:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_own_row_only(bad: float) -> None:
    rows = torch.randn(3, DIM, generator=torch.Generator().manual_seed(2))
    whole = quantize_rows(rows)
    rows[1, 5] = bad
    found = quantize_rows(rows)
    assert dequantize_rows(found)[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@paths
def test_every_path_stores_the_same_bytes(kernels: str) -> None:
    """In any slots, and nowhere else; also where rows are zero, halfway between two steps, or not finite."""
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(20, HEADS, DIM, generator=generator) for _ in range(2))
    key[1], value[2, 0, 3], value[3, 1, 4], key[4, 0, 0] = 0, math.inf, math.nan, -1e30
    key[5, 0] = torch.arange(DIM) - 24.5
    key[5, 0, 0] = 127.0
    key[6] = 1e-31
    layer, slots = pool()[0], random.Random(5).sample(range(SLOTS), 13)
    store(create_ops("cpu", torch.float32, kernels), layer, key, value, slots)
    found = rows_in(layer, kernels)
    for number, rows in enumerate((key, value)):
        expected, kept = quantize_rows(rows[:13]).transpose(0, 1), found[number][:, slots]
        assert torch.equal(kept[..., :DIM], expected[..., :DIM])
        torch.testing.assert_close(scales(kept), scales(expected), rtol=0, atol=0, equal_nan=True)
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert (found[:, :, others] == -1).all()


@paths
@pytest.mark.parametrize("copy", [SlotCopy(0, 32, 5), SlotCopy(3, 33, 13), SlotCopy(5, 38, 20), SlotCopy(0, 32, 32)])
def test_copies_take_values_and_scales_along(kernels: str, copy: SlotCopy) -> None:
    ops, layers = create_ops("cpu", torch.float32, kernels), pool(layers=2)
    generator = torch.Generator().manual_seed(6)
    for layer in layers:
        key, value = (torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(2))
        store(ops, layer, key, value, list(range(SLOTS)))
    expected = [rows_in(layer, kernels).clone() for layer in layers]
    ops.copy_slots(layers, [copy])
    for layer, rows in zip(layers, expected, strict=True):
        rows[:, :, copy.target : copy.target + copy.length] = rows[
            :, :, copy.source : copy.source + copy.length
        ].clone()
        assert torch.equal(rows_in(layer, kernels), rows)


def test_the_pool_holds_what_the_geometry_says() -> None:
    """A head of 64 takes 68 bytes instead of 128: 1.88 times the tokens of bfloat16, 3.76 times those of float32."""
    geometries = {
        dtype: KVGeometry(num_layers=3, num_kv_heads=2, head_dim=64, dtype=dtype)
        for dtype in (torch.int8, torch.bfloat16, torch.float32)
    }
    for geometry in geometries.values():
        assert KVPool(geometry, 5, 16).data.nbytes == 5 * 16 * geometry.bytes_per_token
    small = geometries[torch.int8].bytes_per_token
    assert geometries[torch.bfloat16].bytes_per_token * 17 == small * 32
    assert geometries[torch.float32].bytes_per_token * 17 == small * 64
