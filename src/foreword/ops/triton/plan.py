"""A step's attention as arrays for the device: which rows meet which KV, in which programs.

row     a token of the batch that asks; stacked with the query heads of a KV head, they are the rows of a tile
item    some rows against a range of positions, done by one program per KV head
part    what an item leaves of one row if other items have the rest of its positions; they are merged in a second pass

All arrays lie in one tensor, made on the host and copied once, so that nothing waits for the device. Each is padded to
a capacity that may be given, so that a captured graph can be run again with another step's arrays: an item or a merge
of zeros does nothing.

Exactness: positions are cut into splits, each computed by itself, and a row's splits are folded into its result one by
one. With ``deterministic`` they have a fixed length and begin at fixed positions, all tiles have the same height, and
an item covers either one split or a row's first ones, whose fold it has done as the second pass would. So the bits of
a row depend on nothing but its sequence. Without, splits are as long as keeps the device busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.protocol import AttentionSequence
from foreword.ops.triton.shared_prefix import Ints, Segment, common_positions, prefix_order, tree_segments

if TYPE_CHECKING:
    from torch import Tensor

SPLIT = 8 * TILE
"""Positions of a split in deterministic plans."""
_LEAST_SPLIT = 2 * TILE
LEAST_SHARED = 2 * TILE
"""Positions. Below these, merging costs more than is gained."""
_LEAST_SAVED = 0.1
"""Of the tiles: what is shared must save as much, as the higher tiles that it needs are a waste to single rows."""
ITEM_FIELDS = 8
"""row_begin, rows, kv_begin, kv_end, first entry of the table, first part or -1: the result is whole; two unused."""
MERGE_FIELDS = 4
"""Row of the batch, first entry of the part list, parts; one unused."""
_ALIGNMENT = 4
"""int32 elements of the 16 bytes to which every array is aligned."""


class Capacity(NamedTuple):
    """What the arrays of a plan are padded to; 0: to what is there."""

    items: int = 0
    rows: int = 0
    table: int = 0
    merges: int = 0
    parts: int = 0


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What plans are made for; the same for all steps.

    Attributes:
        num_kv_heads, group_size: KV heads, and query heads of each.
        block_size: slots that lie side by side for certain; every run but a sequence's last is a multiple.
        programs: that the device runs at the same time.
        heights: of tiles that may be chosen, ascending; see :func:`foreword.ops.triton.attention.tile_heights`.
        deterministic: see the module.
        share: read KV that sequences share once.
    """

    num_kv_heads: int
    group_size: int
    block_size: int
    programs: int
    heights: tuple[int, ...]
    deterministic: bool = False
    share: bool = True

    def __post_init__(self) -> None:
        if TILE % self.block_size:
            raise ValueError(f"block_size {self.block_size}: give a divisor of {TILE}, the attention tile")
        if not 1 <= self.group_size <= self.heights[-1]:
            raise ValueError(f"group_size {self.group_size}: give 1 to {self.heights[-1]}, the height of a tile")
        if self.deterministic and len(self.heights) > 1:
            raise ValueError(f"heights {self.heights}: deterministic plans have one")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """See the module. All tensors are int32 on the device, and parts of ``buffer``.

    Attributes:
        items: ``[I, ITEM_FIELDS]``, the longest first.
        rows: ``[R, 2]``: row of the batch, position.
        table: for each sequence, the first slot of each of its blocks.
        merges: ``[M, MERGE_FIELDS]``.
        part_list: parts, of each merge in ascending order of positions.
        num_parts: of all items.
        num_tokens: rows of the batch that belong to sequences.
        tile_rows: height of the tiles.
        split: positions of a split; 0: an item is one.
        tiles_read: tiles of one KV head that are brought in; ``tiles_used``: if each sequence were by itself.
    """

    buffer: Tensor
    items: Tensor
    rows: Tensor
    table: Tensor
    merges: Tensor
    part_list: Tensor
    num_parts: int
    num_tokens: int
    tile_rows: int
    split: int
    block_size: int
    tiles_read: int
    tiles_used: int


