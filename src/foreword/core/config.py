"""Options of an engine."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any

from foreword.core.validation import reject

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("auto", None, "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
KERNELS = ("auto", "torch", "portable", "avx2", "avx512", "avx512_vnni", "triton")

MAX_THREADS = 256

ATTENTION_TILE = 128
"""KV positions per tile: attention reduces within tiles at multiples of this, in ascending order, in every path."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one :class:`foreword.Engine`; see there for their meaning.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = "auto"
    kernels: str = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    deterministic: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    eviction_policy: Any = "slru"
    max_pinned_memory: int | str | None = None
    cache_trace: str | None = None
    swap_space: int | str | None = None
    cache_dir: str | None = None
    max_disk_cache: int | str = 8 * 2**30
    enable_chunked_prefill: bool = True
    scheduling_policy: Any = "fcfs"
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            reject("model", self.model, "name a model, a path or a hub repository")
        if not isinstance(self.device, str) or not self.device:
            reject("device", self.device, 'give "auto" or a device such as "cpu"')
        if self.dtype not in DTYPES:
            reject("dtype", self.dtype, f"choose one of {', '.join(DTYPES)}")
        if self.quantization not in QUANTIZATIONS:
            reject("quantization", self.quantization, f"choose one of {', '.join(map(repr, QUANTIZATIONS))}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            reject("kv_cache_dtype", self.kv_cache_dtype, f"choose one of {', '.join(KV_CACHE_DTYPES)}")
        if self.kernels not in KERNELS:
            reject("kernels", self.kernels, f"choose one of {', '.join(KERNELS)}")
        optional = ("num_threads", "max_num_batched_tokens", "max_model_len")
        for field in ("block_size", "max_num_seqs", *optional):
            value = getattr(self, field)
            if value is None and field in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                reject(field, value, "give an integer of at least 1")
        if ATTENTION_TILE % self.block_size:
            reject("block_size", self.block_size, f"give a divisor of {ATTENTION_TILE}, the attention tile")
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            reject("num_threads", self.num_threads, f"give at most {MAX_THREADS}; more than processors helps nothing")
        if not isinstance(self.deterministic, bool):
            reject("deterministic", self.deterministic, "give True or False")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            reject("gpu_memory_utilization", share, "give a share in (0, 1]")
        for field, least in (
            ("kv_cache_memory", 1),
            ("max_pinned_memory", 0),
            ("swap_space", 0),
            ("max_disk_cache", 1),
        ):
            value = getattr(self, field)
            if value is None:
                continue
            memory = parse_memory(field, value)
            if memory < least:
                reject(field, value, f"give a number of bytes, at least {least}")
            object.__setattr__(self, field, memory)  # equal sizes make equal configs
        for field, kind in (("cache_trace", "file"), ("cache_dir", "directory")):
            if isinstance(path := getattr(self, field), os.PathLike):
                object.__setattr__(self, field, path := os.fspath(path))
            if path is not None and not (isinstance(path, str) and path):
                reject(field, path, f"give the path of a {kind}, or None")
            if path is not None:
                object.__setattr__(self, field, path := os.path.expanduser(path))
                if os.path.exists(path) and os.path.isdir(path) != (kind == "directory"):
                    reject(field, path, f"it is no {kind}; give the path of one, or of nothing yet")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            reject("seed", self.seed, "give an integer")

    @classmethod
    def build(cls, model: str | os.PathLike[str], **options: Any) -> EngineConfig:
        """The configuration with these options.

        Raises:
            ValueError: an option is unknown or out of range; the message names it.
        """
        known = sorted({field.name for field in dataclasses.fields(cls)} - {"model"})
        for option in options:
            if option not in known:
                raise ValueError(f"unknown engine option {option!r}; known are {', '.join(known)}")
        return cls(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **options)


def parse_memory(field: str, value: int | str) -> int:
    """Bytes of ``value``: an integer, or text such as ``"512MiB"`` or ``"2 GB"``.

    Raises:
        ValueError: ``value`` is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        reject(field, value, 'give bytes or text such as "512MiB" or "2GB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])
