"""Many threads, many tasks, many that give up: the results of serial calls, and every block comes back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from foreword import Engine
from foreword.engine import client
from foreword.engine.loop import SyncChannel
from support import assert_idle, random_ids

TinyEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"temperature": 0.0, "max_tokens": None, "ignore_eos": True}
SHARED = random_ids(99, 50)
PROMPTS = [SHARED[: 7 * (seed % 8)] + random_ids(seed, 1 + seed % 13) for seed in range(100)]


@pytest.fixture(scope="module", params=[256, 40], ids=["roomy", "tight"])
def engine(request: pytest.FixtureRequest, tiny: TinyEngine) -> Engine:
    """With memory for all, and with so little that requests wait and are preempted."""
    return tiny(blocks=request.param, max_num_seqs=24, block_size=8)


@pytest.fixture(scope="module")
def serial(tiny: TinyEngine) -> list[list[int]]:
    """What each prompt gives when called alone, one after the other, without a cache."""
    engine = tiny(enable_prefix_caching=False)
    return [engine.generate(prompt, **GREEDY).token_ids for prompt in PROMPTS]


def test_32_threads_give_the_serial_results(engine: Engine, serial: list[list[int]]) -> None:
    """Calls and streams from 32 threads at once: bit-equal token ids."""

    def call(number: int) -> list[int]:
        if number % 3:
            return engine.generate(PROMPTS[number], **GREEDY).token_ids
        chunks = list(engine.stream(PROMPTS[number], **GREEDY))
        return [token for chunk in chunks for token in chunk.token_ids]

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(call, range(100))) == serial
    assert_idle(engine)


async def test_100_tasks_give_the_serial_results(engine: Engine, serial: list[list[int]]) -> None:
    """Calls and streams from 100 asyncio tasks at once: bit-equal token ids."""

    async def call(number: int) -> list[int]:
        if number % 3:
            return (await engine.agenerate(PROMPTS[number], **GREEDY)).token_ids
        return [token async for chunk in engine.astream(PROMPTS[number], **GREEDY) for token in chunk.token_ids]

    assert await asyncio.gather(*map(call, range(100))) == serial
    assert_idle(engine)


def test_threads_and_event_loops_together(engine: Engine, serial: list[list[int]]) -> None:
    """Several event loops, threads and a batch call share the engine."""
    results: dict[int, list[int]] = {}

    def loop(numbers: range) -> None:
        async def run() -> None:
            outputs = await asyncio.gather(*(engine.agenerate(PROMPTS[n], **GREEDY) for n in numbers))
            results.update({n: output.token_ids for n, output in zip(numbers, outputs, strict=True)})

        asyncio.run(run())

    def plain(numbers: range) -> None:
        results.update({n: engine.generate(PROMPTS[n], **GREEDY).token_ids for n in numbers})

    def batch(numbers: range) -> None:
        outputs = engine.generate([PROMPTS[n] for n in numbers], **GREEDY)
        results.update({n: output.token_ids for n, output in zip(numbers, outputs, strict=True)})

    work = [(loop, range(25)), (loop, range(25, 50)), (plain, range(50, 60)), (batch, range(60, 100))]
    threads = [threading.Thread(target=target, args=(numbers,)) for target, numbers in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[n] for n in range(100)] == serial
    assert_idle(engine)


def test_closed_streams_return_every_block(engine: Engine) -> None:
    """Streams closed before, at or after their first piece cancel at the next step."""
    engine.reset_prefix_cache()
    baseline = engine.stats()
    for taken in (0, 1, 2, 5):
        streams = [engine.stream(PROMPTS[n], **{**ENDLESS, "max_tokens": 40}) for n in range(20)]
        for stream in streams:
            for _ in range(taken):
                next(stream)
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
    engine.reset_prefix_cache()
    assert assert_idle(engine).blocks_free == baseline.blocks_free == baseline.blocks_total


def test_a_consumer_that_breaks_off_frees_its_blocks(engine: Engine) -> None:
    """Leaving a for loop, by break or by an error, ends the request."""
    for chunk in engine.stream(PROMPTS[3], **ENDLESS):
        if chunk.token_ids:
            break

    def fail() -> None:
        for _ in engine.stream(PROMPTS[4], **ENDLESS):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    del chunk
    assert_idle(engine)


def test_an_interrupted_call_frees_its_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a batch is waited for cancels all of it."""

    class Interrupted(SyncChannel):
        def __init__(self) -> None:
            super().__init__()
            self.get = self.interrupt  # type: ignore[assignment]

        def interrupt(self) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client, "SyncChannel", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:3], **ENDLESS)
    assert_idle(engine)


async def test_cancelled_tasks_return_every_block(engine: Engine) -> None:
    """Tasks cancelled at random moments, waiting or running: every block comes back."""
    rng = random.Random(0)
    engine.reset_prefix_cache()

    async def consume(number: int) -> None:
        async for _ in engine.astream(PROMPTS[number], **ENDLESS):
            pass

    tasks = [asyncio.create_task(consume(n)) for n in range(30)]
    tasks += [asyncio.create_task(engine.agenerate(PROMPTS[n : n + 3], **ENDLESS)) for n in range(30, 60, 3)]
    while tasks:
        task = tasks.pop(rng.randrange(len(tasks)))
        await asyncio.sleep(rng.choice([0, 0, 0.002]))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
    engine.reset_prefix_cache()
    stats = assert_idle(engine)
    assert stats.blocks_free == stats.blocks_total


