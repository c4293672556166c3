"""From options to a running core: model, KV pool, scheduler and runner, put together in one place."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from pathlib import Path
from typing import cast

import torch

from foreword import __version__
from foreword.core.config import EngineConfig
from foreword.core.errors import ModelLoadError
from foreword.core.validation import reject
from foreword.engine.client import Limits
from foreword.engine.core import EngineCore
from foreword.kv.eviction import EvictionPolicy
from foreword.kv.eviction import create_policy as create_eviction_policy
from foreword.kv.host import CacheStore
from foreword.kv.namespace import Namespace
from foreword.kv.pool import KVGeometry, KVPool
from foreword.kv.store import DiskStore
from foreword.kv.tier import BlockStore
from foreword.kv.tiers import Lanes, TieredCache
from foreword.kv.trace import TraceRecorder
from foreword.model.checkpoint_quantization import CheckpointQuantization
from foreword.model.config import ModelConfig
from foreword.model.digest import fingerprint, full_digest
from foreword.model.load import load_model, stored_quantization
from foreword.model.source import home, resolve
from foreword.ops import choose_device, create_ops, default_dtype
from foreword.ops.cpu.threads import use_torch_threads
from foreword.ops.protocol import Ops, Quantization
from foreword.runtime.runner import ModelRunner
from foreword.runtime.sampler import Sampler
from foreword.scheduling.policy import create_policy
from foreword.scheduling.scheduler import Scheduler
from foreword.text.tokenizer import Tokenizer

logger = logging.getLogger("foreword")

KV_SHARE_OF_FREE_MEMORY = 0.2
"""Share of the free memory that the KV cache takes when ``kv_cache_memory`` is not given."""

CPU_TOKENS_PER_STEP = 512
"""Default of ``max_num_batched_tokens``: more computes no faster per token and lets decoding requests wait longer."""


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """What an engine is made of."""

    core: EngineCore
    backend: str
    tokenizer: Tokenizer
    limits: Limits
    namespace: Namespace


def build(config: EngineConfig) -> EngineParts:
    """Load the model and put the engine together.

    Raises:
        ModelLoadError: the model cannot be found, read or run, or its KV does not fit.
        ValueError: an option contradicts the model or the machine.
    """
    policy = create_policy(config.scheduling_policy)
    eviction = create_eviction_policy(config.eviction_policy)
    device = choose_device(config.device, config.kernels, home() / "machine")
    source = resolve(config.model)
    tokenizer = Tokenizer.from_directory(source.directory)
    model_config = ModelConfig.from_directory(source.directory)
    max_model_len = _max_model_len(config, model_config)
    kernels = _kernels(config, device, model_config)
    dtype = default_dtype(device, kernels) if config.dtype == "auto" else getattr(torch, config.dtype)
    stored = model_config.quantization
    quantization, as_stored = _quantization(config, kernels, source.directory, stored)
    ops = create_ops(
        device, dtype, kernels, quantization is not None, config.num_threads,
        block_size=config.block_size, deterministic=config.deterministic,
    )  # fmt: skip
    ops.enter_thread()
    model = load_model(
        source.directory, model_config, dtype=dtype, ops=ops, quantization=quantization, as_stored=as_stored,
        device=device,
    )  # fmt: skip
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else torch.int8
    ops.calibrate(model.shape, kv_dtype, home() / "machine")
    geometry = KVGeometry(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, kv_dtype)
    num_blocks = _num_blocks(config, geometry, max_model_len, device)
    pool = _pool(config, geometry, num_blocks, device)
    cache, host = _caches(config, pool, num_blocks, ops, eviction)
    scheduler = Scheduler(
        cache,
        policy,
        host=host,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(CPU_TOKENS_PER_STEP, config.max_num_seqs),
        chunked_prefill=config.enable_chunked_prefill,
    )
    runner = ModelRunner(model, pool, ops, Sampler(tokenizer.eos_token_ids))
    computed, kept = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype))
    weights = stored.method if stored is not None and as_stored else quantization or computed
    backend = f"{ops.name} kernels, {weights} weights, {kept} KV, {ops.num_threads} threads"
    logger.info(
        "%s on %s with %s: %d KV blocks of %d tokens (%.2f GB)",
        source.name, device, backend, num_blocks, config.block_size,
        num_blocks * config.block_size * geometry.bytes_per_token / 1e9,
    )  # fmt: skip
    return EngineParts(
        core=EngineCore(scheduler, runner),
        backend=backend,
        tokenizer=tokenizer,
        limits=Limits(
            max_model_len,
            max(home.allocator.num_blocks for home in scheduler.homes) * config.block_size,
            model_config.vocab_size,
        ),
        namespace=_namespace(
            config, source.directory, geometry, ops, f"{quantization} {computed}{' as stored' if as_stored else ''}"
        ),
    )


@functools.cache  # once per process
def _say_native_kernels_are_missing() -> None:
    logger.info(
        "the native CPU kernels are not there (the package was built without a C compiler or Python's headers): "
        "using torch, which is slower"
    )


def _kernels(config: EngineConfig, device: str, model: ModelConfig) -> str:
    """The kernels to use; falls back to torch for shapes that the native ones do not know."""
    from foreword.ops.cpu.native.library import SLOTS, available

    wanted = config.kernels
    if wanted in ("torch", "triton"):
        return wanted
    if device != "cpu":
        return "triton" if wanted == "auto" else wanted
    if wanted == "auto" and not available():
        _say_native_kernels_are_missing()
        return "torch"
    odd = [name for name in ("hidden_size", "intermediate_size", "head_dim") if getattr(model, name) % SLOTS]
    if config.block_size % SLOTS:
        odd.append("block_size")
    if not odd:
        return wanted
    reason = f"the native kernels need {' and '.join(odd)} to be a multiple of {SLOTS}"
    if wanted != "auto":
        reject("kernels", wanted, f"{reason}; choose 'torch' or 'auto'")
    logger.info("%s: using torch", reason)
    return "torch"


def _quantization(
    config: EngineConfig, kernels: str, directory: Path, stored: CheckpointQuantization | None
) -> tuple[Quantization | None, bool]:
    """The scheme of plain weights, and whether those that the checkpoint has quantised are computed with as they are.

    ``quantization="auto"`` means the scheme that a file came in, which costs no quality, else int8 on the CPU; see the
    README's table. Nothing where a ``dtype`` is asked for, or where torch would compute it no faster. A scheme that is
    asked for is what all weights get.
    """
    if config.quantization != "auto":
        wanted = cast("Quantization | None", config.quantization)
        return wanted, wanted == "int4" and stored is not None and stored.bits == 4
    if kernels == "torch" or config.dtype != "auto":
        return None, False
    return stored_quantization(directory) or (None if kernels == "triton" else "int8"), stored is not None


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        reject("max_model_len", config.max_model_len, f"{config.model} was made for at most {longest} tokens")
    return config.max_model_len or longest


def _num_blocks(config: EngineConfig, geometry: KVGeometry, max_model_len: int, device: str) -> int:
    block_bytes = geometry.bytes_per_token * config.block_size
    budget = config.kv_cache_memory
    assert not isinstance(budget, str)  # the configuration has parsed it
    if budget is None:
        most = config.max_num_seqs * max_model_len * geometry.bytes_per_token
        budget = min(_memory_for_kv(device, config.gpu_memory_utilization), most)
    if budget < block_bytes:
        raise ModelLoadError(
            f"kv_cache_memory={budget} bytes hold no KV block of {config.model} ({block_bytes} bytes "
            f"for {config.block_size} tokens); give more memory or a smaller block_size"
        )
    return budget // block_bytes


def _memory_for_kv(device: str, utilization: float) -> int:
    """What the KV cache may take, now that the weights are there: a share of free main memory, or what is left of the
    share of a GPU's memory."""
    if device == "cpu":
        return int(KV_SHARE_OF_FREE_MEMORY * free_memory())
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int((1 - utilization) * total))


