"""Copies between the pool and its tiers run beside the model: who waits for them, and what holds blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from foreword import Engine, EngineClosedError
from foreword.kv import tier as tier_module
from foreword.kv.tier import Tier
from foreword.kv.tiers import Lanes
from support import assert_idle, assert_same_bits, generate_recorded, random_ids, tiny_token_bytes

NewEngine = Callable[..., Engine]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPT = random_ids(5, 77)
IS_WORTH = Tier.is_worth


class Gate(ThreadPoolExecutor):
    """Lets copies wait while it is shut."""

    def __init__(self) -> None:
        super().__init__(1, "foreword-tiers")
        self.open = threading.Event()
        self.open.set()
        self.submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1

        def run() -> Any:
            assert self.open.wait(60)
            return fn(*args, **kwargs)

        return super().submit(run)


def later(engine: Engine, prompt: list[int], **options: Any) -> Future[Any]:
    """Generate in a thread of its own."""
    future: Future[Any] = Future()
    threading.Thread(target=lambda: future.set_result(engine.generate(prompt, **options)), daemon=True).start()
    return future


def wait_for(engine: Engine, waiting: int) -> None:
    """Until so many requests wait, and the engine thread has nothing to do."""
    deadline = time.monotonic() + 30
    core = engine._loop.core
    while engine.stats().waiting != waiting or core.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def gated(new_tiny: NewEngine) -> Iterator[Callable[..., tuple[Engine, Gate]]]:
    gates = []

    def make(*, both: bool = True, **options: Any) -> tuple[Engine, Gate]:
        engine = new_tiny(**{"block_size": 16, "swap_space": "1MiB", **options})
        gate = Gate()
        gates.append(gate)
        down = gate if both else ThreadPoolExecutor(1)
        for home in engine._loop.core.scheduler.homes:
            home._lanes = Lanes(gate, down, threading.Event())
        return engine, gate

    yield make
    for gate in gates:
        gate.open.set()


def evict_all(engine: Engine) -> None:
    """Empty the pool, and leave the tiers what they have."""
    engine.save()

    def evict() -> None:
        cache = engine._loop.core.scheduler.cache
        cache._evict(cache.allocator.num_evictable)

    engine._loop.call(evict)
    assert engine.stats().blocks_cached == 0


def test_others_go_on_while_a_prefix_is_fetched(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    engine, gate = gated(blocks=24)
    expected = generate_recorded(engine, [PROMPT], **OPTIONS)
    evict_all(engine)
    gate.open.clear()
    waiting = later(engine, PROMPT, **OPTIONS)
    other = engine.generate(random_ids(9, 30), **OPTIONS)  # begins and ends meanwhile
    assert len(other.outputs[0].token_ids) == 12
    assert not waiting.done()
    steps = engine.stats().steps
    wait_for(engine, 1)
    assert engine.stats().steps == steps, "nothing is computed while all wait for a copy"
    gate.open.set()
    output = waiting.result()
    assert output.usage.cached_tokens == len(PROMPT) - 1
    assert output.outputs[0].token_ids == expected[0][0]
    assert_idle(engine)


def test_requests_that_share_a_prefix_fetch_it_once(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    engine, gate = gated(blocks=64)
    engine.generate(PROMPT, **OPTIONS)
    evict_all(engine)
    before, restored = gate.submitted, engine.stats().tokens_restored
    gate.open.clear()
    handles = [later(engine, PROMPT[:64] + random_ids(seed, 20), **OPTIONS) for seed in range(5)]
    wait_for(engine, 5)
    assert gate.submitted == before + 1
    gate.open.set()
    assert [handle.result().usage.cached_tokens for handle in handles] == [64] * 5
    assert engine.stats().tokens_restored - restored == 64
    assert_idle(engine)


def test_a_request_cancelled_meanwhile_leaves_at_once(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    """What was on its way arrives all the same, and serves the next."""
    engine, gate = gated(blocks=24)
    engine.generate(PROMPT, **OPTIONS)
    evict_all(engine)
    gate.open.clear()

    async def leave() -> None:
        task = asyncio.create_task(engine.agenerate(PROMPT, **OPTIONS))
        await asyncio.to_thread(wait_for, engine, 1)
        task.cancel()
        await asyncio.to_thread(wait_for, engine, 0)

    asyncio.run(leave())
    gate.open.set()
    assert_idle(engine)
    before = engine.stats().tokens_restored
    assert engine.generate(PROMPT, **OPTIONS).usage.cached_tokens == len(PROMPT) - 1
    assert engine.stats().tokens_restored == before


def test_blocks_on_their_way_down_are_not_given_away(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    """A pool full of them: who needs room waits, and nothing that is copied changes under the copy."""
    engine, gate = gated(blocks=10)
    expected = generate_recorded(engine, [random_ids(1, 150)], **{**OPTIONS, "max_tokens": 1})
    engine.reset_prefix_cache()
    gate.open.clear()
    engine.generate(random_ids(1, 150), **{**OPTIONS, "max_tokens": 1})
    waiting = later(engine, random_ids(2, 150), max_tokens=1)
    wait_for(engine, 1)
    gate.open.set()
    waiting.result()
    evict_all(engine)
    before = engine.stats().tokens_restored
    assert_same_bits(generate_recorded(engine, [random_ids(1, 150)], **{**OPTIONS, "max_tokens": 1}), expected)
    assert engine.stats().tokens_restored - before == 149
    assert_idle(engine)


def test_who_runs_waits_for_them_rather_than_preempt(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    engine, gate = gated(blocks=10)
    gate.open.clear()
    engine.generate(random_ids(1, 70), max_tokens=1)  # five blocks, held by the copy
    growing = later(engine, random_ids(2, 70), **{**OPTIONS, "max_tokens": 40})
    opener = threading.Timer(0.2, gate.open.set)  # the engine thread waits, and can be asked nothing
    opener.start()
    assert len(growing.result().outputs[0].token_ids) == 40
    assert engine.stats().preemptions == 0
    opener.join()
    assert_idle(engine)


def test_close_waits_for_what_is_on_its_way(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    engine, gate = gated(blocks=24)
    gate.open.clear()
    engine.generate(PROMPT, **OPTIONS)
    threading.Timer(0.1, gate.open.set).start()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.stats()


def test_a_reset_forgets_what_is_on_its_way(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    engine, gate = gated(blocks=24)
    gate.open.clear()
    engine.generate(PROMPT, **OPTIONS)
    threading.Timer(0.1, gate.open.set).start()
    engine.reset_prefix_cache()
    assert engine.generate(PROMPT, **OPTIONS).usage.cached_tokens == 0


def test_a_tier_slower_than_computing_is_left_and_tried_again(
    new_tiny: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tier, "is_worth", IS_WORTH)
    monkeypatch.setattr(tier_module, "_REFUSALS", 3)
    engine = new_tiny(blocks=64, block_size=16, swap_space="1MiB")
    engine.generate(PROMPT, **OPTIONS)
    scheduler = engine._loop.core.scheduler
    slow: Any = scheduler.cache._tiers[0]
    cached = []
    for _ in range(4):
        evict_all(engine)
        slow._speed, scheduler.prefill_speed = 99.0, 200.0
        cached.append(engine.generate(PROMPT, **{**OPTIONS, "max_tokens": 1}).usage.cached_tokens)
    assert cached == [0, 0, 76, 0]
    slow._speed = 101.0  # others compute meanwhile: half the speed is worth it
    scheduler.prefill_speed = 200.0
    evict_all(engine)
    assert engine.generate(PROMPT, **{**OPTIONS, "max_tokens": 1}).usage.cached_tokens == 76


def test_speeds_are_measured(new_tiny: NewEngine) -> None:
    engine = new_tiny(blocks=64, block_size=16, swap_space="1MiB")
    engine.generate(PROMPT, **OPTIONS)
    evict_all(engine)
    engine.generate(PROMPT, **OPTIONS)
    speed = engine._loop.core.scheduler.cache._tiers[0]._speed
    assert speed is not None
    assert speed > 0
    assert engine.stats().prefill_tokens_per_s is not None


def test_what_goes_down_does_not_wait_for_what_comes_up(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    """A pool that only just holds both: others are computed, saved and let go of while a prefix is on its way."""
    engine, gate = gated(both=False, blocks=12)
    engine.generate(PROMPT, **OPTIONS)
    evict_all(engine)
    gate.open.clear()
    waiting = later(engine, PROMPT, **OPTIONS)
    wait_for(engine, 1)
    for seed in range(4):
        engine.generate(random_ids(seed, 80), max_tokens=2)
    assert not waiting.done()
    gate.open.set()
    assert waiting.result().usage.cached_tokens == len(PROMPT) - 1
    assert_idle(engine)


def test_nobody_waits_for_a_prefix_that_is_mostly_not_his(
    gated: Callable[..., tuple[Engine, Gate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for somebody else's copy, nor for a little of his own behind it; and who waits takes no seat."""
    monkeypatch.setattr(Tier, "is_worth", IS_WORTH)
    engine, gate = gated(blocks=64, max_num_seqs=1)
    engine.generate(PROMPT, **OPTIONS)
    evict_all(engine)
    gate.open.clear()
    waiting = later(engine, PROMPT, **OPTIONS)
    wait_for(engine, 1)
    scheduler: Any = engine._loop.core.scheduler
    scheduler.prefill_speed = scheduler.cache._tiers[0]._speed = 1000.0
    assert engine.generate(PROMPT[:3] + random_ids(8, 60), **OPTIONS).usage.cached_tokens == 0
    assert not waiting.done()
    gate.open.set()
    assert waiting.result().usage.cached_tokens == len(PROMPT) - 1


def test_pins_of_the_host_tier_stay_while_its_blocks_are_copied(gated: Callable[..., tuple[Engine, Gate]]) -> None:
    engine, gate = gated(blocks=10, swap_space=40 * 16 * tiny_token_bytes(), max_pinned_memory="1MiB")
    engine.warm(random_ids(1, 320), pin=True)
    engine.generate(PROMPT, **OPTIONS)
    evict_all(engine)
    gate.open.clear()
    short = later(engine, PROMPT, **OPTIONS)  # holds blocks of both while it is copied
    wait_for(engine, 1)
    long = later(engine, random_ids(2, 300), **OPTIONS)
    wait_for(engine, 2)
    assert engine.stats().blocks_pinned == 20
    gate.open.set()
    short.result()
    long.result()
    assert engine.unpin(random_ids(1, 320)), "the room that the copies gave back was enough"
    assert_idle(engine)
