"""Blocks between the pool and the disk tier: where the bookkeeping's block numbers become bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foreword.kv.disk.tier import BlockRef, DiskTier
from foreword.kv.pool import KVPool
from foreword.kv.table import BlockStore
from foreword.ops.protocol import SlotCopy

if TYPE_CHECKING:
    from torch import Tensor

_MAX_OPEN = 32
"""Namespaces whose tier is open at a time; tenants come and go, and each has an index in memory."""


class DiskStore:
    """Keeps what was computed on disk, and brings it back into the pool. Lives on the engine thread.

    Args:
        pool: with one block beyond those that the cache manager hands out, through which part-filled blocks go.
        directory, max_bytes: of :class:`foreword.kv.disk.tier.DiskTier`.
        copy_slots: the backend's, which knows how slots lie in a block.
    """

    def __init__(
        self,
        pool: KVPool,
        directory: Path,
        max_bytes: int,
        copy_slots: Callable[[Tensor, Sequence[SlotCopy]], None],
    ) -> None:
        self._pool = pool
        self._directory = directory
        self._max_bytes = max_bytes
        self._copy_slots = copy_slots
        self._block_bytes = pool.geometry.bytes_per_token * pool.block_size
        self._spare = pool.num_blocks - 1
        self._buffer = bytearray(self._block_bytes)
        self._tiers: OrderedDict[bytes, DiskTier] = OrderedDict()
        self._tier(bytes(32))  # an impossible size is refused now, and what dead processes left is cleaned up

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """How many of ``tokens[start:limit]`` are stored in a row from ``start``, a block border, on."""
        return sum(ref.num_tokens for ref in self._tier(namespace).lookup(tokens, start, limit))

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> int:
        """Fill ``blocks`` with the stored KV of ``tokens[start:limit]``; how many tokens of it were there and whole."""
        tier, num_tokens = self._tier(namespace), 0
        refs = tier.lookup(tokens, start, limit)
        for ref, block in zip(refs, blocks, strict=False):
            if not self._load(tier, ref, block):
                break
            num_tokens += ref.num_tokens
        return num_tokens

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> None:
        """Store the KV of ``tokens``, of which ``blocks`` hold each position, as far as it is not stored."""
        tier, size = self._tier(namespace), self._pool.block_size
        covered = tier.covered(tokens)
        if covered == len(tokens):
            return
        first, whole = covered // size, len(tokens) // size
        payloads = [self._read(block) for block in blocks[first:whole]]
        if rest := len(tokens) % size:
            payloads.append(self._read_part(blocks[whole], rest))
        tier.write(tokens, first * size, payloads)

    def reset(self) -> None:
        """What is on disk stays."""

    def flush(self) -> None:
        """Wait until all of it is written or given up."""
        for tier in list(self._tiers.values()):
            tier.flush()

    def close(self) -> None:
        """Write what is waiting."""
        for tier in self._tiers.values():
            tier.close()

    def _tier(self, namespace: bytes) -> DiskTier:
        tier = self._tiers.get(namespace)
        if tier is None:
            if len(self._tiers) >= _MAX_OPEN:
                self._tiers.popitem(last=False)[1].close()
            tier = DiskTier(self._directory, namespace, self._block_bytes, self._pool.block_size, self._max_bytes)
            self._tiers[namespace] = tier
        self._tiers.move_to_end(namespace)
        return tier

    def _load(self, tier: DiskTier, ref: BlockRef, block: int) -> bool:
        if tier.read(ref, self._buffer) is None:
            return False
        planes = self._pool.block(block)
        planes.copy_(torch.frombuffer(self._buffer, dtype=planes.dtype).view(planes.shape))
        return True

    def _read(self, block: int) -> memoryview:
        copy: Any = self._pool.block(block).contiguous().view(torch.uint8).numpy()
        return memoryview(copy).cast("B")

    def _read_part(self, block: int, num_tokens: int) -> memoryview:
        """The block with its other slots cleared: they may hold what another tenant computed."""
        size = self._pool.block_size
        self._pool.block(self._spare).zero_()
        self._copy_slots(self._pool.data, [SlotCopy(block * size, self._spare * size, num_tokens)])
        return self._read(self._spare)


class TieredStore:
    """Several stores, the quickest first; the others are asked for what it does not have."""

    def __init__(self, stores: Sequence[BlockStore], block_size: int) -> None:
        self._stores = stores
        self._block_size = block_size

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """See :class:`foreword.kv.table.BlockStore`."""
        end = start
        for store in self._stores:
            border = end // self._block_size * self._block_size
            end = max(end, border + store.peek(namespace, tokens, border, limit))
        return end - start

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> int:
        """See :class:`foreword.kv.table.BlockStore`."""
        end = start
        for store in self._stores:
            border = end // self._block_size * self._block_size
            rest = blocks[(border - start) // self._block_size :]
            # inside a block that is there already, one that has less of it would spoil it
            if end == border or border + store.peek(namespace, tokens, border, limit) > end:
                end = border + store.load(namespace, tokens, border, limit, rest)
        return end - start

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> None:
        """See :class:`foreword.kv.table.BlockStore`."""
        for store in self._stores:
            store.save(namespace, tokens, blocks)

    def reset(self) -> None:
        """See :class:`foreword.kv.table.BlockStore`."""
        for store in self._stores:
            store.reset()

    def flush(self) -> None:
        """See :class:`foreword.kv.table.BlockStore`."""
        for store in self._stores:
            store.flush()

    def close(self) -> None:
        """See :class:`foreword.kv.table.BlockStore`."""
        for store in self._stores:
            store.close()