def free_memory() -> int:
    """Bytes of memory this process can still get; where the system does not say, half of what it has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, _container_memory(free))


def _container_memory(unlimited: int) -> int:
    """What the container's limit (cgroup v2) leaves; ``unlimited`` without one."""
    group = Path("/sys/fs/cgroup")
    try:
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return unlimited


def _pool(config: EngineConfig, geometry: KVGeometry, num_blocks: int, device: str) -> KVPool:
    """``num_blocks`` for the KV pool, behind them those of the host tier, and one through which others go to disk."""
    if device != "cpu" and config.swap_space:
        reject("swap_space", config.swap_space, f"there is no host tier for device {device!r} yet: leave it out")
    num_blocks += _host_blocks(config, geometry) + (config.cache_dir is not None)
    try:
        return KVPool(geometry, num_blocks, config.block_size, device)
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        larger = "swap_space" if _host_blocks(config, geometry) > num_blocks // 2 else "kv_cache_memory"
        reject(larger, getattr(config, larger), f"the system does not hand out so much memory ({error})")


def _host_blocks(config: EngineConfig, geometry: KVGeometry) -> int:
    assert not isinstance(config.swap_space, str)  # the configuration has parsed it
    block_bytes = geometry.bytes_per_token * config.block_size
    if 0 < (config.swap_space or 0) < block_bytes:
        reject("swap_space", config.swap_space, f"a KV block takes {block_bytes} bytes: give more, or 0")
    return (config.swap_space or 0) // block_bytes


def _caches(
    config: EngineConfig, pool: KVPool, num_blocks: int, ops: Ops, policy: EvictionPolicy
) -> tuple[TieredCache, TieredCache | None]:
    """What keeps the books of the pool's ``num_blocks``, and of the host tier if there is one."""
    pinned, size = config.max_pinned_memory, config.block_size
    assert not isinstance(pinned, str)  # the configuration has parsed it
    in_host = _host_blocks(config, pool.geometry)
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
            disk.append(DiskStore(pool, Path(config.cache_dir), config.max_disk_cache, ops.copy_slots))
        except ValueError as error:
            reject("max_disk_cache", config.max_disk_cache, str(error))
    if in_host:
        host = create(in_host, first_block=num_blocks)
        host.put_on(CacheStore(pool, cache, takes=False), *disk)
        cache.put_on(CacheStore(pool, host, takes=True), *disk)
    else:
        cache.put_on(*disk)
    return cache, host


def _namespace(config: EngineConfig, directory: Path, geometry: KVGeometry, ops: Ops, weights_as: str) -> Namespace:
    """What KV depends on. On disk it meets other machines and versions, and every byte of the weights counts.

    Args:
        weights_as: the scheme and the dtype that weights are held in.
    """
    model = (directory / "config.json").read_text()
    layout = f"{geometry} in blocks of {config.block_size}; {ops.kv_layout}"
    if config.cache_dir is None:
        weights = fingerprint(directory)
    else:
        weights = full_digest(directory, home() / "machine")
        layout += f"; foreword {__version__}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return Namespace(weights=f"{weights} {weights_as}", config=model, layout=layout)
