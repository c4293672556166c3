"""A cache as another one's tier: the host tier below the pool, and the pool beside the host tier.

The host tier holds, in main memory, what the pool has no room for. It is a cache of the same kind as the pool and kept
by the same bookkeeping, so matches end at any token there too, and what goes first is decided by the same policy. It is
inclusive: a sequence that lets go of its blocks leaves a copy, and a preempted one is copied back instead of computed
again. A sequence longer than the whole pool lives in the tier altogether, where attention reads its blocks as they lie;
what the pool has of it is copied from there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from foreword.kv.cache import KVCacheManager
from foreword.kv.pool import KVPool
from foreword.kv.tier import Transfer


class CacheStore:
    """Another cache as a tier; see :class:`foreword.kv.tier.BlockStore`.

    Args:
        pool: the blocks of both.
        cache: what the tier holds.
        takes: whether it is given what its user lets go of.
    """

    def __init__(self, pool: KVPool, cache: KVCacheManager, *, takes: bool) -> None:
        self._pool = pool
        self._cache = cache
        self._takes = takes

    def is_open(self, namespace: bytes) -> bool:  # noqa: ARG002
        """It knows what it holds."""
        return True

    def open(self, namespace: bytes) -> None:
        """It is."""

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """How many of ``tokens[start:limit]`` it has."""
        return max(0, self._cache.lookup(namespace, tokens, limit).num_tokens - start)

    def behind(self, namespace: bytes, tokens: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens behind ``tokens``."""
        stop = KVCacheManager.find_stop(self._cache, namespace, tokens, count)
        return stop.instead if stop.num_tokens == len(tokens) else []

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> Transfer:
        """Copy what it has of ``tokens[start:limit]`` to ``blocks``."""
        match = self._cache.lookup(namespace, tokens, limit)
        sources = match.all_blocks
        self._cache.touch(match)
        self._cache.allocator.share(sources)  # a transfer uses blocks like a sequence

        def run(_: threading.Event) -> int:
            self._copy(sources[start // self._pool.block_size :], blocks)
            return match.num_tokens - start

        return Transfer(run, lambda: self._cache.allocator.release(sources))

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> Transfer | None:
        """Take a copy of ``blocks``. What is longer than the room in the tier is left out."""
        if not self._takes:
            return None
        match = self._cache.lookup(namespace, tokens, len(tokens))
        if match.num_tokens == len(tokens):
            self._cache.touch(match)
            return None
        match = match.whole_blocks(self._pool.block_size)
        if not self._cache.can_allocate(match, len(tokens)):
            return None
        held, copied = self._cache.allocate(namespace, match, len(tokens)), False
        first = len(match.blocks)

        def run(_: threading.Event) -> int:
            nonlocal copied
            self._copy(blocks[first:], held.blocks[first:])
            copied = True
            return len(tokens) - match.num_tokens

        def land() -> None:
            if copied:
                self._cache.release(held, tokens, len(tokens))
            else:
                self._cache.discard(held)

        return Transfer(run, land)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=False):
            self._pool.block(target).copy_(self._pool.block(source))

    def reset(self) -> None:
        """Forget everything."""
        if self._takes:
            KVCacheManager.reset(self._cache)

    def flush(self) -> None:
        """Nothing of it survives the process."""

    def close(self) -> None:
        """The memory goes with the pool."""
