"""The shared-prefix plan: every row meets its own KV once, in order; what is shared is read once; no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword import Engine
from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.cpu.native import NativeOps
from foreword.ops.cpu.native.plan import Costs, NativePlan, make_plan
from foreword.ops.protocol import AttentionSequence, AttentionSpec, KVLayer, SlotRun
from support import native_kernels, random_ids

SLOTS = 16
TILE_BLOCKS = TILE // SLOTS
paths = pytest.mark.parametrize("kernels", native_kernels())


@dataclass
class Node:
    """A piece of a prefix tree in whole blocks, and what hangs below it."""

    blocks: list[int]
    children: list[Node]


class Forest:
    """Sequences over random trees of blocks: each ends in blocks of its own, as a decoding request's does."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.free = 0
        self.scattered = draw(st.booleans())
        self.sequences: list[tuple[list[int], int, int]] = []
        """Blocks, KV length and number of queries."""
        for _ in range(draw(st.integers(1, 3))):
            self._grow(draw, [], 0)

    def _take(self, count: int) -> list[int]:
        first, self.free = self.free, self.free + count + self.scattered
        return list(range(first, first + count))

    def _grow(self, draw: st.DrawFn, prefix: list[int], depth: int) -> None:
        prefix = prefix + self._take(draw(st.integers(0, 20)))
        if depth < 3:
            for _ in range(draw(st.integers(0, 2))):
                self._grow(draw, prefix, depth + 1)
        for _ in range(draw(st.integers(0 if depth else 1, 3))):
            own = self._take(draw(st.integers(1, 10)))
            length = SLOTS * (len(prefix) + len(own)) - draw(st.integers(0, SLOTS - 1))
            most = length - SLOTS * len(prefix)
            queries = draw(st.sampled_from([1, 1, 1, most]))
            self.sequences.append((prefix + own, length, queries))

    def batch(self) -> list[AttentionSequence]:
        result, start = [], 0
        for blocks, length, queries in self.sequences:
            result.append(AttentionSequence(start, queries, length, runs_of(blocks, length)))
            start += queries
        return result


forests = st.composite(Forest)()


def runs_of(blocks: list[int], length: int) -> tuple[SlotRun, ...]:
    """As few runs as there can be."""
    runs: list[SlotRun] = []
    for index, block in enumerate(blocks):
        size = min(SLOTS, length - index * SLOTS)
        if runs and runs[-1].start + runs[-1].length == block * SLOTS:
            runs[-1] = SlotRun(runs[-1].start, runs[-1].length + size)
        else:
            runs.append(SlotRun(block * SLOTS, size))
    return tuple(runs)


def positions_of(batch: list[AttentionSequence]) -> Any:
    return np.concatenate([np.arange(s.kv_len - s.query_len, s.kv_len, dtype=np.int32) for s in batch])


def plan_of(batch: list[AttentionSequence], *, threads: int = 1, kv_heads: int = 1, **options: Any) -> NativePlan:
    costs = options.pop("costs", Costs(1.0, 0.6))
    positions = positions_of(batch)
    return make_plan(batch, positions, num_kv_heads=kv_heads, num_threads=threads, costs=costs, **options)


def check(plan: NativePlan, batch: list[AttentionSequence], tables: list[list[int]]) -> None:
    """Every row of the batch is computed by one task, whose segments lead it through its own KV once, in order; or it
    is split, and the parts of its tasks do."""
    rows, positions, segments, tasks, splits, blocks = plan.arrays
    owner = {s.query_start + i: number for number, s in enumerate(batch) for i in range(s.query_len)}
    assert sorted(rows.tolist()) == sorted(owner), "every row once"
    seen, parts = [], {}
    for row_begin, row_end, segment_begin, segment_end, first_part in tasks.tolist():
        seen += range(segment_begin, segment_end)
        if first_part >= 0:
            (segment,) = segments[segment_begin:segment_end].tolist()
            assert segment[:2] == [row_begin, row_end] == [row_begin, row_begin + 1]
            for part, tile in enumerate(range(*segment[2:4]), start=first_part):
                assert part not in parts, "no two tiles in one place"
                begin = segment[4] + tile * TILE_BLOCKS
                known = tables[owner[rows[row_begin]]][tile * TILE_BLOCKS : (tile + 1) * TILE_BLOCKS]
                assert blocks[begin : begin + len(known)].tolist() == known
                parts[part] = (row_begin, tile)
            continue
        for place in range(row_begin, row_end):
            number, tile = owner[rows[place]], 0
            for low, high, first, last, first_block in segments[segment_begin:segment_end].tolist():
                assert row_begin <= low < high <= row_end
                if not low <= place < high:
                    continue
                assert first == tile < last, "tiles without a gap, in ascending order, none twice"
                tile = last
                known = tables[number][first * TILE_BLOCKS : last * TILE_BLOCKS]
                begin = first_block + first * TILE_BLOCKS
                assert blocks[begin : begin + len(known)].tolist() == known, "only where block tables agree"
            assert tile == positions[rows[place]] // TILE + 1
    for place, first, count in splits.tolist():
        assert count == positions[rows[place]] // TILE + 1
        assert [parts.pop(first + tile) for tile in range(count)] == [(place, tile) for tile in range(count)]
    assert not parts
    assert sorted(seen) == list(range(len(segments))), "every segment belongs to one task"
    whole = [place for task in tasks.tolist() if task[4] < 0 for place in range(task[0], task[1])]
    split = [place for place, _, _ in splits.tolist()]
    assert sorted(whole + split) == list(range(len(rows)))
    assert plan.tiles_read == sum(int(s[3] - s[2]) for s in segments)
    assert plan.tiles_read <= plan.tiles_used