@pytest.mark.parametrize("moment", ["tokenizing", "submitted"])
async def test_a_task_cancelled_before_its_request_is_known(
    new_tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its prompt is prepared on another thread: nothing is submitted behind the task's back, or it is taken back."""
    engine = new_tiny()
    begun, may_go_on = threading.Event(), threading.Event()
    name = {"tokenizing": "_token_ids", "submitted": "submit"}[moment]
    original = getattr(engine._client, name)

    def slow(*args: Any, **options: Any) -> Any:
        result = original(*args, **options) if moment == "submitted" else None
        begun.set()
        assert may_go_on.wait(10)
        return result or original(*args, **options)

    monkeypatch.setattr(engine._client, name, slow)
    task = asyncio.create_task(engine.agenerate(PROMPTS[7], **ENDLESS))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    threading.Timer(0.05, may_go_on.set).start()
    with pytest.raises(asyncio.CancelledError):
        await task
    monkeypatch.undo()
    assert len((await engine.agenerate(PROMPTS[8], **GREEDY)).token_ids) == 12  # its turn comes after the other's
    assert_idle(engine)
    assert engine._client._numbers.__reduce__()[1][0] == (1 if moment == "tokenizing" else 2)


@pytest.mark.parametrize("how", ["coroutine", "loop"])
def test_who_goes_while_the_prompt_is_prepared_submits_nothing(new_tiny: TinyEngine, how: str) -> None:
    """A coroutine that is closed, and one whose event loop is, are never told that they were cancelled."""
    engine = new_tiny()
    may_go_on = threading.Event()
    engine._client._preparing.submit(may_go_on.wait, 10)

    async def leave() -> Any:
        call = engine.agenerate(PROMPTS[7], **ENDLESS)
        call.send(None)
        if how == "coroutine":
            call.close()
        return call

    call = asyncio.run(leave())
    may_go_on.set()
    engine._client._preparing.submit(int).result(timeout=10)  # its turn comes after the call's
    assert engine._client._numbers.__reduce__()[1][0] == 0
    call.close()
    assert_idle(engine)


async def test_closing_an_async_stream_cancels(engine: Engine) -> None:
    """aclose() in the middle of a stream ends the request."""
    stream = engine.astream(PROMPTS[1], **ENDLESS)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert_idle(engine)


def test_an_unstarted_stream_costs_nothing(engine: Engine) -> None:
    """A stream nobody reads is not submitted: no step, no block, no queue entry."""
    before = engine.stats()
    streams = [engine.stream(PROMPTS[n], **ENDLESS) for n in range(10)]
    streams.append(engine.astream(PROMPTS[10], **ENDLESS))  # type: ignore[arg-type]
    assert engine.stats() == before
    del streams
    assert engine.stats() == before


def test_cancelled_n_completions_return_every_block(engine: Engine) -> None:
    """Cancelling a request with n > 1 ends all of them, forked, waiting or running."""
    for taken in (1, 3, 9):
        stream = engine.stream(PROMPTS[9], n=6, **ENDLESS)
        for _ in range(taken):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert_idle(engine)


def test_streams_add_up_to_the_output(engine: Engine) -> None:
    """The pieces of a stream are the output: texts, tokens, log-probabilities, per completion; usage at the end."""
    chunks = list(engine.stream(PROMPTS[5], n=3, seed=1, max_tokens=9, ignore_eos=True, logprobs=2))
    final = chunks[-1].output
    assert final is not None
    assert [chunk.output is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    for completion in final.outputs:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert "".join(chunk.text for chunk in mine) == completion.text
        assert [token for chunk in mine for token in chunk.token_ids] == completion.token_ids
        assert [entry for chunk in mine for entry in chunk.logprobs or []] == completion.logprobs
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
    assert chunks[-1].usage == final.usage
    assert final.usage.completion_tokens == 27


def test_random_clients_leave_the_engine_clean(engine: Engine, serial: list[list[int]]) -> None:
    """Threads that generate, stream, give up, ask for counters and reset the cache, all at once."""

    def act(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            number = rng.randrange(100)
            match rng.randrange(5):
                case 0:
                    assert engine.generate(PROMPTS[number], **GREEDY).token_ids == serial[number]
                case 1:
                    stream = engine.stream(PROMPTS[number], **ENDLESS)
                    for _ in range(rng.randint(0, 4)):
                        next(stream)
                    stream.close()  # type: ignore[attr-defined]
                case 2:
                    engine.reset_prefix_cache()
                    engine.check_integrity()
                case 3:
                    outputs = engine.generate([PROMPTS[number]] * 3, n=2, **GREEDY)
                    assert all(c.token_ids == serial[number] for output in outputs for c in output.outputs)
                case 4:
                    stats = engine.stats()
                    assert stats.blocks_free + stats.blocks_held + stats.blocks_cached == stats.blocks_total

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(act, range(16)))
    assert_idle(engine)


def test_the_real_model_under_32_threads(bf16_engine: Engine) -> None:
    """On the real model, 32 threads asking at once get the serial answers."""
    questions = [f"What is {n} plus {n}?" for n in range(8)] * 4
    messages = [[{"role": "user", "content": question}] for question in questions]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    serial = {q: bf16_engine.chat(m, **options).token_ids for q, m in zip(questions[:8], messages, strict=False)}
    bf16_engine.reset_prefix_cache()
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda m: bf16_engine.chat(m, **options).token_ids, messages))
    assert answers == [serial[question] for question in questions]
    assert_idle(bf16_engine)
