"""``kv_cache_dtype``: what an engine with KV in 8 bits keeps, reuses, says and loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreword import Engine
from foreword.ops.cpu.native.library import available
from support import cold, random_ids

TinyEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
kernels = pytest.mark.parametrize("kernels", ["torch", *available()])


@kernels
def test_more_blocks_fit_into_the_same_memory(tiny: TinyEngine, kernels: str) -> None:
    """A head of 16 takes 16 bytes and a scale of 4, where bfloat16 takes 32."""
    options: dict[str, Any] = {"kernels": kernels, "dtype": "bfloat16", "kv_cache_memory": 500 * 16 * 8 * 20}
    assert tiny(**options, kv_cache_dtype="int8").stats().blocks_total == 500
    assert tiny(**options).stats().blocks_total == 500 * 20 // 32


@kernels
def test_fp8_is_for_gpus(tiny: TinyEngine, kernels: str) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8' is not valid: .*choose 'int8', or a GPU"):
        tiny(kernels=kernels, kv_cache_dtype="fp8")


@kernels
def test_the_engine_says_what_it_keeps(tiny: TinyEngine, kernels: str) -> None:
    assert "float32 weights, int8 KV" in tiny(kernels=kernels, kv_cache_dtype="int8").backend
    assert "float32 weights, float32 KV" in tiny(kernels=kernels).backend


@kernels
@pytest.mark.parametrize("common", [1, 15, 16, 17, 40, 47])
def test_as_much_is_cached_as_without(tiny: TinyEngine, kernels: str, common: int) -> None:
    """Whole prompts, beginnings and copied parts of blocks are found again to the token."""
    base = random_ids(1, 48)
    other = [*base[:common], (base[common] + 1) % 256, *random_ids(2, 9)]
    found = []
    for kv in ("auto", "int8"):
        engine = tiny(kernels=kernels, kv_cache_dtype=kv)
        engine.reset_prefix_cache()
        found.append([engine.generate(p, **GREEDY).usage.cached_tokens for p in (base, base, other, other)])
    assert found == [[0, len(base) - 1, common, len(other) - 1]] * 2


@kernels
def test_logits_are_near_those_of_plain_kv(tiny: TinyEngine, kernels: str) -> None:
    """And not the same: it is what is read."""
    prompts = [random_ids(seed, 150) for seed in range(4)]
    plain, rounded = (
        cold(tiny(kernels=kernels, kv_cache_dtype=kv), prompts, **{**GREEDY, "max_tokens": 1})
        for kv in ("auto", "int8")
    )
    for (_, expected), (_, found) in zip(plain, rounded, strict=True):
        error = (found - expected).abs().max() / expected.std()
        assert 0 < error < 0.1
