"""Drafts a step's attention: which rows share the reading of which KV, and how the work is cut into items.

Segments are collected first, as an array with the fields of :class:`foreword.ops.triton.shared_prefix.Segment`, and
then cut into items that keep the device busy. All of it is arithmetic on arrays: a step takes the device milliseconds.

Exactness: positions are cut into splits, each computed by itself, and a row's splits are folded into its result one by
one. With ``deterministic`` they have a fixed length and begin at fixed positions, all tiles have the same height, and
an item covers either one split or a row's first ones, whose fold it has done as the second pass would. So the bits of
a row depend on nothing but its sequence. Without, splits are as long as keeps the device busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.protocol import AttentionSequence
from foreword.ops.transfer import Ints
from foreword.ops.triton.plan import MERGE_FIELDS, TIGHT, AttentionPlan, Capacity, PlanDraft, PlanSettings
from foreword.ops.triton.shared_prefix import common_positions, prefix_order, tree_segments

if TYPE_CHECKING:
    import torch

SPLIT = 8 * TILE
"""Positions of a split in deterministic plans."""
_LEAST_SPLIT = 2 * TILE
LEAST_SHARED = 2 * TILE
"""Positions. Below these, merging costs more than is gained."""
_LEAST_SAVED = 0.1
"""Of the tiles: what is shared must save as much, as the higher tiles that it needs are a waste to single rows."""


def draft_plan(sequences: Sequence[AttentionSequence], settings: PlanSettings, window: int | None = None) -> PlanDraft:
    """Plan a step's attention for the layers of one ``window``.

    Raises:
        ValueError: runs that are no whole blocks, or fewer positions than ``kv_len``.
    """
    return _Planner(sequences, settings, window).draft()


def make_plan(
    sequences: Sequence[AttentionSequence],
    settings: PlanSettings,
    *,
    window: int | None = None,
    device: torch.device | str = "cpu",
    capacity: Capacity = TIGHT,
) -> AttentionPlan:
    """The same, on the device."""
    return draft_plan(sequences, settings, window).place(device, capacity)


class BlockTables(NamedTuple):
    """For all sequences one behind the other, the first slot of each block of their positions; those of sequence ``i``
    are ``slots[borders[i] : borders[i + 1]]``."""

    slots: Ints
    borders: Ints

    def of(self, number: int) -> Ints:
        return self.slots[self.borders[number] : self.borders[number + 1]]


def block_tables(sequences: Sequence[AttentionSequence], block_size: int) -> BlockTables:
    """Raises:
    ValueError: runs that are no whole blocks, or fewer positions than ``kv_len``.
    """
    flat = chain.from_iterable(chain.from_iterable(sequence.runs for sequence in sequences))
    runs = np.fromiter(flat, dtype=np.int32).reshape(-1, 2)
    borders = _borders([len(sequence.runs) for sequence in sequences])
    slots = _borders(runs[:, 1])[borders]
    lengths = np.array([sequence.kv_len for sequence in sequences], dtype=np.int32)
    ragged = runs[:, 1] % block_size != 0
    ragged[borders[1:] - 1] = False
    short = slots[1:] - slots[:-1] < lengths
    if ragged.any() or short.any():
        wrong = int(np.searchsorted(borders[1:], ragged.argmax(), "right") if ragged.any() else short.argmax())
        held = slots[wrong + 1] - slots[wrong]
        reason = f"that are no whole blocks of {block_size}" if ragged.any() else f"of {held} slots"
        raise ValueError(f"a sequence of {lengths[wrong]} positions has {len(sequences[wrong].runs)} runs {reason}")
    counts = -(-runs[:, 1] // block_size)
    return BlockTables(
        np.repeat(runs[:, 0], counts) + _within(counts) * np.int32(block_size), _borders(counts)[borders]
    )


class _Planner:
    def __init__(self, sequences: Sequence[AttentionSequence], settings: PlanSettings, window: int | None) -> None:
        self.settings = settings
        self.window = window
        self.sequences = sequences
        self.tables = block_tables(sequences, settings.block_size)
        self.split = SPLIT if settings.deterministic else 0
        self.prompts = [number for number, sequence in enumerate(sequences) if sequence.query_len > 1]
        self.tiles_used = 0

    def draft(self) -> PlanDraft:
        """Collect the segments, cut them into items and gather everything."""
        rows, decoding = self._decoding()
        tile_rows = self._tile_rows(decoding)
        rows, prompts = self._with_prompts(rows, tile_rows // self.settings.group_size)
        segments = np.concatenate((_by_rows(decoding, tile_rows // self.settings.group_size), *prompts))
        tiles_read = sum(map(_tiles, (decoding, *prompts)))
        items, part_rows = self._items(segments, len(rows))
        merges, part_list = _merges(rows, part_rows)
        return PlanDraft(
            arrays=(items, rows, self.tables.slots, merges, part_list),
            num_tokens=max((s.query_start + s.query_len for s in self.sequences), default=0),
            tile_rows=tile_rows, split=self.split, block_size=self.settings.block_size,
            tiles_read=tiles_read, tiles_used=self.tiles_used,
        )  # fmt: skip

    # -- segments ----------------------------------------------------------------------------------------------

    def _decoding(self) -> tuple[Ints, Ints]:
        """The rows of the sequences with one row, which come first, and their segments."""
        numbers = [number for number, sequence in enumerate(self.sequences) if sequence.query_len == 1]
        common = [0] * max(0, len(numbers) - 1)
        if self.settings.share and len(np.unique(self.tables.slots[self.tables.borders[numbers]])) < len(numbers):
            numbers, common = self._shared(numbers)
        rows = [(self.sequences[number].query_start, self.sequences[number].kv_len - 1) for number in numbers]
        placed = np.array(rows, dtype=np.int32).reshape(-1, 2)
        alone = self._alone(numbers, placed[:, 1])
        self.tiles_used += _tiles(alone)
        if not any(common):
            return placed, alone
        lengths = (placed[:, 1] + 1).tolist()
        least = max(self.split, LEAST_SHARED)
        together = self._in_window(np.array(tree_segments(numbers, lengths, common, 0, least), np.int32), placed[:, 1])
        saved = 1 - _tiles(together) / _tiles(alone)
        return placed, together if self.split or saved >= _LEAST_SAVED else alone

    def _shared(self, numbers: list[int]) -> tuple[list[int], list[int]]:
        """The sequences in an order that makes those with a common beginning neighbours, and how many positions those
        share: whole units, and not the last, which is everyone's own."""
        tables = [self.tables.of(number) for number in numbers]
        order, unit = prefix_order(tables), self.split or TILE
        numbers, tables = [numbers[i] for i in order], [tables[i] for i in order]
        lengths = [self.sequences[number].kv_len for number in numbers]
        common = []
        for i in range(len(numbers) - 1):
            same = common_positions(tables[i], tables[i + 1], self.settings.block_size)
            common.append(min(same, lengths[i] - 1, lengths[i + 1] - 1) // unit * unit)
        return numbers, common

    def _alone(self, numbers: list[int], positions: Ints) -> Ints:
        """A segment for each of the sequences, whose row is at the position."""
        number = np.arange(len(numbers), dtype=np.int32)
        columns = number, number + 1, self._first_visible(positions), positions + 1, np.array(numbers, dtype=np.int32)
        return np.stack(columns, axis=1)

    def _in_window(self, segments: Ints, positions: Ints) -> Ints:
        """The segments without what none of their rows, at these ``positions``, can see."""
        if self.window is not None:
            lowest = [positions[begin:end].min() for begin, end in segments[:, :2].tolist()]
            segments[:, 2] = np.maximum(segments[:, 2], self._first_visible(np.array(lowest)))
        return segments[segments[:, 2] < segments[:, 3]]

    def _first_visible(self, positions: Ints) -> Ints:
        """Starts of the first tiles that queries at ``positions`` see."""
        return (
            np.zeros_like(positions)
            if self.window is None
            else np.maximum(positions - self.window + 1, 0) // TILE * TILE
        )

    def _tile_rows(self, decoding: Ints) -> int:
        """The tiles' height: the lowest that holds what is stacked; the highest only for prompts by themselves, as many
        as fill the device with it, since to a row by itself it is a waste."""
        *lower, highest = self.settings.heights
        group = self.settings.group_size
        prompts = [self.sequences[number].query_len for number in self.prompts]
        stacked = group * max([1, *prompts, int((decoding[:, 1] - decoding[:, 0]).max(initial=0))])
        full = sum(prompts) * group * self.settings.num_kv_heads >= highest * self.settings.programs
        if not lower or group > lower[-1] or (full and not len(decoding)):
            return highest
        return next((height for height in lower if height >= stacked), lower[-1])

    def _with_prompts(self, rows: Ints, size: int) -> tuple[Ints, list[Ints]]:
        """``rows`` and then those of the prompts, and the prompts' segments of ``size`` rows each, which see the
        positions up to their last row's."""
        all_rows, all_segments, first = [rows], list[Ints](), len(rows)
        for number in self.prompts:
            sequence = self.sequences[number]
            offsets = np.arange(sequence.query_len, dtype=np.int32)
            positions = sequence.kv_len - sequence.query_len + offsets
            all_rows.append(np.stack((sequence.query_start + offsets, positions), axis=1))
            begin = offsets[::size]
            end = np.minimum(begin + size, sequence.query_len)
            seen = self._first_visible(positions[begin]), positions[end - 1] + 1
            columns = first + begin, first + end, *seen, np.full_like(begin, number)
            all_segments.append(np.stack(columns, axis=1))
            self.tiles_used += _tiles(all_segments[-1])
            first += sequence.query_len
        return np.concatenate(all_rows), all_segments

    # -- items -------------------------------------------------------------------------------------------------

    def _items(self, segments: Ints, num_rows: int) -> tuple[Ints, Ints]:
        """``[I, ITEM_FIELDS]``, the longest first, and the row that each of their parts is of."""
        first, last, _, _, sequence = segments.T
        which, begin, end = self._pieces(segments)
        counts = last - first
        visits = np.bincount(first, minlength=num_rows + 1) - np.bincount(last, minlength=num_rows + 1)
        whole = (np.bincount(which, minlength=len(segments)) == 1) & (visits.cumsum()[first] == 1)
        sizes = np.where(whole, 0, counts)[which]  # parts of each item
        parts = np.where(whole[which], -1, _borders(sizes)[:-1])
        zeros = np.zeros_like(which)
        columns = first[which], counts[which], begin, end, self.tables.borders[sequence[which]], parts, zeros, zeros
        items = np.stack(columns, axis=1).astype(np.int32)
        part_rows = np.repeat(first[which], sizes) + _within(sizes)
        return items[np.argsort(begin - end, kind="stable")], part_rows

    def _pieces(self, segments: Ints) -> tuple[Ints, Ints, Ints]:
        """The ranges of positions that are an item each: whose segment's they are, where they begin and end."""
        begin, end = segments[:, 2], segments[:, 3]
        longest = self._longest_item(segments)
        if self.split:
            size = np.full_like(begin, self.split)
            in_one = (end - begin <= longest) & ~_continued(segments)
            size[in_one] = end[in_one].max(initial=1)
            origin = np.where(in_one, begin, begin // self.split * self.split)
        else:
            size = -(-(end - begin) // -(-(end - begin) // longest))
            size = -(-size // TILE) * TILE
            origin = begin
        counts = -(-(end - origin) // size)
        which = np.repeat(np.arange(len(segments), dtype=np.int32), counts)
        start = origin[which] + _within(counts) * size[which]
        return which, np.maximum(start, begin[which]), np.minimum(start + size[which], end[which])

    def _longest_item(self, segments: Ints) -> int:
        """Positions of an item with which the work, dealt out evenly, occupies the device once."""
        work = int((segments[:, 3] - segments[:, 2]).sum()) * self.settings.num_kv_heads
        return max(_LEAST_SPLIT, -(-work // self.settings.programs))


def _by_rows(segments: Ints, size: int) -> Ints:
    """The segments, cut into as many rows as a tile holds."""
    counts = -(-(segments[:, 1] - segments[:, 0]) // size)
    cut = np.repeat(segments, counts, axis=0)
    cut[:, 0] += _within(counts) * size
    cut[:, 1] = np.minimum(cut[:, 0] + size, cut[:, 1])
    return cut


def _continued(segments: Ints) -> NDArray[np.bool_]:
    """Whether a segment's rows have others before it."""
    begun = np.zeros(int(segments[:, 1].max(initial=0)), dtype=bool)
    result = np.zeros(len(segments), dtype=bool)
    for number, (first, last) in enumerate(segments[:, :2].tolist()):
        result[number] = begun[first]
        begun[first:last] = True
    return result


def _tiles(segments: Ints) -> int:
    """That the segments bring in, of one KV head."""
    return int((-(-segments[:, 3] // TILE) - segments[:, 2] // TILE).sum())


def _borders(counts: Sequence[int] | Ints) -> Ints:
    """Where each of some runs of such lengths begins, and where all end."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))


def _within(counts: Ints) -> Ints:
    """0, 1, .. for each of some runs of such lengths."""
    borders = _borders(counts)
    return np.arange(borders[-1], dtype=np.int32) - np.repeat(borders[:-1], counts)


def _merges(rows: Ints, part_rows: Ints) -> tuple[Ints, Ints]:
    """Whose parts are to be merged, and which: part ``p`` is of row ``part_rows[p]``; a row's come in order."""
    merged, counts = np.unique(part_rows, return_counts=True)
    merges = np.zeros((len(merged), MERGE_FIELDS), dtype=np.int32)
    merges[:, 0] = rows[merged, 0]
    merges[:, 1] = counts.cumsum() - counts
    merges[:, 2] = counts
    return merges, part_rows.argsort(kind="stable").astype(np.int32)
