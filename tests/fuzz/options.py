"""What an engine may be built with. A new option is a new row."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import support
from foreword import NodeStats
from foreword.kv.disk.format import header_bytes
from foreword.ops.cpu.native.library import available
from support import on_device, tiny_options, tiny_token_bytes


class Backwards:
    """A user's own policy, the least fair one."""

    def key(self, candidate: Any) -> Any:
        return -candidate.number


class Broken:
    """A user's own policy with a bug."""

    def key(self, candidate: Any) -> Any:
        return 1 // (candidate.number % 3)


def newest_first(stats: NodeStats) -> float:
    """A user's own eviction policy, the worst one."""
    return -stats.last_access


def sometimes_nothing(stats: NodeStats) -> Any:
    """A user's own eviction policy with a bug."""
    return None if stats.hits > 2 else stats.depth


@dataclass(frozen=True)
class Path:
    """What decides over the bits of an output: kernels and the types of weights and KV."""

    kernels: str
    dtype: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return (2, 4, 8, 16) if self.kernels in ("torch", "triton") else (16, 16, 16, 32)

    @property
    def cost(self) -> int:
        """About how much longer than the fastest path's a step takes."""
        return 20 if support.DEVICE == "interpreter" else 10 if self.kernels == "torch" else 1

    def options(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def paths() -> list[Path]:
    """The paths of this machine, each as often as it is to be chosen: the quick ones more often."""
    if support.DEVICE != "cpu":
        triton = [Path("triton", "float32"), Path("triton", "float32", "int4", "int8")]
        wide = [Path("triton", "bfloat16")] * 4 + [Path("triton", "bfloat16", "int8", "fp8")]
        return triton if support.DEVICE == "interpreter" else triton + wide
    torch = [Path("torch", "float32"), Path("torch", "bfloat16")]
    native = list(available())
    if not native:
        return torch
    best = [Path(native[0], "float32")] * 6 + [Path(native[0], "float32", kv_cache_dtype="int8")]
    best += [Path(native[0], "bfloat16")] * 3 + [Path(native[0], "bfloat16", "int8")]
    return best + [Path(name, "float32") for name in native[1:]] + torch


POLICIES: tuple[Any, ...] = (
    "fcfs", "priority", "shortest_prefill_first", "longest_prefix_match", Backwards, Broken,
)  # fmt: skip

OPTIONS: dict[str, tuple[Any, ...]] = {
    "kv_tokens": (48, 64, 64, 96, 96, 128, 160, 240, 1024),  # tokens of the whole pool: mostly less than is asked for
    "swap_tokens": (0, 0, 0, 64, 240, 480),  # tokens of the host tier
    "own_memory": (False, False, True),  # which has storage of its own, as below a GPU
    "max_num_seqs": (1, 2, 3, 4, 6, 8, 16, 16),
    "max_num_batched_tokens": (8, 16, 33, 64, 256, None),
    "scheduling_policy": POLICIES,
    "enable_prefix_caching": (True,) * 9 + (False,),
    "enable_chunked_prefill": (True, True, True, False),
    "num_threads": (1,) * 19 + (2,),
    "seed": (0, 1),
    "eviction_policy": ("slru", "slru", "lru", "lfu", "cost", newest_first, sometimes_nothing),
    "pinned_blocks": (None, None, 0, 1, 3, 999),
    "pinned_home": (0, 0, 1),  # which cache pins are made in, the host tier's if there is one
    "disk_blocks": (1, 3, 8, 20, 60, 400),
}
"""Options by name with their values, each drawn evenly. ``kv_tokens`` becomes ``kv_cache_memory``, ``pinned_blocks``
``max_pinned_memory``; ``disk_blocks``, each with a header of its own, ``max_disk_cache``."""


def draw_options(rng: random.Random, path: Path) -> dict[str, Any]:
    """Options of one engine, ``block_size`` and those of ``path`` among them."""
    chosen = {name: rng.choice(values) for name, values in OPTIONS.items()}
    if support.DEVICE == "cuda":
        chosen["own_memory"] = True
    return {"block_size": rng.choice(path.block_sizes), **chosen, **path.options()}


def engine_options(chosen: dict[str, Any], directory: FilePath | None) -> dict[str, Any]:
    """What was drawn, as ``Engine`` takes it, with ``directory`` for a disk tier."""
    options, size = dict(chosen), chosen["block_size"]
    names = ("kv_tokens", "pinned_blocks", "disk_blocks", "swap_tokens")
    blocks, pinned, stored, swapped = (options.pop(name) for name in names)
    del options["pinned_home"], options["own_memory"]
    block_bytes = size * tiny_token_bytes(chosen["dtype"], chosen["kv_cache_dtype"])
    options["swap_space"] = swapped // size * block_bytes
    options["max_pinned_memory"] = None if pinned is None else pinned * block_bytes
    if directory is not None:
        options |= {"cache_dir": directory, "max_disk_cache": stored * (header_bytes(1, size) + block_bytes)}
    return on_device(tiny_options(blocks=blocks // size, **options))
