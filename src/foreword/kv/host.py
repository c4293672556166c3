"""The host tier: blocks in main memory below the pool, for what the pool has no room for.

It is a cache of the same kind as the pool and kept by the same bookkeeping, so matches end at any token there too, and
what goes first is decided by the same policy. It is inclusive: a sequence that lets go of its blocks leaves a copy, and
a preempted one is copied back instead of computed again. A sequence longer than the whole pool lives in the tier
altogether: attention reads any block where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreword.kv.cache import KVCacheManager
from foreword.kv.pool import KVPool


class HostStore:
    """Copies blocks between the pool and the tier. Lives on the engine thread.

    Args:
        pool: the blocks of both.
        cache: what the tier holds.
    """

    def __init__(self, pool: KVPool, cache: KVCacheManager) -> None:
        self._pool = pool
        self._cache = cache

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """See :class:`foreword.kv.table.BlockStore`."""
        return max(0, self._cache.lookup(namespace, tokens, limit).num_tokens - start)

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> int:
        """See :class:`foreword.kv.table.BlockStore`."""
        match = self._cache.lookup(namespace, tokens, limit)
        if match.num_tokens <= start:
            return 0
        first = start // self._pool.block_size
        sources = match.blocks[first:] if match.tail_block is None else [*match.blocks[first:], match.tail_block]
        for source, target in zip(sources, blocks, strict=False):
            self._pool.block(target).copy_(self._pool.block(source))
        self._cache.touch(match)
        return match.num_tokens - start

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> None:
        """See :class:`foreword.kv.table.BlockStore`. What is longer than the whole tier is left out."""
        match = self._cache.lookup(namespace, tokens, len(tokens))
        if match.num_tokens == len(tokens):
            self._cache.touch(match)
            return
        match = match.whole_blocks(self._pool.block_size)
        if not self._cache.can_allocate(match, len(tokens)):
            return
        held = self._cache.allocate(namespace, match, len(tokens))
        first = len(match.blocks)
        for source, target in zip(blocks[first:], held.blocks[first:], strict=False):
            self._pool.block(target).copy_(self._pool.block(source))
        self._cache.release(held, tokens, len(tokens))

    def reset(self) -> None:
        """Forget everything."""
        self._cache.reset()

    def flush(self) -> None:
        """Nothing of it survives the process."""

    def close(self) -> None:
        """The memory goes with the pool."""
