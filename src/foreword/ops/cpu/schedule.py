"""Which queries meet which KV tiles: the part of the CPU attention that is the same in all layers of a step.

plan      one per step: the sequences, and a schedule per (window, head geometry) met in the layers
schedule  groups of work, each small enough for its float32 copies of the KV to stay in the cache
group     sequences whose KV is gathered together: one that prefills, or several that decode
block     some query rows of a group against a range of its tiles
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.protocol import AttentionSequence

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SCORES = 2**21
"""Elements of a block's scores: 8 MB in float32."""
_MAX_GATHERED = 2**21
"""Elements of a decode group's keys: 8 MB in float32."""
_MAX_QUERY_BLOCK = 128
_MIN_QUERY_BLOCK = 16
_MANY_RUNS = 6
"""Runs per sequence from which on one indexed read beats a copy per run."""


@cache
def row_quantum(head_dim: int) -> int:
    """What query rows are padded to a multiple of, so that the products' rows have the bits of a larger batch.

    Measured: it is a property of the library and the processor (here fewer than 4 rows take another path).
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 48, head_dim, generator=generator)
    key = torch.randn(3, 2 * TILE, head_dim, generator=generator).transpose(1, 2)
    weights = torch.rand(3, 48, TILE, generator=generator)
    value = torch.randn(3, TILE, head_dim, generator=generator)
    scores, values = torch.bmm(rows, key), torch.bmm(weights, value)
    for quantum in (4, 8):
        if all(
            torch.equal(torch.bmm(rows[:, :count], key), scores[:, :count])
            and torch.equal(torch.bmm(weights[:, :count], value), values[:, :count])
            for count in range(quantum, 48, quantum)
        ):
            return quantum
    return 16


class HeadGeometry(NamedTuple):
    """How the heads of a layer are laid out."""

    num_kv_heads: int
    group_size: int
    head_dim: int


class RunCopy(NamedTuple):
    """Slots ``source .. source + length - 1`` are positions ``target ..`` of item ``item``."""

    item: int
    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Query rows of a group that are computed together.

    Attributes:
        rows: ``[I * Q]`` int64, rows of the flat batch, item by item; None when they lie side by side from
            ``start``.
        start: the first row.
        num_queries: Q, queries per item.
        tiles: the range of the group's tiles they may see.
        masks: per part of ``tiles`` (counted from ``tiles[0]``) that is not visible to all, what to add to its scores:
            0 or -inf, ``[I, 1, 1 or M, tiles, TILE]``.
        query: scratch ``[I, num_kv_heads, M, D]`` float32; its padding rows are zero.
    """

    rows: Tensor | None
    start: int
    num_queries: int
    tiles: tuple[int, int]
    masks: tuple[tuple[int, int, Tensor], ...]
    query: Tensor


@dataclass(slots=True, eq=False)
class Group:
    """Sequences whose KV is gathered together.

    Attributes:
        shape: ``(I, num_kv_heads, T * TILE, D)``, of the gathered keys and of the values.
        copies: what to gather, run by run.
        slots: ``[I, T * TILE]`` int64 slots instead of ``copies`` when there are many runs.
        padding: ``[P]`` int64, rows of the flattened ``[I * num_kv_heads * T * TILE, D]`` that belong to no token.
        blocks: the work on them.
        key, value: float32 scratch of ``shape``, shared by all groups of a schedule so that it stays in the cache.
        dirty: gathering overwrites the padding (or another group does), which must be zeroed again.
    """

    shape: tuple[int, int, int, int]
    copies: tuple[RunCopy, ...]
    slots: Tensor | None
    padding: Tensor
    blocks: list[Block]
    key: Tensor = field(init=False)
    value: Tensor = field(init=False)
    dirty: bool = field(init=False)


class _Item(NamedTuple):
    sequence: AttentionSequence
    first_tile: int
    num_tiles: int


class AttentionPlan:
    """The attention of one step; see the module's docstring."""

    def __init__(self, sequences: Sequence[AttentionSequence]) -> None:
        self.sequences = tuple(sequences)
        self.num_tokens = max((s.query_start + s.query_len for s in self.sequences), default=0)
        self._schedules: dict[tuple[HeadGeometry, int | None], list[Group]] = {}

    def schedule(self, heads: HeadGeometry, window: int | None) -> list[Group]:
        """The groups of work for a layer; made when first asked for."""
        key = (heads, window)
        if key not in self._schedules:
            self._schedules[key] = _make_schedule(self.sequences, heads, window)
        return self._schedules[key]


