"""Drafts a step's attention: which rows share the reading of which KV, and how the work is cut into items.

Exactness: positions are cut into splits, each computed by itself, and a row's splits are folded into its result one by
one. With ``deterministic`` they have a fixed length and begin at fixed positions, all tiles have the same height, and
an item covers either one split or a row's first ones, whose fold it has done as the second pass would. So the bits of
a row depend on nothing but its sequence. Without, splits are as long as keeps the device busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.protocol import AttentionSequence
from foreword.ops.transfer import Ints
from foreword.ops.triton.plan import ITEM_FIELDS, MERGE_FIELDS, TIGHT, AttentionPlan, Capacity, PlanDraft, PlanSettings
from foreword.ops.triton.shared_prefix import Segment, common_positions, prefix_order, tree_segments

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
    return _Planner(sequences, settings, window).finish()


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

    def finish(self) -> PlanDraft:
        """Cut the segments into items and gather everything."""
        rows = np.concatenate([np.zeros((0, 2), dtype=np.int32), *self.rows])
        items, part_rows = self._items()
        merges, part_list = _merges(rows, part_rows)
        table = np.concatenate([np.zeros(0, dtype=np.int32), *self.tables])
        return PlanDraft(
            (items, rows, table, merges, part_list),
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
