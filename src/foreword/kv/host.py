"""A cache as another one's tier: the host tier below the pool, and the pool beside the host tier.

The host tier holds, in main memory, what the pool has no room for. It is a cache of the same kind as the pool and kept
by the same bookkeeping, so matches end at any token there too, and what goes first is decided by the same policy. It is
inclusive: a sequence that lets go of its blocks leaves a copy, and a preempted one is copied back instead of computed
again. A sequence longer than the whole pool lives in the tier altogether, where attention reads its blocks as they lie;
what the pool has of it is copied from there.

Where the model computes in other memory than the tier's, the tier has storage of its own, and attention reads the pool
alone: nothing lives in the tier. Copies then run beside the model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from foreword.kv.cache import KVCacheManager
from foreword.kv.pool import KVPool
from foreword.kv.tier import Transfer
from foreword.ops.protocol import Ops, SlotCopy


class OwnMemory(NamedTuple):
    """Of a tier: its blocks, and what copies them to those of the pool and back."""

    blocks: KVPool
    ops: Ops


class CacheStore:
    """Another cache as a tier; see :class:`foreword.kv.tier.BlockStore`.

    Args:
        pool: the blocks of its user; also its own, but for those of ``memory``.
        cache: what the tier holds.
        takes: whether it is given what its user lets go of.
    """

    def __init__(self, pool: KVPool, cache: KVCacheManager, *, takes: bool, memory: OwnMemory | None = None) -> None:
        self._pool = pool
        self._cache = cache
        self._takes = takes
        self._memory = memory

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
        aside = self._aside()

        def run(_: threading.Event) -> int:
            with aside:
                self._copy(self._blocks, sources[start // self._pool.block_size :], self._pool, blocks)
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
        first, aside = len(match.blocks), self._aside()

        def run(_: threading.Event) -> int:
            nonlocal copied
            with aside:
                self._copy(self._pool, blocks[first:], self._blocks, held.blocks[first:])
            copied = True
            return len(tokens) - match.num_tokens

        def land() -> None:
            if copied:
                self._cache.release(held, tokens, len(tokens))
            else:
                self._cache.discard(held)

        return Transfer(run, land)

    @property
    def _blocks(self) -> KVPool:
        """Where the tier's lie."""
        return self._pool if self._memory is None else self._memory.blocks

    def _aside(self) -> AbstractContextManager[None]:
        """What is copied was computed before this, and what is copied onto has been read."""
        return nullcontext() if self._memory is None else self._memory.ops.aside()

    def _copy(self, source: KVPool, sources: Sequence[int], target: KVPool, targets: Sequence[int]) -> None:
        pairs = zip(sources, targets, strict=False)
        if self._memory is None:
            for begin, end in pairs:
                target.block(end).copy_(source.block(begin))
        else:
            size = source.block_size
            copies = [SlotCopy(begin * size, end * size, size) for begin, end in pairs]
            self._memory.ops.copy_blocks(source.data, target.data, copies)

    def reset(self) -> None:
        """Forget everything."""
        if self._takes:
            KVCacheManager.reset(self._cache)

    def flush(self) -> None:
        """Nothing of it survives the process."""

    def close(self) -> None:
        """The memory goes with the pool."""
