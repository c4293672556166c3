"""Sequences in a paged pool on the device under test, and plain attention over them in double precision."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.ops.kv_int8 import dequantize_rows, quantize_rows, scale_width
from foreword.ops.protocol import AttentionSequence, AttentionSpec, KVLayer, SlotRun
from foreword.ops.triton.attention import attend, tile_heights
from foreword.ops.triton.plan import AttentionPlan, PlanSettings
from foreword.ops.triton.planner import make_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16

Part = tuple[int, int, int]
"""A sequence, and the queries ``begin .. end - 1`` of it."""


class Pages:
    """Sequences whose KV lies in blocks of a pool; what belongs to none of them is not finite.

    Args:
        lengths: positions of each sequence.
        shared: leading positions that each has in the same slots as sequence 0, in whole blocks.
        dtype: of queries; ``kv_dtype``: of the pool.
        scatter: blocks in random order; otherwise a sequence's own lie side by side.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        shared: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        kv_heads: int = 1,
        group: int = 4,
        dim: int = 64,
        scatter: bool = False,
        seed: int = 0,
    ) -> None:
        self.dtype, self.group, self.dim, self.kv_heads = dtype, group, dim, kv_heads
        kv_dtype = kv_dtype or dtype
        generator = torch.Generator().manual_seed(seed)
        number = sum(-(-length // BLOCK) + 1 for length in lengths)
        order = list(range(number))
        if scatter:
            random.Random(seed).shuffle(order)
        pool = torch.full((2, kv_heads, number * BLOCK, dim + scale_width(kv_dtype)), math.nan).to(kv_dtype)
        if kv_dtype == torch.int8:
            pool.fill_(-1)  # as a scale: NaN
        self.blocks: list[list[int]] = []
        self.kv: list[Tensor] = []  # [2, positions, kv_heads, dim] float64, as stored
        self.queries: list[Tensor] = []
        for i, length in enumerate(lengths):
            same = shared[i] if i and shared else 0
            own = [order.pop(0) for _ in range(-(-(length - same) // BLOCK))]
            self.blocks.append((self.blocks[0][: same // BLOCK] if same else []) + own)
            rows = _as(torch.randn(2, kv_heads, length, dim, generator=generator), kv_dtype)
            slots = torch.tensor([block * BLOCK + j for block in own for j in range(BLOCK)][: length - same])
            pool.view(torch.uint8)[:, :, slots] = rows[:, :, same:].view(torch.uint8)
            stored = _from(rows).transpose(1, 2)
            self.kv.append(torch.cat((self.kv[0][:, :same], stored[:, same:]), dim=1) if same else stored)
            queries = torch.randn(length, kv_heads * group, dim, generator=generator)
            self.queries.append(queries.to(dtype))
        pool = pool.to(DEVICE)
        self.layer = KVLayer(pool[0], pool[1])

    def sequences(self, parts: Sequence[Part]) -> list[AttentionSequence]:
        """The parts side by side in a batch."""
        result, start = [], 0
        for number, begin, end in parts:
            blocks, runs = self.blocks[number][: -(-end // BLOCK)], []
            for i, block in enumerate(blocks):
                size = min(BLOCK, end - i * BLOCK)
                if runs and runs[-1].start + runs[-1].length == block * BLOCK:
                    runs[-1] = SlotRun(runs[-1].start, runs[-1].length + size)
                else:
                    runs.append(SlotRun(block * BLOCK, size))
            result.append(AttentionSequence(start, end - begin, end, tuple(runs)))
            start += end - begin
        return result

    def plan(
        self,
        parts: Sequence[Part],
        spec: AttentionSpec,
        *,
        programs: int = 1,
        deterministic: bool = False,
        share: bool = True,
    ) -> AttentionPlan:
        heights = tile_heights(self.dtype, self.dim, deterministic=deterministic)
        settings = PlanSettings(self.kv_heads, self.group, BLOCK, programs, heights, deterministic, share)
        return make_plan(self.sequences(parts), settings, window=spec.window, device=DEVICE)

    def attend(
        self,
        parts: Sequence[Part],
        spec: AttentionSpec,
        plan: AttentionPlan | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """The attention of the parts, with two rows of padding behind them that must come out as zeros."""
        query = torch.cat([self.queries[number][begin:end] for number, begin, end in parts])
        padded = torch.cat((query, query.new_full((2, *query.shape[1:]), math.nan))).to(DEVICE)
        result = attend(padded, self.layer, plan or self.plan(parts, spec), spec, slopes).cpu()
        assert (result[-2:] == 0).all()
        return result[:-2]

    def expected(self, parts: Sequence[Part], spec: AttentionSpec, slopes: Tensor | None = None) -> Tensor:
        """Softmax attention in double precision over the values as they are stored."""
        return torch.cat([self._expected(*part, spec, slopes) for part in parts])

    def _expected(self, number: int, begin: int, end: int, spec: AttentionSpec, slopes: Tensor | None) -> Tensor:
        query = self.queries[number][begin:end].double().transpose(0, 1)  # [H, Q, D]
        key, value = (kv[:end].transpose(0, 1).repeat_interleave(self.group, 0) for kv in self.kv[number])
        scores = query @ key.transpose(1, 2) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = torch.arange(begin, end)[:, None] - torch.arange(end)
        if slopes is not None:
            scores = scores - slopes.double().cpu()[:, None, None] * distance
        hidden = distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(0, 1)


def _as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return quantize_rows(rows) if dtype == torch.int8 else rows.to(dtype)


def _from(rows: Tensor) -> Tensor:
    return (dequantize_rows(rows) if rows.dtype == torch.int8 else rows).double()
