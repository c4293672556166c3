"""Which cached blocks go first. A policy maps statistics of a node to a priority, purely; the lowest goes first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar


class NodeStats(NamedTuple):
    """What a policy sees of a tree node.

    Attributes:
        last_access: the cache's clock when the node was last inserted into or reused. The clock counts
            blocks inserted and allocations.
        hits: how often a request reused it.
        capacity: blocks of the whole pool.
    """

    last_access: int
    hits: int
    capacity: int


EvictionPolicy = Callable[[NodeStats], float]


def lru(stats: NodeStats) -> float:
    """Least recently used."""
    return stats.last_access


def segmented_lru(stats: NodeStats) -> float:
    """Segmented LRU (Karedla, Love and Wherry, 1994): entries reused at least once outlive those never reused.

    The protected segment is bounded by time: a reused node counts as if it had been touched four pool sizes
    of traffic later than it was, so that a burst of new prompts passes it by but an abandoned one leaves in the end.
    """
    return stats.last_access + (4 * stats.capacity if stats.hits else 0)


T = TypeVar("T")


class EvictionQueue(Generic[T]):
    """A priority queue whose entries can be moved: pushing an item again makes its older entry stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._current: dict[T, int] = {}
        self._ticket = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def push(self, item: T, priority: float) -> None:
        ticket = next(self._ticket)
        self._current[item] = ticket
        heapq.heappush(self._heap, (priority, ticket, item))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self._current.pop(item, None)

    def pop(self) -> T | None:
        """The item of lowest priority, the earlier pushed of equals; None when empty."""
        while self._heap:
            _, ticket, item = heapq.heappop(self._heap)
            if self._current.get(item) == ticket:
                del self._current[item]
                return item
        return None
