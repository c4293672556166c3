"""A step's attention as arrays for the device: which rows meet which KV, in which programs.

row     a token of the batch that asks; stacked with the query heads of a KV head, they are the rows of a tile
item    some rows against a range of positions, done by one program per KV head
part    what an item leaves of one row if other items have the rest of its positions; they are merged in a second pass

A plan is drafted on the host and laid out in one tensor, which is copied once, so that nothing waits for the device.
Each array is padded to a capacity that may be given, so that a captured graph can be run again with another step's
arrays: an item or a merge of zeros does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from foreword.core.config import ATTENTION_TILE as TILE
from foreword.ops.transfer import Ints, Shape, packed, parts

if TYPE_CHECKING:
    from torch import Tensor

ITEM_FIELDS = 8
"""row_begin, rows, kv_begin, kv_end, first entry of the table, first part or -1: the result is whole; two unused."""
MERGE_FIELDS = 4
"""Row of the batch, first entry of the part list, parts; one unused."""
_LEAST_CAPACITY = 15


class Capacity(NamedTuple):
    """What the arrays of a plan are padded to; 0: to what is there."""

    items: int = 0
    rows: int = 0
    table: int = 0
    merges: int = 0
    parts: int = 0

    def rounded(self, rows: int) -> Capacity:
        """With room to grow, so that few capacities occur: powers of two, and the ``rows`` of a padded batch."""
        items, _, table, _, parts = (1 << max(_LEAST_CAPACITY, size - 1).bit_length() for size in self)
        return Capacity(items, rows, table, rows, parts) if self.parts else Capacity(items, rows, table)


TIGHT = Capacity()


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanFacts:
    """What the host knows of a plan.

    Attributes:
        num_tokens: rows of the batch that belong to sequences.
        tile_rows: height of the tiles.
        split: positions of a split; 0: an item is one.
        tiles_read: tiles of one KV head that are brought in; ``tiles_used``: if each sequence were by itself.
    """

    num_tokens: int
    tile_rows: int
    split: int
    block_size: int
    tiles_read: int
    tiles_used: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionPlan(PlanFacts):
    """See the module. All tensors are int32 on the device, and parts of ``buffer``.

    Attributes:
        items: ``[I, ITEM_FIELDS]``, the longest first.
        rows: ``[R, 2]``: row of the batch, position.
        table: for each sequence, the first slot of each of its blocks.
        merges: ``[M, MERGE_FIELDS]``.
        part_list: parts, of each merge in ascending order of positions.
    """

    buffer: Tensor
    items: Tensor
    rows: Tensor
    table: Tensor
    merges: Tensor
    part_list: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanDraft(PlanFacts):
    """A plan on the host; see :class:`AttentionPlan`.

    Attributes:
        arrays: in the order of :class:`Capacity`.
    """

    arrays: tuple[Ints, Ints, Ints, Ints, Ints]

    @property
    def size(self) -> Capacity:
        return Capacity(*map(len, self.arrays))

    def place(
        self,
        device: torch.device | str,
        capacity: Capacity = TIGHT,
        num_tokens: int | None = None,
    ) -> AttentionPlan:
        """Copy it to the device; nothing waits for that.

        Args:
            num_tokens: instead of the draft's.

        Raises:
            ValueError: it is larger than ``capacity``.
        """
        device, shapes = torch.device(device), self._shapes(capacity)
        buffer = packed(self.arrays, shapes, device).to(device, non_blocking=True)
        items, rows, table, merges, part_list = parts(buffer, shapes)
        return AttentionPlan(
            buffer=buffer, items=items, rows=rows, table=table, merges=merges, part_list=part_list,
            num_tokens=self.num_tokens if num_tokens is None else num_tokens,
            tile_rows=self.tile_rows, split=self.split, block_size=self.block_size,
            tiles_read=self.tiles_read, tiles_used=self.tiles_used,
        )  # fmt: skip

    def replace(self, plan: AttentionPlan) -> None:
        """Put it in the place of a ``plan`` of the same tiles, with its capacities. What is frozen in a captured graph
        stays: addresses, shapes, and ``num_tokens``."""
        arrays = plan.items, plan.rows, plan.table, plan.merges, plan.part_list
        shapes = self._shapes(Capacity(*map(len, arrays)))
        plan.buffer.copy_(packed(self.arrays, shapes, plan.buffer.device), non_blocking=True)

    def _shapes(self, capacity: Capacity) -> list[Shape]:
        """Of the arrays, each padded to its capacity."""
        for name, array, most in zip(Capacity._fields, self.arrays, capacity, strict=True):
            if most and len(array) > most:
                raise ValueError(f"a plan of {len(array)} {name} is beyond the capacity of {most}; raise it")
        return [(most or len(array), *array.shape[1:]) for array, most in zip(self.arrays, capacity, strict=True)]
