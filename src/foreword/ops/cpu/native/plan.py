"""Which rows meet which KV tiles in a step: the shared-prefix plan of the native attention.

task      rows whose queries are stacked: a block of a prompt's tokens, or decoding sequences with a common beginning
segment   some of a task's rows against a range of tiles; tiles that several rows share are one segment, read once
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.cpu.native.library import SLOTS, Attention
from foreword.ops.protocol import AttentionSequence, SlotRun

Ints = NDArray[np.int32]

QUERY_BLOCK = 16
"""Tokens of a prompt that are computed together."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of attention on this machine, in any unit, fitted by a measurement.

    Attributes:
        tile: to bring one tile of KV in, whoever uses it.
        row: to compute one row (token) with a tile that is there.
    """

    tile: float
    row: float

    def of(self, rows: int, tiles: int) -> float:
        return tiles * (self.tile + rows * self.row)


class Segment(NamedTuple):
    """Rows ``[row_begin, row_end)`` of the plan against tiles ``[tile_begin, tile_end)``; C's fw_segment."""

    row_begin: int
    row_end: int
    tile_begin: int
    tile_end: int
    first_block: int


class Task(NamedTuple):
    """C's fw_task, and what it will take."""

    row_begin: int
    row_end: int
    segment_begin: int
    segment_end: int
    first_part: int
    cost: float


class Split(NamedTuple):
    """C's fw_split: a row whose tiles are computed by several tasks and merged afterwards, in order."""

    row: int
    first_part: int
    num_parts: int


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """The plan as the kernels read it, and what it saves.

    Attributes:
        struct: points into ``arrays``, which it keeps alive.
        tiles_read: tiles of one KV head that are brought in.
        tiles_used: tiles of one KV head that rows meet: what would be brought in if each sequence were by itself.
    """

    struct: Attention
    arrays: tuple[Ints, ...]
    tiles_read: int
    tiles_used: int


class _Decoding(NamedTuple):
    """A sequence with one query; sorted by where their KV lies, those with a common beginning are neighbours."""

    runs: tuple[SlotRun, ...]
    row: int
    tiles: int
    first_block: int


