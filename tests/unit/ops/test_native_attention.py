"""Native paged attention of every kernel path: against plain torch, and its bits against themselves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from foreword.ops.cpu import CpuOps
from foreword.ops.cpu.native import NativeOps
from foreword.ops.kv_int8 import scale_width
from foreword.ops.protocol import AttentionSequence, AttentionSpec, KVLayer, SlotRun
from support import native_kernels

BLOCK = 16
SPECS = [
    AttentionSpec(0.2),
    AttentionSpec(0.2, window=70),
    AttentionSpec(0.2, window=1),
    AttentionSpec(0.2, softcap=1.5),
    AttentionSpec(0.2, window=200, softcap=1.5),
]
paths = pytest.mark.parametrize("kernels", native_kernels())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])
Part = tuple[int, int, int]
"""A sequence and its queries ``begin .. end - 1``."""


class Pages:
    """Sequences in a pool of each backend; slots that hold no token are NaN.

    Args:
        dtype: of the KV.
        scatter: the seed of a random order of all blocks; None: one run per sequence.
    """

    def __init__(
        self,
        kernels: str,
        dtype: torch.dtype,
        lengths: list[int],
        kv_heads: int = 2,
        group: int = 3,
        dim: int = 32,
        scatter: int | None = None,
        num_threads: int = 1,
    ) -> None:
        plain = torch.float32 if dtype == torch.int8 else dtype
        self.ops, self.reference = NativeOps(plain, kernels, num_threads), CpuOps(plain)
        generator = torch.Generator().manual_seed(4)
        needed = sum(-(-length // BLOCK) for length in lengths) + 3

        def pool() -> KVLayer:
            shape = (2, kv_heads, needed * BLOCK, dim + scale_width(dtype))
            empty = torch.full(shape, -1 if dtype == torch.int8 else torch.nan, dtype=dtype)  # scales of -1s are NaN
            return KVLayer(empty[0], empty[1])

        self.native, self.plain = pool(), pool()
        blocks = list(range(needed))
        if scatter is not None:
            random.Random(scatter).shuffle(blocks)
        self.runs: list[list[SlotRun]] = []
        self.queries: list[Tensor] = []
        for length in lengths:
            own = [blocks.pop(0) for _ in range(-(-length // BLOCK))]
            runs = [SlotRun(block * BLOCK, min(BLOCK, length - i * BLOCK)) for i, block in enumerate(own)]
            self.runs.append(runs if scatter is not None else [SlotRun(own[0] * BLOCK, length)])
            key, value = (torch.randn(length, kv_heads, dim, generator=generator).to(plain) for _ in range(2))
            slots = torch.cat([torch.arange(start, start + size, dtype=torch.int32) for start, size in runs])
            self.ops.store_kv(key, value, self.native, slots)
            self.reference.store_kv(key, value, self.plain, slots)
            self.queries.append(torch.randn(length, kv_heads * group, dim, generator=generator))

    def batch(self, parts: list[Part]) -> tuple[list[AttentionSequence], Tensor]:
        sequences, start = [], 0
        for number, begin, end in parts:
            runs, left = [], end
            for run in self.runs[number]:
                if left > 0:
                    runs.append(SlotRun(run.start, min(run.length, left)))
                left -= run.length
            sequences.append(AttentionSequence(start, end - begin, end, tuple(runs)))
            start += end - begin
        return sequences, torch.cat([self.queries[number][begin:end] for number, begin, end in parts])

    def attend(self, parts: list[Part], spec: AttentionSpec) -> list[Tensor]:
        sequences, query = self.batch(parts)
        result = self.ops.attention(query, self.native, self.ops.plan_attention(sequences), spec)
        return list(result.split([end - begin for _, begin, end in parts]))

    def expected(self, parts: list[Part], spec: AttentionSpec) -> list[Tensor]:
        """By the torch operations, float32 inside."""
        sequences, query = self.batch(parts)
        result = self.reference.attention(query, self.plain, self.reference.plan_attention(sequences), spec)
        return list(result.split([end - begin for _, begin, end in parts]))


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@paths
@dtypes
@pytest.mark.parametrize("scatter", [None, 1], ids=["one run", "many runs"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_attention_equals_that_of_torch(
    kernels: str, dtype: torch.dtype, scatter: int | None, spec: AttentionSpec
) -> None:
    """Whole prompts, later chunks and decodes in one batch; what no token owns is NaN and read by none."""
    pages = Pages(kernels, dtype, [300, 5, 128, 257], scatter=scatter)
    for parts in ([(0, 0, 300), (1, 0, 5), (2, 0, 128)], [(0, 130, 290), (3, 256, 257), (1, 4, 5), (2, 100, 101)]):
        assert_close(pages.attend(parts, spec), pages.expected(parts, spec))


@paths
@dtypes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_every_group_size_and_head_size(kernels: str, dtype: torch.dtype, group: int, dim: int) -> None:
    pages = Pages(kernels, dtype, [140, 33], group=group, dim=dim, scatter=2)
    spec = AttentionSpec(dim**-0.5, window=100)
    parts = [(0, 60, 139), (1, 32, 33)]
    assert_close(pages.attend(parts, spec), pages.expected(parts, spec))


@paths
@pytest.mark.parametrize("dim", [32, 48, 80, 96, 112, 192, 256])
def test_odd_and_large_head_sizes(kernels: str, dim: int) -> None:
    pages = Pages(kernels, torch.bfloat16, [150], kv_heads=1, group=5, dim=dim)
    spec = AttentionSpec(dim**-0.5)
    assert_close(pages.attend([(0, 0, 150)], spec), pages.expected([(0, 0, 150)], spec))


@paths
@dtypes
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bits_do_not_depend_on_chunks_layout_or_neighbours(
    kernels: str, dtype: torch.dtype, spec: AttentionSpec
) -> None:
    lengths = [300, 90, 300, 17]
    pages, scattered = (Pages(kernels, dtype, lengths, scatter=s) for s in (None, 3))
    whole = [pages.attend([(number, 0, length)], spec)[0] for number, length in enumerate(lengths)]
    for place in (pages, scattered):
        for begin, end in ((0, 1), (0, 127), (5, 260), (127, 129), (128, 300), (256, 257), (299, 300)):
            parts = [(0, begin, end), (1, 89, 90), (2, 255, 256), (3, 0, 17), (2, 299, 300)]
            for (number, low, high), result in zip(parts, place.attend(parts, spec), strict=True):
                assert torch.equal(result, whole[number][low:high]), (number, low, high)


@paths
@dtypes
def test_any_number_of_threads_gives_the_same_bits(kernels: str, dtype: torch.dtype) -> None:
    lengths = [1, 2, 100, 127, 128, 129, 256, 300]
    parts = [(number, length - 1, length) for number, length in enumerate(lengths)] + [(7, 3, 290)]
    one, *more = (Pages(kernels, dtype, lengths, num_threads=count) for count in (1, 2, 3))
    expected = one.attend(parts, SPECS[0])
    for pages in more:
        assert all(map(torch.equal, pages.attend(parts, SPECS[0]), expected))


@paths
@dtypes
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 129, 143])
def test_what_lies_behind_the_last_position_is_not_read(kernels: str, dtype: torch.dtype, length: int) -> None:
    """Whatever a former owner left in the rest of a block, NaN or infinity, changes no bit."""
    pages = Pages(kernels, dtype, [length])
    part = [(0, length - 1, length)]
    start = pages.runs[0][0].start
    rest = torch.arange(start + length, start + -(-length // BLOCK) * BLOCK, dtype=torch.int32)
    results = []
    for filling in (0.0, torch.nan, torch.inf, -1e30):
        filled = torch.full((len(rest), 2, 32), filling)
        pages.ops.store_kv(filled, filled, pages.native, rest)
        results.append(pages.attend(part, SPECS[0])[0])
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(result, results[0]) for result in results)


@paths
@dtypes
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_a_nan_in_a_sequence_reaches_that_sequence_only(kernels: str, dtype: torch.dtype, place: str) -> None:
    """It comes through to every query that sees it, and to no other sequence."""
    pages = Pages(kernels, dtype, [200, 150])
    parts = [(0, 199, 200), (1, 149, 150)]
    before = pages.attend(parts, SPECS[0])
    if place == "query":
        pages.queries[0][199, :, 3] = torch.nan
    else:
        bad = torch.full((1, 2, 32), torch.nan)
        good = torch.ones(1, 2, 32)
        slot = torch.tensor([pages.runs[0][0].start + 77], dtype=torch.int32)
        pages.ops.store_kv(bad if place == "key" else good, bad if place == "value" else good, pages.native, slot)
    after = pages.attend(parts, SPECS[0])
    assert torch.isnan(after[0]).all()
    assert torch.equal(after[1], before[1])


@paths
def test_scores_far_apart_neither_overflow_nor_vanish(kernels: str) -> None:
    """The softmax of scores in the thousands, with the largest in any tile, is finite and right."""
    pages = Pages(kernels, torch.float32, [300])
    for scale in (300.0, -300.0, 1e-6):
        spec = AttentionSpec(scale)
        found, expected = pages.attend([(0, 0, 300)], spec)[0], pages.expected([(0, 0, 300)], spec)[0]
        assert torch.isfinite(found).all()
        # At such scores one unit in the last place of a score is a factor of e ** 1e-3.
        torch.testing.assert_close(found, expected, atol=1e-5 if abs(scale) < 1 else 2e-2, rtol=1e-3)


@paths
def test_weights_are_exponentials(kernels: str) -> None:
    """Of two positions with scores 0 and -x the second weighs exp(-x): half of all at 0, nothing below -87.3."""
    ops = NativeOps(torch.float32, kernels, num_threads=1)
    scores = torch.linspace(-100, 0, 2001)
    key, value, query = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16), torch.zeros(len(scores), 1, 16)
    key[1, 0, 3], value[1], query[:, 0, 3] = 1.0, 1.0, scores
    layer = KVLayer(*torch.full((2, 1, BLOCK, 16), torch.nan))
    ops.store_kv(key, value, layer, torch.arange(2, dtype=torch.int32))
    plan = ops.plan_attention([AttentionSequence(row, 1, 2, (SlotRun(0, 2),)) for row in range(len(scores))])
    found = ops.attention(query, layer, plan, AttentionSpec(1.0))[:, 0, 0].double()
    expected = scores.double().exp() / (1 + scores.double().exp())
    assert found[-1] == 0.5
    assert (found[scores < -87.3] == 0).all()
    seen = scores > -87.3
    assert ((found / expected)[seen] - 1).abs().max() < 5e-7
