"""Which blocks a sequence holds."""

from __future__ import annotations

from typing import NamedTuple

from foreword.kv.tree import Node


class BlockCopy(NamedTuple):
    """Copy the first ``num_tokens`` slots of block ``source`` to block ``target`` before the next forward pass."""

    source: int
    target: int
    num_tokens: int


class BlockTable:
    """The blocks of one sequence, position by position; made and changed by the cache manager alone."""

    __slots__ = ("namespace", "blocks", "cached_tokens", "node", "committed", "priority", "_runs")

    def __init__(
        self, namespace: bytes, blocks: list[int], cached_tokens: int, node: Node, committed: int, priority: int
    ) -> None:
        self.namespace = namespace
        self.blocks = blocks
        self.cached_tokens = cached_tokens  # tokens whose KV was there at allocation
        self.node = node  # the tree node that holds the last committed block
        self.committed = committed  # tokens whose blocks are in the tree
        self.priority = priority  # of what it leaves in the cache: lower goes first
        self._runs: list[tuple[int, int]] | None = None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The blocks as runs ``(first block, count)`` of neighbours in the pool."""
        if self._runs is None:
            self._runs = []
            self._extend_runs(self._runs, self.blocks)
        return self._runs

    def replace(self, first: int, blocks: list[int]) -> None:
        """Set the blocks from index ``first`` on."""
        if first == len(self.blocks) and self._runs is not None:
            self._extend_runs(self._runs, blocks)
            self.blocks += blocks
        elif self.blocks[first : first + len(blocks)] != blocks:
            self.blocks[first : first + len(blocks)] = blocks
            self._runs = None

    @staticmethod
    def _extend_runs(runs: list[tuple[int, int]], blocks: list[int]) -> None:
        for block in blocks:
            if runs and block == sum(runs[-1]):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