def make_plan(
    sequences: Sequence[AttentionSequence],
    positions: Ints,
    *,
    num_kv_heads: int,
    num_threads: int,
    costs: Costs,
    share: bool = True,
) -> NativePlan:
    """Plan the attention of a step.

    Args:
        positions: ``[T]`` of each row of the flat batch.
        share: off, every sequence reads its KV for itself; the results have the same bits.
    """  # fmt: skip
    planner = _Planner(costs)
    decoding: list[_Decoding] = []
    offset = 0
    tables = [_block_table(sequence) for sequence in sequences]
    for sequence, blocks in zip(sequences, tables, strict=True):
        if sequence.query_len == 1:
            tiles = -(-sequence.kv_len // TILE)
            decoding.append(_Decoding(sequence.runs, sequence.query_start, tiles, offset))
        else:
            planner.add_prompt(sequence, offset)
        offset += len(blocks)
    if decoding:
        planner.add_decoding(decoding, num_kv_heads, num_threads, share)
    ahead = np.zeros(2, dtype=np.int32)  # the kernels look two blocks ahead
    return planner.finish(positions, np.concatenate([*tables, ahead]))


def _block_table(sequence: AttentionSequence) -> Ints:
    """The groups of slots of positions 0, 16, 32, .."""
    parts = [
        np.arange(start // SLOTS, (start + length + SLOTS - 1) // SLOTS, dtype=np.int32)
        for start, length in sequence.runs
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Planner:
    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.rows: list[int] = []
        self.segments: list[Segment] = []
        self.tasks: list[Task] = []
        self.splits: list[Split] = []
        self.parts = 0
        self.used = 0

    def add_prompt(self, sequence: AttentionSequence, first_block: int) -> None:
        begin = sequence.kv_len - sequence.query_len  # position of the first query
        for done in range(0, sequence.query_len, QUERY_BLOCK):
            count = min(QUERY_BLOCK, sequence.query_len - done)
            start, tiles = len(self.rows), -(-(begin + done + count) // TILE)
            self.rows += range(sequence.query_start + done, sequence.query_start + done + count)
            segment = Segment(start, start + count, 0, tiles, first_block)
            self._add_task([segment])
            self.used += tiles

    def add_decoding(self, items: list[_Decoding], num_kv_heads: int, num_threads: int, share: bool) -> None:
        items = sorted(items)
        common = [_common_tiles(a.runs, b.runs) if share else 0 for a, b in pairwise(items)]
        groups = _split(items, common, num_kv_heads, num_threads, self.costs)
        pieces = _pieces_of_one(groups, items, num_kv_heads, num_threads)
        for begin, end in groups:
            group, start = items[begin:end], len(self.rows)
            self.rows += [item.row for item in group]
            self.used += sum(item.tiles for item in group)
            if pieces > 1 and len(group) == 1 and group[0].tiles > 1:
                self._add_split(group[0], start, pieces)
            else:
                self._add_task(_segments(group, common[begin : end - 1], start, 0))

    def _add_split(self, item: _Decoding, row: int, pieces: int) -> None:
        """One row in several tasks, each of some of its tiles."""
        self.splits.append(Split(row, self.parts, item.tiles))
        for begin, end in _pieces(0, item.tiles, pieces):
            self._add_task([Segment(row, row + 1, begin, end, item.first_block)], self.parts + begin)
        self.parts += item.tiles

    def _add_task(self, segments: list[Segment], first_part: int = -1) -> None:
        first = len(self.segments)
        self.segments += segments
        cost = sum(self.costs.of(s.row_end - s.row_begin, s.tile_end - s.tile_begin) for s in segments)
        begin, end = min(s.row_begin for s in segments), max(s.row_end for s in segments)
        self.tasks.append(Task(begin, end, first, len(self.segments), first_part, cost))

    def finish(self, positions: Ints, blocks: Ints) -> NativePlan:
        """Long tasks first: what is dealt out last should be short."""
        tasks = sorted(self.tasks, key=lambda task: -task.cost)
        arrays = (
            np.array(self.rows, dtype=np.int32),
            positions,
            np.array(self.segments, dtype=np.int32),
            np.array([task[:5] for task in tasks], dtype=np.int32),
            np.array(self.splits, dtype=np.int32),
            blocks,
        )
        sizes = len(tasks), len(self.splits), self.parts, len(positions)
        struct = Attention(*sizes, *(array.ctypes.data for array in arrays))
        read = sum(segment.tile_end - segment.tile_begin for segment in self.segments)
        return NativePlan(struct, arrays, read, self.used)


def _common_tiles(one: Sequence[SlotRun], two: Sequence[SlotRun]) -> int:
    """Leading tiles that both have in the same place."""
    common = 0
    for (start, length), (other_start, other_length) in zip(one, two, strict=False):
        if start != other_start:
            break
        common += min(length, other_length)
        if length != other_length:
            break
    return common // TILE


def _split(
    items: list[_Decoding], common: list[int], num_kv_heads: int, num_threads: int, costs: Costs
) -> list[tuple[int, int]]:
    """Sequences that share tiles, as tasks: in as few as possible, yet so that all threads end at the same time.

    A task is done once per KV head, and the pieces are dealt out to the threads. Cutting a group means that each part
    reads the shared tiles again; not cutting it may leave threads idle. The costs decide.
    """
    cuts = [0, *(i + 1 for i, tiles in enumerate(common) if not tiles), len(items)]
    groups = list(pairwise(cuts))
    best, best_time = groups, float("inf")
    for parts in range(1, min(num_threads, max(end - begin for begin, end in groups)) + 1):
        candidate = [piece for group in groups for piece in _pieces(*group, parts)]
        times = [_cost(items[begin:end], common[begin : end - 1], costs) for begin, end in candidate]
        time = _makespan([t for t in times for _ in range(num_kv_heads)], num_threads)
        if time < 0.97 * best_time:
            best, best_time = candidate, time
    return best


def _pieces_of_one(groups: list[tuple[int, int]], items: list[_Decoding], num_kv_heads: int, num_threads: int) -> int:
    """Into how many tasks the tiles of a sequence by itself are cut: as many as make the threads end together, where
    there are too few sequences and KV heads for that. Their tiles are merged in order, so no bit depends on it."""
    if len(groups) * num_kv_heads > 2 * num_threads:
        return 1
    tiles = [items[begin].tiles for begin, end in groups if end - begin == 1 for _ in range(num_kv_heads)]
    if not tiles:
        return 1
    best, best_time = 1, _makespan(tiles, num_threads)
    for pieces in range(2, min(num_threads, max(tiles)) + 1):
        time = _makespan([end - begin for t in tiles for begin, end in _pieces(0, t, pieces)], num_threads)
        if time < 0.9 * best_time:
            best, best_time = pieces, time
    return best


def _pieces(begin: int, end: int, parts: int) -> list[tuple[int, int]]:
    size = -(-(end - begin) // parts)
    return [(start, min(start + size, end)) for start in range(begin, end, size)]


def _cost(group: list[_Decoding], common: list[int], costs: Costs) -> float:
    """Of a task: every tile is computed for each row, but brought in once for neighbours that share it."""
    tiles = sum(item.tiles for item in group)
    return costs.tile * (tiles - sum(common)) + costs.row * tiles


def _makespan(times: Sequence[float], num_threads: int) -> float:
    """When the last thread ends if each takes the longest piece that is left."""
    ends = [0.0] * num_threads
    for time in sorted(times, reverse=True):
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def _segments(group: list[_Decoding], common: list[int], start: int, done: int) -> list[Segment]:
    """Segments of ``group``, whose first row is ``start``, from tile ``done`` on: what all share, then part by part.

    ``common[i]`` tells the tiles that items ``i`` and ``i + 1`` share; as they are sorted, the tree of what is shared
    follows from these alone.
    """
    if len(group) == 1:
        item = group[0]
        return [Segment(start, start + 1, done, item.tiles, item.first_block)] if done < item.tiles else []
    shared = min(common)
    segments = []
    if shared > done:
        segments.append(Segment(start, start + len(group), done, shared, group[0].first_block))
    first = 0
    for cut in [*(i + 1 for i, tiles in enumerate(common) if tiles == shared), len(group)]:
        segments += _segments(group[first:cut], common[first : cut - 1], start + first, max(done, shared))
        first = cut
    return segments
