"""The host tier of a device with memory of its own: a second storage, to which blocks are copied and from which they
come back to the bit; nothing lives there. Played on the CPU, whose kernels do not care where a pool lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine, PromptTooLongError
from foreword.engine import storage
from support import assert_idle, assert_same_bits, generate_recorded, random_ids, tiny_token_bytes

NewEngine = Callable[..., Engine]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPT = random_ids(5, 77)
BLOCK = 16 * tiny_token_bytes()


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "has_own_memory", lambda _: True)


def crowd(engine: Engine) -> None:
    """Fill the pool with other prompts."""
    for seed in range(100, 104):
        engine.generate(random_ids(seed, 90), max_tokens=4)


@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_what_the_pool_evicts_comes_back(new_tiny: NewEngine, options: dict[str, Any]) -> None:
    engine = new_tiny(blocks=10, swap_space=40 * BLOCK, **options)
    expected = generate_recorded(engine, [PROMPT], **OPTIONS)
    crowd(engine)
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    after = assert_idle(engine)
    assert after.tokens_reused - before.tokens_reused == len(PROMPT) - 1
    assert after.tokens_restored > before.tokens_restored
    assert engine._loop.core.runner.pool.num_blocks == 10, "the tier's blocks are meant to lie elsewhere"
    assert after.swap_blocks_total > after.swap_blocks_free


def test_preempted_requests_are_copied_back(new_tiny: NewEngine) -> None:
    prompts = [random_ids(seed, 40) for seed in range(6)]
    options = {**OPTIONS, "max_tokens": 30}
    expected = generate_recorded(new_tiny(), prompts, **options)
    engine = new_tiny(blocks=12, swap_space=40 * BLOCK)
    assert_same_bits(generate_recorded(engine, prompts, **options), expected)
    stats = assert_idle(engine)
    assert stats.preemptions > 0
    assert stats.tokens_restored > 0


def test_nothing_is_longer_than_the_pool(new_tiny: NewEngine) -> None:
    """However much there is in main memory; and it says so."""
    engine = new_tiny(blocks=10, swap_space=40 * BLOCK)
    with pytest.raises(
        PromptTooLongError, match=r"161 tokens.*holds 160; shorten it, or give a larger kv_cache_memory$"
    ):
        engine.generate(random_ids(1, 161))
    output = engine.generate(random_ids(1, 150), temperature=0.0, max_tokens=50, ignore_eos=True)
    assert (output.outputs[0].finish_reason, output.usage.completion_tokens) == ("length", 11)
    assert_idle(engine)


def test_pins_there_and_resetting(new_tiny: NewEngine) -> None:
    engine = new_tiny(blocks=10, swap_space=40 * BLOCK)
    engine.generate(PROMPT, max_tokens=1)
    crowd(engine)
    engine.save()
    assert engine.pin(PROMPT) == len(PROMPT)
    engine.reset_prefix_cache()
    assert engine.explain(PROMPT).matched_tokens >= len(PROMPT) - 1
    assert engine.unpin(PROMPT)
    engine.reset_prefix_cache()
    assert engine.explain(PROMPT).matched_tokens == 0
    stats = assert_idle(engine)
    assert stats.swap_blocks_free == stats.swap_blocks_total == 40


def test_memory_first_and_the_disk_for_the_rest(new_tiny: NewEngine, tmp_path: Path) -> None:
    first = new_tiny(cache_dir=tmp_path)
    expected = generate_recorded(first, [PROMPT], **OPTIONS)
    first.close()
    engine = new_tiny(blocks=10, cache_dir=tmp_path, swap_space=40 * BLOCK)
    engine.generate(PROMPT[:40], max_tokens=1)
    crowd(engine)
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    assert assert_idle(engine).tokens_reused - before.tokens_reused == len(PROMPT) - 1


def test_more_than_there_is(new_tiny: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_memory", lambda: 39 * BLOCK)
    with pytest.raises(ValueError, match=rf"swap_space={40 * BLOCK}.*only {39 * BLOCK} bytes of main memory are free"):
        new_tiny(swap_space=40 * BLOCK)


def test_transfers_begin_on_the_engine_thread_and_run_on_others(
    new_tiny: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind what is settled when the engine thread begins one; it is entered once, on a lane."""
    engine = new_tiny(blocks=10, swap_space=40 * BLOCK)
    ops, begun, entered = engine._loop.core.runner.ops, list[str](), list[str]()

    class Beside:
        def __init__(self) -> None:
            begun.append(threading.current_thread().name)
            self.times = 0

        def __enter__(self) -> None:
            self.times += 1
            assert self.times == 1
            entered.append(threading.current_thread().name.rpartition("_")[0])

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(ops, "aside", Beside)
    engine.generate(PROMPT, **OPTIONS)
    crowd(engine)
    engine.generate(PROMPT, **OPTIONS)
    assert_idle(engine)
    assert set(begun) == {engine._loop._thread.name}
    assert set(entered) == {"foreword-tiers-up", "foreword-tiers-down"}
