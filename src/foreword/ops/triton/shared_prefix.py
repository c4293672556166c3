"""What the decoding sequences of a batch share, as a tree: the planning half of shared-prefix attention.

Sequences that begin with the same slots of the pool form a node of the tree. Its queries, times the query heads of a
KV head, are stacked into one matrix, so that the node's KV is read once for all of them (cascade attention, as in
Hydragen, Juravsky et al. 2024, and FlashInfer, Ye et al. 2025); the partial results are merged with those of the
sequences' own tails. The kernels are those of :mod:`foreword.ops.triton.attention`: a node's rows are rows like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foreword.ops.transfer import Ints


class Segment(NamedTuple):
    """Rows ``[row_begin, row_end)`` of a plan against positions ``[kv_begin, kv_end)``.

    Attributes:
        sequence: one of the sequences, whose table tells where the KV lies.
    """

    row_begin: int
    row_end: int
    kv_begin: int
    kv_end: int
    sequence: int


def common_positions(one: Ints, two: Ints, block_size: int) -> int:
    """Leading positions whose KV lies in the same slots, by the block tables of both, in whole blocks."""
    size = min(len(one), len(two))
    differing = (one[:size] != two[:size]).nonzero()[0]
    return block_size * (int(differing[0]) if len(differing) else size)


def prefix_order(tables: Sequence[Ints]) -> list[int]:
    """The sequences in an order that makes those with a common beginning neighbours."""
    return sorted(range(len(tables)), key=lambda number: tables[number].astype(">i4").tobytes())


def tree_segments(
    order: Sequence[int], lengths: Sequence[int], common: Sequence[int], first_row: int, least: int
) -> list[Segment]:
    """The nodes of the tree, from the root down, and every sequence's own tail.

    Every position of every sequence is in exactly one segment of its row, and a row's segments come in ascending order.

    Args:
        order: sequences, one row each from ``first_row`` on; see :func:`prefix_order`.
        lengths: positions of each, in that order.
        common: ``[len(order) - 1]`` positions that neighbours share.
        least: positions from which on a node is worth reading by itself.
    """
    segments: list[Segment] = []
    pending = [(0, len(order), 0)] if order else []  # neighbours, and up to where they are done with
    while pending:
        low, high, done = pending.pop()
        if high - low == 1:
            segments.append(Segment(first_row + low, first_row + high, done, lengths[low], order[low]))
            continue
        between = common[low : high - 1]
        shared = min(between)
        cuts = [low, *(low + 1 + i for i, positions in enumerate(between) if positions == shared), high]
        if shared - done >= least:
            segments.append(Segment(first_row + low, first_row + high, done, shared, order[low]))
            done = shared
        pending += [(begin, end, done) for begin, end in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return segments