def make_plan(
    sequences: Sequence[AttentionSequence],
    settings: PlanSettings,
    *,
    window: int | None = None,
    device: torch.device | str = "cpu",
    capacity: Capacity = Capacity(),  # noqa: B008
) -> AttentionPlan:
    """Plan a step's attention for the layers of one ``window``.

    Raises:
        ValueError: runs that are no whole blocks, or fewer positions than ``kv_len``; more than ``capacity``.
    """
    planner = _Planner(sequences, settings, window)
    return planner.finish(device, capacity)


def block_tables(sequences: Sequence[AttentionSequence], block_size: int) -> list[Ints]:
    """For each sequence, the first slot of each block of its positions."""
    flat = chain.from_iterable(chain.from_iterable(sequence.runs for sequence in sequences))
    runs = np.fromiter(flat, dtype=np.int32).reshape(-1, 2)
    ends = np.cumsum([len(sequence.runs) for sequence in sequences])
    ragged = runs[:, 1] % block_size != 0
    ragged[ends - 1] = False
    slots = np.concatenate(([0], runs[:, 1].cumsum()))[np.concatenate(([0], ends))]
    lengths = np.array([sequence.kv_len for sequence in sequences])
    short = np.diff(slots) < lengths
    if ragged.any() or short.any():
        wrong = int(np.searchsorted(ends, ragged.argmax(), "right") if ragged.any() else short.argmax())
        reason = f"that are no whole blocks of {block_size}" if ragged.any() else f"of {np.diff(slots)[wrong]} slots"
        raise ValueError(f"a sequence of {lengths[wrong]} positions has {len(sequences[wrong].runs)} runs {reason}")
    counts = -(-runs[:, 1] // block_size)
    blocks = np.concatenate(([0], counts.cumsum(dtype=np.int32)))
    within = np.arange(blocks[-1], dtype=np.int32) - np.repeat(blocks[:-1], counts)
    table = np.repeat(runs[:, 0], counts) + within * np.int32(block_size)
    return np.split(table, blocks[ends[:-1]])


class _Planner:
    """Segments are collected first, then cut into items that keep the device busy."""

    def __init__(self, sequences: Sequence[AttentionSequence], settings: PlanSettings, window: int | None) -> None:
        self.settings = settings
        self.window = window
        self.sequences = sequences
        self.tables = block_tables(sequences, settings.block_size) if sequences else []
        self.split = SPLIT if settings.deterministic else 0
        self.rows: list[Ints] = []
        self.num_rows = 0
        self.tiles_used = 0
        decoding = self._decoding_segments()
        self.tiles_read = sum(_tiles(segment) for segment in decoding)
        self.tile_rows = self._tile_rows(decoding)
        self.segments = [piece for segment in decoding for piece in self._by_rows(segment)]
        for number, sequence in enumerate(sequences):
            if sequence.query_len > 1:
                self._add_prompt(number, sequence)

    def _decoding_segments(self) -> list[Segment]:
        """Of the sequences with one row; these rows come first."""
        numbers = [number for number, sequence in enumerate(self.sequences) if sequence.query_len == 1]
        if self.settings.share:
            numbers = [numbers[i] for i in prefix_order([self.tables[number] for number in numbers])]
        chosen = [self.sequences[number] for number in numbers]
        lengths = [sequence.kv_len for sequence in chosen]
        rows = np.array([(s.query_start, s.kv_len - 1) for s in chosen], dtype=np.int32).reshape(-1, 2)
        self._add_rows(rows)
        self.tiles_used += sum(-(-n // TILE) - self._first_visible(n - 1) // TILE for n in lengths)
        unit = self.split or TILE
        common = [0] * max(0, len(numbers) - 1)
        alone = self._visible_tree(numbers, lengths, common, rows)
        if not self.settings.share:
            return alone
        for i in range(len(common)):
            same = common_positions(self.tables[numbers[i]], self.tables[numbers[i + 1]], self.settings.block_size)
            common[i] = min(same, lengths[i] - 1, lengths[i + 1] - 1) // unit * unit  # the last is everyone's own
        together = self._visible_tree(numbers, lengths, common, rows)
        saved = 1 - sum(map(_tiles, together)) / max(1, sum(map(_tiles, alone)))
        return together if self.split or saved >= _LEAST_SAVED else alone

    def _visible_tree(self, numbers: list[int], lengths: list[int], common: list[int], rows: Ints) -> list[Segment]:
        """The segments of the tree that ``common`` describes, without what the window hides."""
        segments = tree_segments(numbers, lengths, common, 0, max(self.split, LEAST_SHARED))
        seen = (self._in_window(segment, rows) for segment in segments)
        return [segment for segment in seen if segment.kv_begin < segment.kv_end]

    def _in_window(self, segment: Segment, rows: Ints) -> Segment:
        """``segment`` without what none of its rows can see."""
        first = self._first_visible(int(rows[segment.row_begin : segment.row_end, 1].min()))
        return segment._replace(kv_begin=max(segment.kv_begin, first))

    def _first_visible(self, position: int) -> int:
        """Start of the first tile that a query at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // TILE * TILE

    def _add_rows(self, rows: Ints) -> None:
        self.rows.append(rows)
        self.num_rows += len(rows)

    def _tile_rows(self, decoding: Sequence[Segment]) -> int:
        """The tiles' height: the lowest that holds what is stacked; the highest only for prompts by themselves, as many
        as fill the device with it, since to a row by itself it is a waste."""
        *lower, highest = self.settings.heights
        group = self.settings.group_size
        prompts = [sequence.query_len for sequence in self.sequences if sequence.query_len > 1]
        stacked = group * max([1, *prompts, *(segment.row_end - segment.row_begin for segment in decoding)])
        full = sum(prompts) * group * self.settings.num_kv_heads >= highest * self.settings.programs
        if not lower or group > lower[-1] or (full and not decoding):
            return highest
        return next((height for height in lower if height >= stacked), lower[-1])

    def _by_rows(self, segment: Segment) -> list[Segment]:
        """``segment``, cut into as many rows as a tile holds."""
        size = self.tile_rows // self.settings.group_size
        return [
            segment._replace(row_begin=begin, row_end=min(begin + size, segment.row_end))
            for begin in range(segment.row_begin, segment.row_end, size)
        ]

    def _add_prompt(self, number: int, sequence: AttentionSequence) -> None:
        """The rows of a prompt, tile by tile; each tile sees the positions up to its last row's."""
        first, shift = self.num_rows, sequence.kv_len - sequence.query_len - self.num_rows
        offsets = np.arange(sequence.query_len, dtype=np.int32)
        self._add_rows(np.stack((sequence.query_start + offsets, first + shift + offsets), axis=1))
        for piece in self._by_rows(Segment(first, self.num_rows, 0, sequence.kv_len, number)):
            low, high = self._first_visible(piece.row_begin + shift), piece.row_end + shift
            self.segments.append(piece._replace(kv_begin=low, kv_end=high))
            self.tiles_used += _tiles(self.segments[-1])
            self.tiles_read += _tiles(self.segments[-1])

    def finish(self, device: torch.device | str, capacity: Capacity) -> AttentionPlan:
        """Cut the segments into items and gather everything."""
        rows = np.concatenate(self.rows)
        items, part_rows = self._items()
        merges, part_list = _merges(rows, part_rows)
        table = np.concatenate([np.zeros(0, dtype=np.int32), *self.tables])
        buffer, views = _upload([items, rows, table, merges, part_list], capacity, torch.device(device))
        return AttentionPlan(
            buffer, views[0], views[1], views[2], views[3], views[4],
            num_parts=max(len(part_rows), capacity.parts),
            num_tokens=max((s.query_start + s.query_len for s in self.sequences), default=0),
            tile_rows=self.tile_rows, split=self.split, block_size=self.settings.block_size,
            tiles_read=self.tiles_read, tiles_used=self.tiles_used,
        )  # fmt: skip

    def _items(self) -> tuple[Ints, Ints]:
        """``[I, ITEM_FIELDS]``, the longest first, and the row that each of their parts is of."""
        firsts = np.cumsum([0, *(len(table) for table in self.tables)]).tolist()
        visits = np.zeros(self.num_rows, dtype=np.int32)  # segments of each row
        for segment in self.segments:
            visits[segment.row_begin : segment.row_end] += 1
        begun = np.zeros(self.num_rows, dtype=bool)
        items: list[tuple[int, ...]] = []
        part_rows: list[int] = []
        longest = self._longest_item()
        for segment in self.segments:
            own = range(segment.row_begin, segment.row_end)
            pieces = self._pieces(segment, longest, bool(begun[own[0]]))
            begun[own[0] : own[-1] + 1] = True
            whole = len(pieces) == 1 and visits[own[0]] == 1
            for begin, end in pieces:
                part = -1 if whole else len(part_rows)
                items.append((own[0], len(own), begin, end, firsts[segment.sequence], part, 0, 0))
                if not whole:
                    part_rows += own
        items.sort(key=lambda item: item[2] - item[3])
        return np.array(items, dtype=np.int32).reshape(-1, ITEM_FIELDS), np.array(part_rows, dtype=np.int32)

    def _longest_item(self) -> int:
        """Positions of an item with which the work, dealt out evenly, occupies the device once."""
        work = sum(segment.kv_end - segment.kv_begin for segment in self.segments) * self.settings.num_kv_heads
        return max(_LEAST_SPLIT, -(-work // self.settings.programs))

    def _pieces(self, segment: Segment, longest: int, continued: bool) -> list[tuple[int, int]]:
        """The ranges of positions that are an item each.

        Args:
            continued: the segment's rows have others before it.
        """
        begin, end = segment.kv_begin, segment.kv_end
        if self.split:
            if not continued and end - begin <= longest:
                return [(begin, end)]
            cuts = [begin, *range((begin // self.split + 1) * self.split, end, self.split), end]
        else:
            size = -(-(end - begin) // -(-(end - begin) // longest))
            cuts = [*range(begin, end, -(-size // TILE) * TILE), end]
        return list(pairwise(cuts))


def _tiles(segment: Segment) -> int:
    return -(-segment.kv_end // TILE) - segment.kv_begin // TILE


def _merges(rows: Ints, part_rows: Ints) -> tuple[Ints, Ints]:
    """Whose parts are to be merged, and which: part ``p`` is of row ``part_rows[p]``; a row's come in order."""
    merged, counts = np.unique(part_rows, return_counts=True)
    merges = np.zeros((len(merged), MERGE_FIELDS), dtype=np.int32)
    merges[:, 0] = rows[merged, 0]
    merges[:, 1] = counts.cumsum() - counts
    merges[:, 2] = counts
    return merges, part_rows.argsort(kind="stable").astype(np.int32)


def _upload(arrays: Sequence[Ints], capacity: Capacity, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """All arrays, each padded with zeros to its capacity, in one tensor on the device, and the views of it."""
    sizes = []
    for name, array, least in zip(Capacity._fields, arrays, capacity, strict=True):
        if least and len(array) > least:
            raise ValueError(f"a plan of {len(array)} {name} is beyond the capacity of {least}; raise it")
        sizes.append((max(len(array), least), *array.shape[1:]))
    starts = [0]
    for shape in sizes:
        starts.append(starts[-1] + -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT)
    host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        host.numpy()[start : start + array.size] = array.reshape(-1)
    buffer = host.to(device, non_blocking=True)
    return buffer, [
        buffer[start : start + math.prod(shape)].view(shape) for start, shape in zip(starts, sizes, strict=False)
    ]
