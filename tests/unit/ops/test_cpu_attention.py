"""Paged attention on the CPU against plain softmax attention, and its bits against themselves."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from foreword.ops.cpu import CpuOps
from foreword.ops.kv_int8 import scale_width
from foreword.ops.protocol import AttentionSequence, AttentionSpec, KVLayer, SlotCopy, SlotRun

KV_HEADS, GROUP, DIM, SLOTS = 2, 3, 32, 2048
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])
SPECS = [
    AttentionSpec(0.2),
    AttentionSpec(0.2, window=70),
    AttentionSpec(0.2, window=1),
    AttentionSpec(0.2, window=200, softcap=1.5),
]


class Pages:
    """Sequences whose KV, of ``dtype``, lies in blocks of a pool; every other slot is NaN."""

    def __init__(self, dtype: torch.dtype, lengths: list[int], block: int = 16, scatter: bool = False) -> None:
        shape, empty = (KV_HEADS, SLOTS, DIM + scale_width(dtype)), -1 if dtype == torch.int8 else math.nan
        self.layer = KVLayer(*(torch.full(shape, empty, dtype=dtype) for _ in range(2)))
        dtype = torch.float32 if dtype == torch.int8 else dtype
        self.ops = CpuOps(dtype)
        self.keys = [torch.randn(length, KV_HEADS, DIM).to(dtype) for length in lengths]
        self.values = [torch.randn(length, KV_HEADS, DIM).to(dtype) for length in lengths]
        self.queries = [torch.randn(length, KV_HEADS * GROUP, DIM).to(dtype) for length in lengths]
        blocks = list(range(SLOTS // block))
        if scatter:
            random.Random(1).shuffle(blocks)
        self.runs: list[list[SlotRun]] = []
        for number, length in enumerate(lengths):
            own, blocks = blocks[: -(-length // block)], blocks[-(-length // block) + 1 :]
            self.runs.append(
                [SlotRun(start * block, min(block, length - i * block)) for i, start in enumerate(own)]
                if scatter
                else [SlotRun(own[0] * block, length)]
            )
            slots = torch.cat([torch.arange(start, start + size) for start, size in self.runs[-1]])
            self.ops.store_kv(self.keys[number], self.values[number], self.layer, slots)

    def attend(self, parts: list[tuple[int, int, int]], spec: AttentionSpec, padding: int = 0) -> list[Tensor]:
        """Attention of queries ``begin .. end - 1`` of the sequences, one flat batch; per part its rows."""
        rows, sequences = [], []
        for number, begin, end in parts:
            start = sum(len(row) for row in rows)
            runs, left = [], end
            for run in self.runs[number]:
                if left > 0:
                    runs.append(SlotRun(run.start, min(run.length, left)))
                left -= run.length
            sequences.append(AttentionSequence(start, end - begin, end, tuple(runs)))
            rows.append(self.queries[number][begin:end])
        query = torch.cat([*rows, torch.zeros(padding, KV_HEADS * GROUP, DIM, dtype=rows[0].dtype)])
        result = self.ops.attention(query, self.layer, self.ops.plan_attention(sequences), spec)
        assert result.shape == query.shape
        assert result.dtype == query.dtype
        assert torch.isfinite(result).all()
        return list(result[: len(query) - padding].split([len(row) for row in rows]))

    def expected(self, number: int, spec: AttentionSpec) -> Tensor:
        """Softmax attention in double precision, ``[length, heads, DIM]``."""
        query = self.queries[number].double().transpose(0, 1)  # [H, T, D]
        key, value = (
            kv[number].double().transpose(0, 1).repeat_interleave(GROUP, 0) for kv in (self.keys, self.values)
        )
        scores = query @ key.transpose(1, 2) * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        position = torch.arange(query.shape[1])
        distance = position[:, None] - position
        hidden = (distance < 0) | (distance >= (spec.window or math.inf))
        return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(0, 1)


@DTYPES
@pytest.mark.parametrize("scatter", [False, True], ids=["one run", "many runs"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_attention_is_right(spec: AttentionSpec, scatter: bool, dtype: torch.dtype) -> None:
    pages = Pages(dtype, [300, 5, 128], scatter=scatter)
    results = pages.attend([(0, 0, 300), (1, 0, 5), (2, 0, 128)], spec, padding=7)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 5e-2}[dtype]
    for number, result in enumerate(results):
        torch.testing.assert_close(result.double(), pages.expected(number, spec), atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bits_do_not_depend_on_chunks_layout_or_neighbours(spec: AttentionSpec, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    pages = Pages(dtype, [300, 90, 300, 17])
    torch.manual_seed(2)
    scattered = Pages(dtype, [300, 90, 300, 17], scatter=True)
    whole = [pages.attend([(number, 0, len(pages.keys[number]))], spec)[0] for number in range(4)]
    for place in (pages, scattered):
        for begin, end in ((0, 1), (0, 127), (5, 260), (127, 129), (128, 300), (256, 257), (299, 300)):
            parts = [(0, begin, end), (1, 89, 90), (2, 255, 256), (3, 0, 17), (2, 299, 300)]
            for (number, low, high), result in zip(parts, place.attend(parts, spec, padding=3), strict=True):
                assert torch.equal(result, whole[number][low:high]), (number, low, high)


def test_a_batch_of_decodes_equals_each_alone() -> None:
    lengths = [1, 2, 100, 127, 128, 129, 200, 256, 257, 300]
    pages = Pages(torch.bfloat16, lengths)
    parts = [(number, length - 1, length) for number, length in enumerate(lengths)]
    for spec in SPECS:
        together = pages.attend(parts, spec)
        for part, result in zip(parts, together, strict=True):
            assert torch.equal(pages.attend([part], spec)[0], result)


def test_copied_slots_hold_the_same_bits() -> None:
    pool = torch.randn(3, 2, KV_HEADS, 64, DIM)
    before = pool.clone()
    CpuOps(torch.float32).copy_slots(pool, [SlotCopy(0, 32, 5), SlotCopy(16, 48, 16)])
    assert torch.equal(pool[..., 32:37, :], before[..., 0:5, :])
    assert torch.equal(pool[..., 48:64, :], before[..., 16:32, :])
    assert torch.equal(pool[..., 37:48, :], before[..., 37:48, :])
    assert torch.equal(pool[..., :32, :], before[..., :32, :])
