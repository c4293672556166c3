"""Which blocks a sequence holds, and where else blocks may be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
            for block in self.blocks:
                if self._runs and block == sum(self._runs[-1]):
                    self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + 1)
                else:
                    self._runs.append((block, 1))
        return self._runs

    def replace(self, first: int, blocks: list[int]) -> None:
        """Set the blocks from index ``first`` on."""
        if self.blocks[first : first + len(blocks)] != blocks:
            self.blocks[first : first + len(blocks)] = blocks
            self._runs = None


class BlockStore(Protocol):
    """Where computed blocks are kept besides the pool."""

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """How many of ``tokens[start:limit]`` are stored in a row from ``start``, a block border, on."""

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> int:
        """Fill ``blocks`` with the stored KV of ``tokens[start:limit]``; how many tokens of it were there."""

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> None:
        """Store the KV of ``tokens``, which ``blocks`` hold."""

    def reset(self) -> None:
        """Forget what does not survive the process."""

    def flush(self) -> None:
        """Wait until what was saved is where it survives; callable from any thread."""

    def close(self) -> None:
        """Flush, and let go of everything."""
