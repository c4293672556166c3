"""Which cached blocks go first. A policy maps statistics of a node to a value, purely; the lowest goes first.

A node is a run of blocks in the prefix tree. Only leaves can go, and of a leaf the last block first.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from foreword.core.validation import reject

logger = logging.getLogger("foreword")


class NodeStats(NamedTuple):
    """What a policy sees of a tree node.

    Attributes:
        last_access: the cache's clock when the node was last inserted into or reused. The clock counts
            blocks inserted and allocations.
        hits: how often a request reused it.
        capacity: blocks of the whole pool.
        branches: how often a sequence went on behind it in another way than those before: a system prompt has many, the
            history of a conversation has none.
        depth: blocks of the sequence up to the node's end: how many lie before the block that would go first, and it.
        age: the highest value that the policy had given to anything evicted before ``last_access``. A policy that adds
            to it forgets: what was often used long ago is overtaken by what is used now.
    """

    last_access: int
    hits: int
    capacity: int
    branches: int = 0
    depth: int = 1
    age: float = 0.0


EvictionPolicy = Callable[[NodeStats], float]

QUADRATIC_BLOCKS = 256
"""Depth at which attention makes a block cost twice as much to compute as the first one: 4,096 tokens in blocks of 16,
about right for the default model (2 x 135 M operations per token, 4 x 30 layers x 576 more for each token before it);
larger models get there later."""


def lru(stats: NodeStats) -> float:
    """Least recently used."""
    return stats.last_access


def segmented_lru(stats: NodeStats) -> float:
    """Segmented LRU (Karedla, Love and Wherry, 1994; with more segments Huang et al., 2013).

    Three segments: what was never reused; what was reused, perhaps only by the conversation that it belongs to and that
    will end; what several sequences went on from in different ways, and others may as well. They are bounded by time:
    a node counts as if it had been touched one or eight pool sizes of traffic later than it was, so that a burst of new
    prompts passes it by but an abandoned one leaves in the end.
    """
    later = 8 if stats.branches else 1 if stats.hits else 0
    return stats.last_access + later * stats.capacity


def lfu(stats: NodeStats) -> float:
    """Least frequently used, with dynamic ageing (LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich and Jin, 1999)."""
    return stats.age + stats.hits


def cost_aware(stats: NodeStats) -> float:
    """GreedyDual-Size-Frequency (Cherkasova, 1998, after Young, 1994, and Cao and Irani, 1997).

    The value is uses times what it costs to compute the block again. Blocks are of one size; a deep one costs more,
    because its attention reads all that lies before it.
    """
    return stats.age + (1 + stats.hits) * (1 + stats.depth / QUADRATIC_BLOCKS)


POLICIES: dict[str, EvictionPolicy] = {"slru": segmented_lru, "lru": lru, "lfu": lfu, "cost": cost_aware}


def create_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the user's own function of :class:`NodeStats`.

    Raises:
        ValueError: no such name, or the object cannot be called.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    if not callable(policy):
        reject("eviction_policy", policy, f"choose one of {', '.join(POLICIES)} or pass a function of NodeStats")
    return _Guarded(policy)


class _Guarded:
    """A user's policy; once it raises or gives no number, LRU takes its place: its fault ends nobody's request."""

    def __init__(self, policy: Callable[[NodeStats], Any]) -> None:
        self._policy: Callable[[NodeStats], Any] = policy

    def __call__(self, stats: NodeStats) -> float:
        try:
            value = float(self._policy(stats))
            if value == value:
                return value
            raise ValueError("it gave NaN")
        except Exception:
            logger.exception("the eviction policy failed on %s; from here on the least recently used goes first", stats)
            self._policy = lru
            return lru(stats)


T = TypeVar("T")


class EvictionQueue(Generic[T]):
    """A priority queue whose entries can be moved: pushing an item again makes its older entry stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, T]] = []
        self._current: dict[T, int] = {}
        self._ticket = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, item: T) -> bool:
        return item in self._current

    def push(self, item: T, value: float, rank: int = 0) -> None:
        """Items of a lower ``rank`` go first, then those of a lower ``value``."""
        ticket = next(self._ticket)
        self._current[item] = ticket
        heapq.heappush(self._heap, (rank, value, ticket, item))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        self._current.pop(item, None)

    def pop(self) -> T | None:
        """The item that goes first, the earlier pushed of equals; None when empty."""
        while self._heap:
            _, _, ticket, item = heapq.heappop(self._heap)
            if self._current.get(item) == ticket:
                del self._current[item]
                return item
        return None