@given(forests, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.01, 0.6, 50.0]), st.booleans())
def test_every_row_meets_its_own_kv_once_and_in_order(
    forest: Forest, threads: int, kv_heads: int, row_cost: float, share: bool
) -> None:
    batch = forest.batch()
    plan = plan_of(batch, threads=threads, kv_heads=kv_heads, costs=Costs(1.0, row_cost), share=share)
    check(plan, batch, [blocks for blocks, _, _ in forest.sequences])
    if not share:
        assert plan.tiles_read == plan.tiles_used


@given(forests)
def test_one_thread_reads_every_distinct_tile_of_decoding_sequences_once(forest: Forest) -> None:
    """Tiles are distinct if all blocks up to their end are: sharing is of beginnings."""
    decoding = [(blocks, length) for blocks, length, _ in forest.sequences]
    batch = [AttentionSequence(n, 1, length, runs_of(blocks, length)) for n, (blocks, length) in enumerate(decoding)]
    plan = plan_of(batch)
    distinct = {
        tuple(blocks[: (tile + 1) * TILE_BLOCKS]) for blocks, length in decoding for tile in range(-(-length // TILE))
    }
    assert plan.tiles_read == len(distinct)
    assert plan.tiles_used == sum(-(-length // TILE) for _, length in decoding)


@pytest.mark.parametrize("kernels", native_kernels())
@given(forest=forests, threads=st.integers(1, 3))
def test_sharing_and_splitting_change_no_bit(kernels: str, forest: Forest, threads: int) -> None:
    """One thread splits no sequence and three split those that are few; shared or not, the bits are the same."""
    ops, alone = (NativeOps(torch.float32, kernels, num_threads=count) for count in (threads, 1))
    batch = forest.batch()
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(2, 2, (forest.free + 1) * SLOTS, 32, generator=generator)
    query = torch.randn(sum(s.query_len for s in batch), 6, 32, generator=generator)
    results = []
    for engine, share in ((ops, True), (ops, False), (alone, False)):
        engine.share_prefixes = share
        plan = engine.plan_attention(batch)
        for spec in (AttentionSpec(0.3), AttentionSpec(0.3, window=150, softcap=2.0)):
            results.append(engine.attention(query, KVLayer(*pool), plan, spec))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert torch.equal(results[0], results[4])
    assert torch.equal(results[1], results[5])
    assert torch.isfinite(results[0]).all()


def decoding(prefixes: list[list[int]], own: int, length: int = SLOTS) -> list[AttentionSequence]:
    """A decoding sequence over each prefix, with ``own`` blocks behind it, the last one holding ``length`` slots."""
    batch, free = [], 10_000
    for number, prefix in enumerate(prefixes):
        blocks = prefix + list(range(free, free + own))
        free += own + 1
        kv_len = SLOTS * (len(blocks) - 1) + length
        batch.append(AttentionSequence(number, 1, kv_len, runs_of(blocks, kv_len)))
    return batch


def test_sixteen_sequences_read_their_common_prefix_once() -> None:
    """1,024 shared tokens are 8 tiles, read once; each sequence's own 40 tokens are one more."""
    batch = decoding([list(range(64))] * 16, own=3, length=8)
    plan = plan_of(batch)
    assert plan.tiles_used == 16 * 9
    assert plan.tiles_read == 8 + 16
    assert plan_of(batch, share=False).tiles_read == 16 * 9
    segments = {(int(s[1] - s[0]), int(s[2]), int(s[3])) for s in plan.arrays[2]}
    assert segments == {(16, 0, 8), (1, 8, 9)}


def test_shared_tokens_that_fill_no_tile_are_read_by_each() -> None:
    """120 shared tokens and a tile that begins in the prefix and ends in the sequences: nothing can be shared."""
    plan = plan_of(decoding([list(range(7))] * 5, own=4))
    assert plan.tiles_read == plan.tiles_used == 5 * 2


def test_a_tree_is_shared_at_every_level() -> None:
    """A root of 2 tiles, two branches of 1 and 3 tiles more, and a branch of the second of 1 more."""
    root = list(range(16))
    left, right = root + list(range(100, 108)), root + list(range(200, 224))
    deep = right + list(range(300, 308))
    batch = decoding([left, deep, right, left, deep, root, right, deep], own=1)
    plan = plan_of(batch)
    shared = {
        (int(end - begin), int(first), int(last)) for begin, end, first, last, _ in plan.arrays[2] if end - begin > 1
    }
    assert shared == {(8, 0, 2), (2, 2, 3), (5, 2, 5), (3, 5, 6)}
    assert plan.tiles_read == 2 + 1 + 3 + 1 + 8
    assert plan.tiles_used == sum(-(-s.kv_len // TILE) for s in batch)
    assert len(plan.arrays[3]) == 1, "one task, as there is one thread"


def test_with_idle_threads_a_group_is_cut_where_rows_cost_most() -> None:
    """One KV head and four threads: cut if computing rows takes the time, whole if reading the shared tiles does."""
    batch = decoding([list(range(64))] * 16, own=0)
    by_rows = plan_of(batch, threads=4, costs=Costs(0.01, 1.0))
    by_reading = plan_of(batch, threads=4, costs=Costs(1000.0, 0.001))
    assert len(by_rows.arrays[3]) == 4
    assert by_rows.tiles_read == 4 * 8
    assert len(by_reading.arrays[3]) == 1
    assert by_reading.tiles_read == 8


def test_idle_threads_share_the_reading_of_what_is_not_common() -> None:
    """Two long sequences with one tile in common: a thread reads each, though that tile is then read twice."""
    batch = decoding([list(range(8)) + list(range(start, start + 504)) for start in (1000, 2000)], own=0)
    plan = plan_of(batch, threads=2, costs=Costs(1000.0, 0.001))
    assert len(plan.arrays[3]) == 2
    assert plan.tiles_read == plan.tiles_used == 2 * 64


@pytest.mark.parametrize(("threads", "kv_heads", "tasks"), [(1, 3, 1), (2, 3, 2), (8, 1, 8), (8, 3, 5), (2, 5, 1)])
def test_a_long_sequence_alone_is_split_for_idle_threads(threads: int, kv_heads: int, tasks: int) -> None:
    """Three heads on two threads take two turns of a whole head, or three of half a head; five keep two busy."""
    batch = decoding([list(range(8 * 24))], own=0)
    plan = plan_of(batch, threads=threads, kv_heads=kv_heads)
    assert len(plan.arrays[3]) == tasks
    assert plan.tiles_read == plan.tiles_used == 24
    check(plan, batch, [list(range(8 * 24))])


def test_unrelated_sequences_share_nothing() -> None:
    plan = plan_of(decoding([list(range(start, start + 16)) for start in (0, 100, 200)], own=1))
    assert plan.tiles_read == plan.tiles_used == 9
    assert len(plan.arrays[3]) == 3


@paths
def test_requests_over_one_prompt_share_it_and_give_the_same_bits(
    kernels: str, new_tiny: Callable[..., Engine]
) -> None:
    """16 requests, with and without sharing: identical tokens and log-probabilities, and fewer tiles read."""
    engine = new_tiny(kernels=kernels, blocks=512, quantization="int8", dtype="bfloat16")
    ops = engine._loop.core.runner.ops
    assert isinstance(ops, NativeOps)
    shared = random_ids(1, 1024)
    prompts = [shared + random_ids(seed, 9 + seed) for seed in range(16)]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "logprobs": 3, "ignore_eos": True}
    results, counters = [], []
    for share in (True, False):
        ops.share_prefixes = share
        engine.reset_prefix_cache()
        engine.generate(shared, max_tokens=1)
        before = ops.tiles_read, ops.tiles_used
        results.append([output.outputs[0] for output in engine.generate(prompts, **options)])
        counters.append((ops.tiles_read - before[0], ops.tiles_used - before[1]))
    with_sharing, without = results
    assert [c.token_ids for c in with_sharing] == [c.token_ids for c in without]
    assert [c.logprobs for c in with_sharing] == [c.logprobs for c in without]
    (read, used), (read_alone, used_alone) = counters
    assert used == used_alone == read_alone
    assert read < used / 2
