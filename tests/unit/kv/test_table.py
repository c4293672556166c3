"""Block tables: their runs follow every change."""

from __future__ import annotations

from foreword.kv.table import BlockTable
from foreword.kv.tree import Node


def table(blocks: list[int]) -> BlockTable:
    node = Node.__new__(Node)  # the table only keeps it
    return BlockTable(b"", list(blocks), 0, node, 0, 0)


def test_runs_follow_what_is_added_and_replaced() -> None:
    """Whether they were asked for before or not, they are those of a table made of the same blocks at once."""
    grown = table([4, 5])
    for first, blocks, runs in (
        (2, [6], [(4, 3)]),
        (3, [9, 10], [(4, 3), (9, 2)]),
        (5, [11, 3], [(4, 3), (9, 3), (3, 1)]),
        (7, [], [(4, 3), (9, 3), (3, 1)]),
        (1, [7, 8], [(4, 1), (7, 5), (3, 1)]),
        (1, [7, 8], [(4, 1), (7, 5), (3, 1)]),
        (7, [4], [(4, 1), (7, 5), (3, 2)]),
    ):
        grown.replace(first, blocks)
        assert grown.runs == runs
        assert table(grown.blocks).runs == runs
