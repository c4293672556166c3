"""Contexts longer than the KV pool live in the host tier, and give the bits that they would give in a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine, PromptTooLongError
from foreword.kv.host import CacheStore
from support import (
    assert_idle,
    assert_same_bits,
    generate_recorded,
    random_ids,
    save_tiny_llama,
    tiny_options,
    tiny_token_bytes,
)

pytestmark = pytest.mark.cpu  # in a GPU's host tier nothing lives
NewEngine = Callable[..., Engine]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
POOL = 12  # blocks of 16 tokens
TIER = 64
LONG = random_ids(1, 700)


def tier(blocks: int = TIER, **options: Any) -> dict[str, Any]:
    memory = blocks * 16 * tiny_token_bytes(kv_cache_dtype=options.get("kv_cache_dtype", "auto"))
    return {"blocks": POOL, "swap_space": memory, "max_num_batched_tokens": 100, **options}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_same_bits_as_in_a_large_pool(new_tiny: NewEngine, kernels: str, kv_cache_dtype: str) -> None:
    """Beside short requests that share its beginning, which run in the pool at the same time."""
    options = {"kernels": kernels, "kv_cache_dtype": kv_cache_dtype}
    prompts = [LONG, LONG[:90], LONG[:64] + random_ids(2, 30), LONG[:650] + random_ids(3, 40), random_ids(4, 50)]
    expected = generate_recorded(new_tiny(**options), prompts, **OPTIONS)
    engine = new_tiny(**tier(**options) | {"blocks": 20})
    assert_same_bits(generate_recorded(engine, prompts, **OPTIONS), expected)
    stats = assert_idle(engine)
    assert stats.preemptions == 0
    # the two long ones share a beginning in the tier, the short ones theirs in the pool
    assert stats.tokens_prefilled <= 700 + 40 + 6 + 90 + 30 + 50 + 16
    assert_same_bits(generate_recorded(engine, prompts, **OPTIONS), expected)
    assert engine.stats().tokens_prefilled - stats.tokens_prefilled == len(prompts), "all but one token was cached"


def test_who_outgrows_the_pool_goes_on_in_the_tier(new_tiny: NewEngine) -> None:
    prompts = [random_ids(5, POOL * 16 - 30), random_ids(6, 20)]
    options = {**OPTIONS, "max_tokens": 200}
    expected = generate_recorded(new_tiny(), prompts, **options)
    engine = new_tiny(**tier())
    assert_same_bits(generate_recorded(engine, prompts, **options), expected)
    stats = assert_idle(engine)
    assert stats.preemptions > 0
    assert stats.tokens_prefilled < 2 * sum(map(len, prompts)), "what the pool held was moved, not computed again"


def test_forks_and_preemption_there(new_tiny: NewEngine) -> None:
    """Three completions of one prompt, two long requests that cannot both stay."""
    prompts = [LONG[:300], random_ids(7, 400)]
    options = {**OPTIONS, "max_tokens": 150, "n": 3, "seed": 3, "temperature": 1.0}
    expected = generate_recorded(new_tiny(blocks=512), prompts, **options)
    engine = new_tiny(**tier(blocks=52))
    assert_same_bits(generate_recorded(engine, prompts, **options), expected)
    assert assert_idle(engine).preemptions > 0


def test_a_beginning_in_the_pool_serves_there_too(new_tiny: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_tiny(**tier())
    with monkeypatch.context() as patch:
        patch.setattr(CacheStore, "save", lambda *_: None)  # so that the pool alone has it
        engine.generate(LONG[:150], **OPTIONS)
    assert engine.generate(LONG, **OPTIONS).usage.cached_tokens == 150


def test_a_beginning_there_serves_in_the_pool(new_tiny: NewEngine) -> None:
    engine = new_tiny(**tier())
    engine.generate(LONG, **OPTIONS)
    assert engine.generate(LONG[:100], **OPTIONS).usage.cached_tokens == 99
    assert engine.explain(LONG[:300]).reason == "complete"


def test_it_survives_a_restart(new_tiny: NewEngine, tmp_path: Path) -> None:
    first = new_tiny(**tier(cache_dir=str(tmp_path)))
    expected = generate_recorded(first, [LONG], **OPTIONS)
    first.close()
    engine = new_tiny(**tier(cache_dir=str(tmp_path)))
    assert_same_bits(generate_recorded(engine, [LONG], **OPTIONS), expected)
    assert engine.stats().tokens_reused == len(LONG) - 1
    assert_idle(engine)


def test_salts_keep_apart_there(new_tiny: NewEngine, tmp_path: Path) -> None:
    for salts, cached in ((("a", "b", None, "a"), (0, 0, 0, len(LONG) - 1)), (("a", "c"), (len(LONG) - 1, 0))):
        engine = new_tiny(**tier(blocks=200, cache_dir=str(tmp_path)))  # the second engine has it from the disk
        found = [engine.generate(LONG, cache_salt=salt, **OPTIONS).usage.cached_tokens for salt in salts]
        assert tuple(found) == cached
        engine.close()


def test_pins_hold_there(new_tiny: NewEngine) -> None:
    engine = new_tiny(**tier(max_pinned_memory="1MiB"))
    assert engine.warm(LONG[:320], pin=True).pinned_tokens == 320
    for seed in range(6):
        engine.generate(random_ids(10 + seed, 500), max_tokens=1)
    assert engine.explain(LONG[:320]).reason == "complete"
    assert engine.stats().blocks_pinned == 20
    assert engine.unpin(LONG[:320])
    assert_idle(engine)


def test_a_pin_there_gives_way_to_who_cannot_run_otherwise(new_tiny: NewEngine) -> None:
    engine = new_tiny(**tier(max_pinned_memory="1MiB"))
    engine.warm(LONG[:320], pin=True)
    assert len(engine.generate(random_ids(9, 1000), **OPTIONS).outputs[0].token_ids) == 6
    assert engine.stats().blocks_pinned == 0


def test_longer_than_that_names_the_option(new_tiny: NewEngine) -> None:
    engine = new_tiny(**tier())
    with pytest.raises(PromptTooLongError, match=rf"{TIER * 16 + 1} tokens.*holds {TIER * 16};.*swap_space"):
        engine.generate(random_ids(8, TIER * 16 + 1))
    assert engine.generate(random_ids(8, TIER * 16), max_tokens=5).outputs[0].finish_reason == "length"
    assert_idle(engine)


@pytest.mark.parametrize("tokens", [8192, pytest.param(65_536, marks=pytest.mark.soak)])
def test_a_pool_of_a_quarter_of_the_context(tmp_path: Path, tokens: int) -> None:
    model, prompt = str(save_tiny_llama(tmp_path, positions=tokens)), random_ids(12, tokens - 6)
    with Engine(model, **tiny_options(blocks=tokens // 16)) as engine:
        expected = generate_recorded(engine, [prompt], **OPTIONS)
    memory = (tokens + 16) * tiny_token_bytes()  # a block more: the one that a match ends in is copied
    with Engine(model, **tiny_options(blocks=tokens // 64), swap_space=memory) as engine:
        assert_same_bits(generate_recorded(engine, [prompt], **OPTIONS), expected)
        assert engine.stats().blocks_cached == 0, "nothing of it was in the pool"
        assert_same_bits(generate_recorded(engine, [prompt], **OPTIONS), expected)
        assert engine.stats().tokens_reused == tokens - 7
        assert_idle(engine)
