"""Blocks between the pool and the disk tier: where the bookkeeping's block numbers become bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foreword.kv.disk.tier import BlockRef, DiskTier
from foreword.kv.disk.writer import SegmentWriter
from foreword.kv.pool import KVPool
from foreword.kv.tier import Transfer
from foreword.ops.protocol import SlotCopy

if TYPE_CHECKING:
    from foreword.ops.protocol import Ops

_MAX_OPEN = 256
"""Namespaces whose tier is open at a time; tenants come and go, and each has an index in memory."""


_BATCH = 256
"""Blocks that are read from the pool at a time: the writer's queue bounds what waits in memory."""


class DiskStore:
    """Keeps what was computed on disk, and brings it back into the pool; copies run one at a time.

    Args:
        pool: with one block beyond those that the cache manager hands out, through which part-filled blocks go.
        directory, max_bytes: of :class:`foreword.kv.disk.tier.DiskTier`.
        ops: the backend that computes in the pool.
    """

    def __init__(self, pool: KVPool, directory: Path, max_bytes: int, ops: Ops) -> None:
        self._pool = pool
        self._directory = directory
        self._max_bytes = max_bytes
        self._ops = ops
        self._block_bytes = pool.geometry.bytes_per_token * pool.block_size
        self._spare = pool.num_blocks - 1
        self._buffer = bytearray(self._block_bytes)
        self._writer = SegmentWriter(self._forget)
        self._tiers: OrderedDict[bytes, DiskTier] = OrderedDict()
        self._lock = threading.Lock()  # for the tiers: it is peeked into while copies run
        DiskTier(directory, bytes(32), self._block_bytes, pool.block_size, max_bytes)  # refuses sizes, cleans up

    def is_open(self, namespace: bytes) -> bool:
        """Whether a namespace's files are known; finding them out reads each one's head."""
        return namespace in self._tiers

    def open(self, namespace: bytes) -> None:
        """Find them out."""
        self._tier(namespace)

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """See :class:`foreword.kv.tier.BlockStore`."""
        return sum(ref.num_tokens for ref in self._tier(namespace).lookup(tokens, start, limit))

    def behind(self, namespace: bytes, tokens: list[int], count: int) -> list[int]:
        """See :class:`foreword.kv.tier.BlockStore`."""
        return self._tier(namespace).behind(tokens, count)

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> Transfer:
        """See :class:`foreword.kv.tier.BlockStore`."""
        aside = self._ops.aside()

        def run(stop: threading.Event) -> int:
            tier, num_tokens = self._tier(namespace), 0
            with aside:
                for ref, block in zip(tier.lookup(tokens, start, limit), blocks, strict=False):
                    if stop.is_set() or not self._load(tier, ref, block):
                        break
                    num_tokens += ref.num_tokens
            return num_tokens

        return Transfer(run, _nothing)

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> Transfer:
        """See :class:`foreword.kv.tier.BlockStore`. Copied when that has landed, on disk after :meth:`flush`."""
        aside = self._ops.aside()

        def run(_: threading.Event) -> int:
            tier, size = self._tier(namespace), self._pool.block_size
            covered = tier.covered(tokens)
            if covered == len(tokens):
                return 0
            with aside:
                for start in range(covered // size * size, len(tokens), _BATCH * size):
                    end = min(start + _BATCH * size, len(tokens))
                    part = [self._read(block) for block in blocks[start // size : end // size]]
                    if rest := end % size:
                        part.append(self._read_part(blocks[end // size], rest))
                    if not tier.write(tokens[:end], start, part):  # too much is waiting, or the disk refuses
                        break
            return len(tokens) - covered

        return Transfer(run, _nothing)

    def reset(self) -> None:
        """What is on disk stays."""

    def flush(self) -> None:
        """Wait until all of it is written or given up."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is waiting."""
        self._writer.close()

    def _tier(self, namespace: bytes) -> DiskTier:
        with self._lock:
            tier = self._tiers.get(namespace)
            if tier is None:
                if len(self._tiers) >= _MAX_OPEN:
                    self._tiers.popitem(last=False)
                shape = (self._block_bytes, self._pool.block_size, self._max_bytes)
                tier = self._tiers[namespace] = DiskTier(self._directory, namespace, *shape, self._writer)
            self._tiers.move_to_end(namespace)
            return tier

    def _forget(self, names: list[str]) -> None:
        with self._lock:
            tiers = list(self._tiers.values())
        for tier in tiers:
            tier.forget(names)

    def _load(self, tier: DiskTier, ref: BlockRef, block: int) -> bool:
        if tier.read(ref, self._buffer) is None:
            return False
        planes = self._pool.block(block)
        planes.copy_(torch.frombuffer(self._buffer, dtype=planes.dtype).view(planes.shape))
        return True

    def _read(self, block: int) -> memoryview:
        copy: Any = self._pool.block(block).contiguous().cpu().view(torch.uint8).numpy()
        return memoryview(copy).cast("B")

    def _read_part(self, block: int, num_tokens: int) -> memoryview:
        """The block with its other slots cleared: they may hold what another tenant computed."""
        size = self._pool.block_size
        self._pool.block(self._spare).zero_()
        self._ops.copy_slots(self._pool.data, [SlotCopy(block * size, self._spare * size, num_tokens)])
        return self._read(self._spare)


def _nothing() -> None:
    """Nobody kept books of it."""