def _make_schedule(sequences: Sequence[AttentionSequence], heads: HeadGeometry, window: int | None) -> list[Group]:
    decodes, groups = [], []
    for sequence in sequences:
        first = 0 if window is None else max(0, sequence.kv_len - sequence.query_len - window + 1) // TILE
        item = _Item(sequence, first, -(-sequence.kv_len // TILE) - first)
        if sequence.query_len == 1:
            decodes.append(item)
        else:
            groups.append(_prefill_group(item, heads, window))
    groups.extend(_decode_group(items, heads, window) for items in _similar_lengths(decodes, heads))
    _share_scratch(groups)
    return groups


def _share_scratch(groups: list[Group]) -> None:
    size = max((math.prod(group.shape) for group in groups), default=0)
    key, value = torch.zeros(size), torch.zeros(size)
    for group in groups:
        count = math.prod(group.shape)
        group.key, group.value = key[:count].view(group.shape), value[:count].view(group.shape)
        group.dirty = len(groups) > 1 or group.slots is not None


def _similar_lengths(items: list[_Item], heads: HeadGeometry) -> list[list[_Item]]:
    """``items`` by length, cut where padding all to the longest would waste a quarter or outgrow the cache."""
    tile_elements = heads.num_kv_heads * heads.head_dim * TILE
    parts: list[list[_Item]] = []
    for item in sorted(items, key=lambda item: -item.num_tiles):
        if parts:
            longest = parts[-1][0].num_tiles
            size = longest * (len(parts[-1]) + 1)
            if 4 * (longest - item.num_tiles) <= longest + 3 and size * tile_elements <= _MAX_GATHERED:
                parts[-1].append(item)
                continue
        parts.append([item])
    return parts


def _decode_group(items: list[_Item], heads: HeadGeometry, window: int | None) -> Group:
    group = _gathering(items, heads)
    rows = [item.sequence.query_start for item in items]
    num_tiles = items[0].num_tiles
    firsts = torch.tensor([[item.first_tile] for item in items])  # [I, 1]
    queries = torch.tensor([[item.sequence.kv_len - 1] for item in items])  # [I, 1]
    masks = _masks(firsts, queries, num_tiles, window)
    contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
    block = Block(
        rows=None if contiguous else torch.tensor(rows),
        start=rows[0],
        num_queries=1,
        tiles=(0, num_tiles),
        masks=masks,
        query=_query_scratch(len(items), 1, heads),
    )
    group.blocks.append(block)
    return group


def _prefill_group(item: _Item, heads: HeadGeometry, window: int | None) -> Group:
    group = _gathering([item], heads)
    sequence = item.sequence
    size = _MAX_SCORES // (heads.num_kv_heads * heads.group_size * item.num_tiles * TILE)
    size = min(_MAX_QUERY_BLOCK, max(_MIN_QUERY_BLOCK, size // _MIN_QUERY_BLOCK * _MIN_QUERY_BLOCK))
    begin = sequence.kv_len - sequence.query_len  # position of the first query
    position = begin
    while position < sequence.kv_len:
        end = min((position // size + 1) * size, sequence.kv_len)
        count = end - position
        low = 0 if window is None else max(0, position - window + 1) // TILE
        tiles = (low - item.first_tile, -(-end // TILE) - item.first_tile)
        query = _query_scratch(1, count, heads)
        positions = torch.arange(position, end).repeat_interleave(heads.group_size)  # [Q * G]
        padded = torch.full((1, query.shape[2]), end - 1)  # [1, M]: padding rows see what the last query sees
        padded[0, : len(positions)] = positions
        masks = _masks(torch.tensor([[low]]), padded, tiles[1] - tiles[0], window)
        start = sequence.query_start + position - begin
        group.blocks.append(Block(None, start, count, tiles, masks, query))
        position = end
    return group


def _query_scratch(num_items: int, num_queries: int, heads: HeadGeometry) -> Tensor:
    quantum = row_quantum(heads.head_dim)
    rows = -(-num_queries * heads.group_size // quantum) * quantum
    return torch.zeros(num_items, heads.num_kv_heads, rows, heads.head_dim)


def _masks(firsts: Tensor, queries: Tensor, num_tiles: int, window: int | None) -> tuple[tuple[int, int, Tensor], ...]:
    """Additive masks of the tiles not wholly visible: at the end (causal), and at the start (window)."""
    positions = firsts[..., None] * TILE + torch.arange(num_tiles * TILE)  # [I, 1, T * TILE]
    visible = positions <= queries[..., None]  # [I, M, T * TILE]
    if window is not None:
        visible &= positions > queries[..., None] - window
    visible = visible.unflatten(2, (num_tiles, TILE))  # [I, M, T, TILE]
    partial = [tile for tile, whole in enumerate(visible.all(3).all(1).all(0).tolist()) if not whole]
    masks = []
    while partial:
        end = next((i for i in range(1, len(partial)) if partial[i] != partial[i - 1] + 1), len(partial))
        low, high = partial[0], partial[end - 1] + 1
        hidden = ~visible[:, None, :, low:high]  # [I, 1, M, tiles, TILE]
        masks.append((low, high, torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))))
        partial = partial[end:]
    return tuple(masks)


def _gathering(items: list[_Item], heads: HeadGeometry) -> Group:
    """A group without blocks: where the KV of ``items`` comes from, and scratch for it."""
    length = items[0].num_tiles * TILE
    copies = tuple(copy for number, item in enumerate(items) for copy in _run_copies(number, item))
    used = torch.tensor([item.sequence.kv_len - item.first_tile * TILE for item in items])
    empty = torch.arange(length) >= used[:, None]  # [I, T * TILE]
    padding = empty[:, None].expand(-1, heads.num_kv_heads, -1).flatten().nonzero().view(-1)
    slots = None
    if len(copies) > _MANY_RUNS * len(items):
        slots = torch.zeros(len(items), length, dtype=torch.int64)
        for item, source, target, count in copies:
            slots[item, target : target + count] = torch.arange(source, source + count)
    shape = (len(items), heads.num_kv_heads, length, heads.head_dim)
    return Group(shape, copies, slots, padding, [])


def _run_copies(number: int, item: _Item) -> list[RunCopy]:
    copies, position, begin = [], 0, item.first_tile * TILE
    for start, length in item.sequence.runs:
        low, high = max(position, begin), min(position + length, item.sequence.kv_len)
        if low < high:
            copies.append(RunCopy(number, start + low - position, low - begin, high - low))
        position += length
    return copies
