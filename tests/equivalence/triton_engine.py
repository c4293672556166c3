"""Engines with Triton's kernels, in a process of their own: ``python triton_engine.py MODEL FILE [soak]``.

Whether functions are made for Triton's interpreter is settled when Triton is imported, so the tests' own process is of
no use. Runs :data:`CASES` on a GPU, or under the interpreter where there is none, and saves what came out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from foreword import Engine
from interpreter import prepare
from quantized_checkpoints import save_quantized
from support import assert_idle, cold, generate_recorded, inline_lanes, random_ids, tiny_options

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
PROMPTS = [random_ids(seed, length) for seed, length in enumerate((2, 17, 23))]
FORKED = [*PROMPTS[2][:21], *random_ids(9, 3)]
"""Begins as the last prompt and leaves it within a block."""
LONG = [random_ids(seed, length) for seed, length in enumerate((1, 129, 145))]
STORAGE: dict[str, dict[str, Any]] = {
    "int8 and fp8 KV": {"quantization": "int8", "kv_cache_dtype": "fp8"},
    "int4 and int8 KV": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
CHECKPOINT = "gptq desc_act"
SWAPPED = "int8 and fp8 KV"
Rows = list[tuple[list[int], torch.Tensor]]


def tiny(model: str, **options: Any) -> Engine:
    """A deterministic engine in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"quantization": None, "deterministic": True, "max_num_batched_tokens": 512, **options}
    return Engine(model, device=device, **tiny_options(kernels="triton", **given))


def reused(engine: Engine, prompts: list[list[int]], tokens: int, **options: Any) -> Rows:
    """``prompts`` as one batch, of which ``tokens`` must come from the cache."""
    before = engine.stats().tokens_reused
    rows = generate_recorded(engine, prompts, **GREEDY | options)
    assert engine.stats().tokens_reused - before == tokens
    return rows


def alone_batched_and_cached(model: str) -> dict[str, Rows]:
    """Each prompt by itself; all as one batch; all from the cache; and one that is copied within a block."""
    with tiny(model) as engine:
        results = {"alone": cold(engine, [*PROMPTS, FORKED], **GREEDY)}
        engine.reset_prefix_cache()
        results["batched"] = generate_recorded(engine, PROMPTS, **GREEDY)
        results["cached"] = reused(engine, PROMPTS, sum(map(len, PROMPTS)) - len(PROMPTS))
        results["forked"] = reused(engine, [FORKED], 21)
        stats = assert_idle(engine)
        assert stats.kv_tiles_used > 0
    return results


def chunked(model: str) -> dict[str, Rows]:
    """In chunks of any sizes, next to others that decode."""
    with tiny(model, max_num_batched_tokens=11) as engine:
        return {"chunked": generate_recorded(engine, PROMPTS, **GREEDY)}


def preempted(model: str) -> dict[str, Rows]:
    """In a pool that is too small for both, and alone in it."""
    prompts = [random_ids(seed, 16) for seed in (7, 8)]  # the next token needs another block
    with tiny(model, blocks=3) as engine:
        results = {"undisturbed": cold(engine, prompts, **GREEDY)}
        engine.reset_prefix_cache()
        before = engine.stats().preemptions
        results["preempted"] = generate_recorded(engine, prompts, **GREEDY)
        assert engine.stats().preemptions > before, "the pool was meant to be too small"
        assert_idle(engine)
    return results


def with_host_tier(model: str, **options: Any) -> Engine:
    """With a host tier in memory of its own; without a GPU its copies are done at once, as the interpreter runs one
    kernel at a time."""
    with patch("foreword.engine.storage.has_own_memory", lambda _: True):
        engine = tiny(model, swap_space="1MiB", **options)
    if not torch.cuda.is_available():
        for home in engine._loop.core.scheduler.homes:
            home._lanes = inline_lanes()
    return engine


def stored_otherwise(model: str) -> dict[str, Rows]:
    """With weights and KV in fewer bits; and one prompt again, whose KV comes back from the host tier."""
    results = {}
    for name, storage in STORAGE.items():
        with with_host_tier(model, **storage) as engine:
            results[name] = generate_recorded(engine, PROMPTS[:2], **GREEDY)
            if name == SWAPPED:
                engine.save()
                cache, cached = engine._loop.core.scheduler.cache, len(PROMPTS[1]) - 1
                engine._loop.call(lambda cache=cache: cache._evict(cache.allocator.num_evictable))
                results["swapped"] = reused(engine, PROMPTS[1:2], cached, max_tokens=1)
                assert assert_idle(engine).tokens_restored >= cached
    return results


def quantized_checkpoint(model: str) -> dict[str, Rows]:
    """Four bits as a checkpoint has them, their inputs in another order."""
    with TemporaryDirectory() as directory:
        stored = save_quantized(Path(model), Path(directory), CHECKPOINT) / "stored"
        with tiny(str(stored), quantization="int4") as engine:
            assert " gptq weights" in engine.backend
            return {CHECKPOINT: generate_recorded(engine, PROMPTS[:2], **GREEDY)}


def everything(model: str) -> dict[str, Rows]:
    """Longer prompts, over two tiles: alone, in one batch, in chunks, from the cache, with each storage."""
    results = {}
    for name, storage in {"float32": {}, **STORAGE}.items():
        with tiny(model, **storage) as engine:
            results[name] = cold(engine, LONG, **GREEDY)
            engine.reset_prefix_cache()
            results[f"{name}, batched"] = generate_recorded(engine, LONG, **GREEDY)
            results[f"{name}, cached"] = reused(engine, LONG, sum(map(len, LONG)) - len(LONG))
        with tiny(model, max_num_batched_tokens=61, **storage) as engine:
            results[f"{name}, chunked"] = generate_recorded(engine, LONG, **GREEDY)
    return results


CASES: list[Callable[[str], dict[str, Rows]]] = [
    alone_batched_and_cached,
    chunked,
    preempted,
    stored_otherwise,
    quantized_checkpoint,
]


def main(model: str, target: str, soak: str = "") -> None:
    """Run the cases and save their results, by name."""
    if not torch.cuda.is_available():
        prepare()
    results: dict[str, Rows] = {}
    for case in [everything] if soak else CASES:
        results |= case(model)
    torch.save(results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
