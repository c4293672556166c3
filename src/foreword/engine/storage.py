"""Where KV lies: the pool, the tiers below it, and what keeps their books."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from foreword.core.config import EngineConfig
from foreword.core.validation import reject
from foreword.engine.memory import free_memory, has_own_memory
from foreword.kv.eviction import EvictionPolicy
from foreword.kv.host import CacheStore, OwnMemory
from foreword.kv.pool import KVGeometry, KVPool
from foreword.kv.store import DiskStore
from foreword.kv.tier import BlockStore
from foreword.kv.tiers import Lanes, TieredCache
from foreword.kv.trace import TraceRecorder
from foreword.ops.cpu.threads import use_torch_threads
from foreword.ops.protocol import Ops


class KVStorage(NamedTuple):
    """What :func:`create_storage` makes.

    Attributes:
        pool: what attention reads.
        cache: the books of its blocks.
        host: those of the host tier; None without one.
        in_pool: whether the host tier's blocks lie in ``pool`` too, or would.
    """

    pool: KVPool
    cache: TieredCache
    host: TieredCache | None
    in_pool: bool


def create_storage(
    config: EngineConfig, geometry: KVGeometry, num_blocks: int, device: str, ops: Ops, policy: EvictionPolicy
) -> KVStorage:
    """A pool of ``num_blocks``, and the tiers that ``config`` asks for.

    In the main memory the blocks of the host tier lie behind those of the pool, and one more through which others go to
    disk; a device with memory of its own has a pool of its own.

    Raises:
        ValueError: an option asks for more than there is, or for too little.
    """
    apart = has_own_memory(device)
    in_host = _host_blocks(config, geometry)
    behind = 0 if apart else in_host
    larger = "swap_space" if behind > num_blocks else "kv_cache_memory"
    pool = _pool(config, larger, geometry, num_blocks + behind + (config.cache_dir is not None), device)
    memory = OwnMemory(_host_pool(config, geometry, in_host, device), ops) if apart and in_host else None
    cache, host = _caches(config, pool, memory, num_blocks, in_host, ops, policy)
    return KVStorage(pool, cache, host, not apart)


def _host_blocks(config: EngineConfig, geometry: KVGeometry) -> int:
    assert not isinstance(config.swap_space, str)  # the configuration has parsed it
    block_bytes = geometry.bytes_per_token * config.block_size
    if 0 < (config.swap_space or 0) < block_bytes:
        reject("swap_space", config.swap_space, f"a KV block takes {block_bytes} bytes: give more, or 0")
    return (config.swap_space or 0) // block_bytes


def _pool(
    config: EngineConfig, option: str, geometry: KVGeometry, num_blocks: int, device: str, *, pinned: bool = False
) -> KVPool:
    """``option`` asked for its size."""
    try:
        return KVPool(geometry, num_blocks, config.block_size, device, pinned=pinned)
    except (OSError, MemoryError, RuntimeError, ValueError, OverflowError) as error:
        reject(option, getattr(config, option), f"the system does not hand out so much memory ({error})")


def _host_pool(config: EngineConfig, geometry: KVGeometry, num_blocks: int, device: str) -> KVPool:
    """In memory that the device reaches, all of which is taken at once: more than is free would end the process."""
    free = free_memory()
    if num_blocks * config.block_size * geometry.bytes_per_token > free:
        reject("swap_space", config.swap_space, f"only {free} bytes of main memory are free: give less")
    return _pool(config, "swap_space", geometry, num_blocks, "cpu", pinned=device != "cpu")


def _caches(
    config: EngineConfig,
    pool: KVPool,
    memory: OwnMemory | None,
    num_blocks: int,
    in_host: int,
    ops: Ops,
    policy: EvictionPolicy,
) -> tuple[TieredCache, TieredCache | None]:
    """What keeps the books of the pool's ``num_blocks``, and of the host tier if there is one."""
    pinned, size = config.max_pinned_memory, config.block_size
    assert not isinstance(pinned, str)  # the configuration has parsed it
    block_bytes = pool.geometry.bytes_per_token * size
    create = functools.partial(
        TieredCache,
        block_size=size,
        policy=policy,
        enable_prefix_caching=config.enable_prefix_caching,
        max_pinned_blocks=(num_blocks + in_host) // 4 if pinned is None else pinned // block_bytes,
        lanes=Lanes.create(functools.partial(use_torch_threads, 1)),
    )
    trace = None if config.cache_trace is None else TraceRecorder(config.cache_trace, size, num_blocks)
    cache, host = create(num_blocks, trace=trace), None
    disk: list[BlockStore] = []
    if config.cache_dir is not None:
        assert isinstance(config.max_disk_cache, int)
        try:
            disk.append(DiskStore(pool, Path(config.cache_dir), config.max_disk_cache, ops))
        except ValueError as error:
            reject("max_disk_cache", config.max_disk_cache, str(error))
    if not in_host:
        cache.put_on(*disk)
    else:
        host = create(in_host, first_block=num_blocks if memory is None else 0)
        cache.put_on(CacheStore(pool, host, takes=True, memory=memory), *disk)
        if memory is None:  # sequences may live there, and have tiers
            host.put_on(CacheStore(pool, cache, takes=False), *disk)
    return cache, host
