"""Writing and copying KV, and the choice of the largest logit, on every kernel path."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from foreword.ops import create_ops
from foreword.ops.cpu.native import NativeOps
from foreword.ops.protocol import KVLayer, SlotCopy
from support import native_kernels

HEADS, SLOTS, DIM = 2, 64, 48
paths = pytest.mark.parametrize("kernels", native_kernels())
with_torch = pytest.mark.parametrize("kernels", ["torch", *native_kernels()])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def filled(ops: NativeOps, layers: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A pool whose every slot holds a random key and value; these, ``[layers, SLOTS, HEADS, DIM]``."""
    generator = torch.Generator().manual_seed(2)
    pool = torch.zeros(layers, 2, HEADS, SLOTS, DIM, dtype=ops.dtype)
    key, value = (torch.randn(layers, SLOTS, HEADS, DIM, generator=generator).to(ops.dtype) for _ in range(2))
    for number, layer in enumerate(pool):
        ops.store_kv(key[number], value[number], KVLayer(*layer), torch.arange(SLOTS, dtype=torch.int32))
    return pool, key, value


def packed(key: Tensor, value: Tensor) -> Tensor:
    """The bytes of a layer that holds ``key, value [SLOTS, HEADS, DIM]``, by the layout documented in foreword.h."""
    result = torch.empty(2, HEADS, SLOTS, DIM, dtype=key.dtype)
    for head in range(HEADS):
        keys, values = (x[:, head].reshape(-1, 16, DIM) for x in (key, value))  # [groups, 16, DIM]
        if key.dtype == torch.float32:
            keys = keys.transpose(1, 2)
        else:
            keys = keys.reshape(-1, 16, DIM // 2, 2).transpose(1, 2)
            values = values.reshape(-1, 8, 2, DIM).transpose(2, 3)
        result[0, head], result[1, head] = keys.reshape(SLOTS, DIM), values.reshape(SLOTS, DIM)
    return result


@paths
@dtypes
def test_kv_lies_as_documented(kernels: str, dtype: torch.dtype) -> None:
    """Values are rounded as torch rounds them, to the nearest and ties to even."""
    pool, key, value = filled(NativeOps(dtype, kernels, num_threads=1))
    assert torch.equal(pool[0], packed(key[0], value[0]))


@paths
@dtypes
def test_rows_go_to_their_slots_and_nowhere_else(kernels: str, dtype: torch.dtype) -> None:
    """Slots in any order and at any offset; only as many rows are written as there are slots."""
    ops = NativeOps(dtype, kernels, num_threads=1)
    pool, key, value = filled(ops)
    slots = random.Random(5).sample(range(SLOTS), 13)
    generator = torch.Generator().manual_seed(3)
    new_key, new_value = (torch.randn(20, HEADS, DIM, generator=generator) for _ in range(2))
    ops.store_kv(new_key, new_value, KVLayer(*pool[0]), torch.tensor(slots, dtype=torch.int32))
    key[0][slots], value[0][slots] = new_key[:13].to(dtype), new_value[:13].to(dtype)
    assert torch.equal(pool[0], packed(key[0], value[0]))


@paths
def test_bfloat16_rounds_as_torch_does(kernels: str) -> None:
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-40, 1.00390625, 1.01171875])
    row = special.repeat(DIM)[:DIM].expand(1, HEADS, DIM)
    ops = NativeOps(torch.bfloat16, kernels, num_threads=1)
    pool = torch.zeros(2, HEADS, 16, DIM, dtype=torch.bfloat16)
    ops.store_kv(row, row, KVLayer(*pool), torch.tensor([4], dtype=torch.int32))
    found = pool[1].reshape(HEADS, 8, DIM, 2)[:, 2, :, 0]
    torch.testing.assert_close(found, row[0].bfloat16(), rtol=0, atol=0, equal_nan=True)


@paths
@dtypes
@pytest.mark.parametrize(
    "copies",
    [
        [SlotCopy(0, 32, 5)],
        [SlotCopy(0, 32, 16), SlotCopy(16, 48, 1)],
        [SlotCopy(3, 33, 13)],
        [SlotCopy(5, 38, 20)],
        [SlotCopy(0, 32, 32)],
        [SlotCopy(1, 49, 15), SlotCopy(16, 32, 0)],
    ],
    ids=str,
)
def test_copies_hold_the_same_bits_and_touch_nothing_else(
    kernels: str, dtype: torch.dtype, copies: list[SlotCopy]
) -> None:
    """In every layer, for whole groups of slots and for parts of them, at equal and at different offsets."""
    ops = NativeOps(dtype, kernels, num_threads=1)
    pool, key, value = filled(ops, layers=3)
    ops.copy_slots(pool, copies)
    for source, target, length in copies:
        for tensor in (key, value):
            tensor[:, target : target + length] = tensor[:, source : source + length]
    for layer in range(3):
        assert torch.equal(pool[layer], packed(key[layer], value[layer]))


@with_torch
@pytest.mark.parametrize("width", [1, 2, 7, 8, 15, 16, 17, 31, 33, 260, 49152])
def test_the_largest_logit_is_found_wherever_it_is(kernels: str, width: int) -> None:
    ops = create_ops("cpu", torch.float32, kernels)
    row = torch.randn(width, generator=torch.Generator().manual_seed(1))
    places = range(width) if width < 300 else [0, 1, 8, 4095, width - 9, width - 1]
    rows = row.repeat(len(places), 1)
    rows[range(len(places)), list(places)] = 100.0
    assert ops.argmax(rows) == list(places)
    assert ops.argmax(-rows.abs() - 1) == (-rows.abs() - 1).argmax(1).tolist()


@with_torch
def test_of_equal_logits_the_first_is_chosen(kernels: str) -> None:
    ops = create_ops("cpu", torch.float32, kernels)
    for width in (5, 40, 1000):
        for first in range(0, width, max(1, width // 20)):
            row = torch.full((1, width), -2.0)
            row[0, first:] = 3.0
            assert ops.argmax(row) == [first]
    assert ops.argmax(torch.tensor([[-1.0, -0.0, 0.0, -1.0] * 5])) == [1]
    assert ops.argmax(torch.zeros(3, 21)) == [0, 0, 0]


@with_torch
@pytest.mark.parametrize("width", [3, 16, 37, 500])
def test_a_nan_or_an_infinite_maximum_is_no_choice(kernels: str, width: int) -> None:
    ops = create_ops("cpu", torch.float32, kernels)
    for place in range(width):
        row = torch.randn(1, width, generator=torch.Generator().manual_seed(place))
        best = int(row.argmax())
        if place != best:
            row[0, place] = -math.inf
            assert ops.argmax(row) == [best]
        for value in (math.nan, math.inf):
            row[0, place] = value
            assert ops.argmax(row) == [None]
        lone = torch.full((1, width), -math.inf)
        assert ops.argmax(lone) == [None]
        lone[0, place] = -3e38
        assert ops.argmax(lone) == [place]
        assert ops.argmax(torch.cat((lone, row, lone))) == [place, None, place]
