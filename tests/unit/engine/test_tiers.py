"""The tiers below the pool: what is evicted or preempted comes back from there, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine
from foreword.kv.tiers import TieredCache
from support import assert_idle, assert_same_bits, generate_recorded, random_ids, tiny_token_bytes

NewEngine = Callable[..., Engine]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPT = random_ids(5, 77)


def host(engine: Engine) -> TieredCache:
    found = engine._loop.core.scheduler.host
    assert found is not None
    return found


def crowd(engine: Engine, seed: int = 100) -> None:
    """Fill the pool with other prompts."""
    for number in range(4):
        engine.generate(random_ids(seed + number, 90), max_tokens=4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_what_the_pool_evicts_comes_back(new_tiny: NewEngine, kernels: str) -> None:
    engine = new_tiny(blocks=10, block_size=16, swap_space="1MiB", kernels=kernels)
    expected = generate_recorded(engine, [PROMPT], **OPTIONS)
    crowd(engine)
    assert engine.explain(PROMPT).reason == "complete"
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    after = engine.stats()
    assert after.tokens_reused - before.tokens_reused == len(PROMPT) - 1
    assert after.tokens_restored > before.tokens_restored
    assert_idle(engine)


def test_without_it_that_is_computed_again(new_tiny: NewEngine) -> None:
    engine = new_tiny(blocks=10, block_size=16)
    engine.generate(PROMPT, **OPTIONS)
    crowd(engine)
    assert engine.explain(PROMPT).reason == "evicted"
    assert engine.generate(PROMPT, **OPTIONS).usage.cached_tokens < len(PROMPT) - 1


def test_preempted_requests_are_copied_back_instead_of_computed(new_tiny: NewEngine) -> None:
    prompts = [random_ids(seed, 40) for seed in range(6)]
    options = {**OPTIONS, "max_tokens": 30}
    expected = generate_recorded(new_tiny(block_size=16), prompts, **options)
    computed = {}
    for swap_space in (0, "1MiB"):
        engine = new_tiny(blocks=12, block_size=16, swap_space=swap_space)
        assert_same_bits(generate_recorded(engine, prompts, **options), expected)
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.tokens_restored > 0) == bool(swap_space)
        computed[swap_space] = stats.tokens_prefilled
        assert_idle(engine)
    assert computed["1MiB"] < computed[0]


def test_salts_keep_apart_there_too(new_tiny: NewEngine) -> None:
    engine = new_tiny(blocks=10, block_size=16, swap_space="1MiB")
    engine.generate(PROMPT, cache_salt="a", **OPTIONS)
    crowd(engine)
    assert engine.generate(PROMPT, cache_salt="b", **OPTIONS).usage.cached_tokens == 0
    crowd(engine, 200)
    assert engine.generate(PROMPT, cache_salt="a", **OPTIONS).usage.cached_tokens == len(PROMPT) - 1


def test_a_small_one_keeps_what_it_can(new_tiny: NewEngine) -> None:
    """Five blocks: longer sequences are left out, and its own eviction goes on."""
    block = 16 * 2 * 2 * 2 * 16 * 4  # of the tiny model in float32
    engine = new_tiny(blocks=10, block_size=16, swap_space=5 * block)
    assert host(engine).allocator.num_blocks == 5
    for seed in range(12):
        engine.generate(random_ids(seed, 20 + 10 * (seed % 8)), max_tokens=4)
    assert host(engine).evictions > 0
    assert_idle(engine)


def test_memory_first_and_the_disk_for_the_rest(new_tiny: NewEngine, tmp_path: Path) -> None:
    """The head is in one tier, all of it in the next."""
    first = new_tiny(block_size=16, cache_dir=tmp_path)
    expected = generate_recorded(first, [PROMPT], **OPTIONS)
    first.close()
    engine = new_tiny(blocks=10, block_size=16, cache_dir=tmp_path, swap_space="1MiB")
    engine.generate(PROMPT[:40], max_tokens=1)
    crowd(engine)
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    assert engine.stats().tokens_reused - before.tokens_reused == len(PROMPT) - 1
    assert_idle(engine)


def test_one_cap_for_the_pins_of_both(new_tiny: NewEngine) -> None:
    block = 16 * tiny_token_bytes()
    engine = new_tiny(blocks=12, block_size=16, swap_space=40 * block, max_pinned_memory=8 * block)
    other = random_ids(1, 90)  # six blocks
    engine.generate(other, max_tokens=1)
    engine.warm(PROMPT, pin=True)  # five of the pool
    crowd(engine)
    engine.save()
    with pytest.raises(ValueError, match=f"{5 * block:,} bytes are pinned.*needs {6 * block:,} bytes more"):
        engine.pin(other)
    assert engine.unpin(PROMPT)
    assert engine.pin(other) == 90
    stats = engine.stats()
    assert (stats.blocks_pinned, stats.swap_blocks_total) == (6, 40)
    assert stats.swap_blocks_free < 40


def test_a_wrong_size_names_the_option(new_tiny: NewEngine) -> None:
    with pytest.raises(ValueError, match=r"swap_space=1 is not valid: a KV block takes \d+ bytes"):
        new_tiny(swap_space=1)
    with pytest.raises(ValueError, match="swap_space"):
        new_tiny(swap_space=-1)
