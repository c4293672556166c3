"""From options to a running core: model, KV pool, scheduler and runner, put together in one place."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from foreword import __version__
from foreword.core.config import EngineConfig
from foreword.core.errors import ModelLoadError
from foreword.core.validation import reject
from foreword.engine.client import Limits
from foreword.engine.core import EngineCore
from foreword.engine.memory import Memory, StepSize, has_own_memory, memory_of, run_step
from foreword.engine.storage import create_storage
from foreword.kv.eviction import create_policy as create_eviction_policy
from foreword.kv.namespace import Namespace
from foreword.kv.pool import KVGeometry, KVPool
from foreword.model.checkpoint_quantization import CheckpointQuantization
from foreword.model.config import ModelConfig
from foreword.model.digest import fingerprint, full_digest
from foreword.model.load import load_model, stored_quantization
from foreword.model.size import weight_bytes
from foreword.model.source import home, resolve
from foreword.ops import choose_device, create_ops, default_dtype
from foreword.ops.protocol import Ops, Quantization
from foreword.runtime.runner import ModelRunner
from foreword.runtime.sampler import Sampler
from foreword.scheduling.policy import create_policy
from foreword.scheduling.scheduler import Scheduler
from foreword.text.tokenizer import Tokenizer

logger = logging.getLogger("foreword")

CPU_TOKENS_PER_STEP = 512
"""Default of ``max_num_batched_tokens``: more computes no faster per token and lets decoding requests wait longer."""

GPU_TOKENS_PER_STEP = 8192
"""The same where a few hundred tokens would be computed in the time that reading the weights takes."""


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
    kv_dtype = _kv_dtype(config, kernels, dtype)
    ops = create_ops(
        device, dtype, kernels, quantization is not None, config.num_threads,
        block_size=config.block_size, deterministic=config.deterministic,
    )  # fmt: skip
    ops.enter_thread()
    memory = memory_of(device, config.model, config.gpu_memory_utilization)
    load = functools.partial(
        load_model, source.directory, model_config, dtype=dtype, ops=ops, quantization=quantization,
        as_stored=as_stored, device=device,
    )  # fmt: skip
    model = memory.load(load, _weight_bytes(source.directory, dtype, quantization, as_stored, ops, device))
    ops.calibrate(model.shape, kv_dtype, home() / "machine")
    geometry = KVGeometry(model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, kv_dtype)
    tokens_per_step = _tokens_per_step(config, device)

    def runner_of(pool: KVPool) -> ModelRunner:
        return ModelRunner(model, pool, ops, Sampler(tokenizer.eos_token_ids))

    longest_prefill = tokens_per_step if config.enable_chunked_prefill else max(tokens_per_step, max_model_len)
    largest = StepSize(longest_prefill, config.max_num_seqs, max_model_len)
    step = functools.partial(run_step, runner_of, geometry, config.block_size, device, largest)
    num_blocks = _num_blocks(config, geometry, max_model_len, memory, step)
    storage = create_storage(config, geometry, num_blocks, device, ops, eviction)
    scheduler = Scheduler(
        storage.cache,
        policy,
        host=storage.host,
        attends_host=storage.in_pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=tokens_per_step,
        chunked_prefill=config.enable_chunked_prefill,
    )
    computed = str(dtype).removeprefix("torch.")
    kept = computed if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    backend = _backend(ops, device, stored.method if stored and as_stored else quantization or computed, kept)
    logger.info(
        "%s on %s with %s: %d KV blocks of %d tokens (%.2f GB)",
        source.name, device, backend, num_blocks, config.block_size,
        num_blocks * config.block_size * geometry.bytes_per_token / 1e9,
    )  # fmt: skip
    return EngineParts(
        core=EngineCore(scheduler, runner_of(storage.pool)),
        backend=backend,
        tokenizer=tokenizer,
        limits=Limits(
            max_model_len,
            scheduler.capacity,
            model_config.vocab_size,
            "a larger kv_cache_memory" + (", or a swap_space that holds it (as exact)" if storage.in_pool else ""),
        ),
        namespace=_namespace(
            config, source.directory, geometry, ops, f"{quantization} {computed}{' as stored' if as_stored else ''}"
        ),
    )


def _backend(ops: Ops, device: str, weights: str, kept: str) -> str:
    """What the options came to; ``kept``: what KV is kept in."""
    place = device if has_own_memory(device) else f"{ops.num_threads} threads"
    return f"{ops.name} kernels, {weights} weights, {kept} KV, {place}"


def _tokens_per_step(config: EngineConfig, device: str) -> int:
    most = GPU_TOKENS_PER_STEP if has_own_memory(device) else CPU_TOKENS_PER_STEP
    return config.max_num_batched_tokens or max(most, config.max_num_seqs)


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


def _kv_dtype(config: EngineConfig, kernels: str, dtype: torch.dtype) -> torch.dtype:
    if config.kv_cache_dtype == "fp8" and kernels != "triton":
        reject("kv_cache_dtype", "fp8", "the CPU's kernels do not know it: choose 'int8', or a GPU")
    return {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype]


def _weight_bytes(
    directory: Path, dtype: torch.dtype, quantization: Quantization | None, as_stored: bool, ops: Ops, device: str
) -> int:
    """What the weights take besides the pages of their files."""
    sizes = weight_bytes(directory, dtype, quantization, as_stored)
    if has_own_memory(device):
        return sum(sizes)
    return 0 if ops.name == "torch" else sizes.linear


def _num_blocks(
    config: EngineConfig, geometry: KVGeometry, max_model_len: int, memory: Memory, step: Callable[[], object]
) -> int:
    """Blocks of the KV pool; ``step`` runs one as large as any, to see what it takes."""
    block_bytes = geometry.bytes_per_token * config.block_size
    budget = config.kv_cache_memory
    assert not isinstance(budget, str)  # the configuration has parsed it
    if budget is None:
        least = -(-(config.max_model_len or 1) // config.block_size) * block_bytes
        most = config.max_num_seqs * max_model_len * geometry.bytes_per_token
        budget = min(memory.for_kv(step, least), max(most, block_bytes))
    if budget < block_bytes:
        raise ModelLoadError(
            f"kv_cache_memory={budget} bytes hold no KV block of {config.model} ({block_bytes} bytes "
            f"for {config.block_size} tokens); give more memory or a smaller block_size"
        )
    return budget // block_bytes


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
