"""Native async (langchain #35095): coroutines of the engine, not threads, and cancelling one cancels its request."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langchain_foreword import ChatForeword, ForewordLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine, EngineStats


CALLS = 32
TOKENS = 12
"""Of each of many concurrent answers: enough that all of them run at the same time."""


async def _running(engine: Engine) -> None:
    while engine.stats().running == 0:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [ChatForeword, ForewordLLM])
async def test_cancelled_ainvoke_frees_its_blocks(kind: type, engine: Engine, idle: Callable[[], None]) -> None:
    llm = kind(engine=engine, temperature=0, max_tokens=2000, ignore_eos=True)
    task = asyncio.create_task(llm.ainvoke("Count from one to a thousand."))
    await _running(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    idle()


@pytest.mark.parametrize("kind", [ChatForeword, ForewordLLM])
async def test_cancelled_astream_frees_its_blocks(kind: type, engine: Engine, idle: Callable[[], None]) -> None:
    llm = kind(engine=engine, temperature=0, max_tokens=2000, ignore_eos=True)

    async def consume() -> None:
        async for _ in llm.astream("Count from one to a thousand."):
            pass

    task = asyncio.create_task(consume())
    await _running(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    idle()


async def test_concurrent_ainvokes_are_one_batch_without_threads(
    engine: Engine,
    computing_when: Callable[[Callable[[], bool]], None],
    spent: Callable[[], EngineStats],
    idle: Callable[[], None],
    document: str,
) -> None:
    """32 calls are one continuous batch, one that is cancelled frees its blocks, and the event loop keeps turning."""
    llm = ChatForeword(engine=engine, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    scheduler = engine._loop.core.scheduler  # its counters: stats() would wait for the step in progress
    before, turns = {thread.name for thread in threading.enumerate()}, 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    is_gone = False
    # from the arrival of the last until all of them run, and from the cancellation on
    computing_when(lambda: is_gone or len(scheduler.waiting) + len(scheduler.running) == CALLS > len(scheduler.running))
    turning = asyncio.create_task(turn())
    ask = [[SystemMessage(document), HumanMessage(f"Say {number}.")] for number in range(CALLS)]
    tasks = [asyncio.create_task(llm.ainvoke(messages)) for messages in ask]
    while len(scheduler.running) < CALLS:
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.001)
    assert not any(task.done() for task in tasks)
    started = {thread.name for thread in threading.enumerate()} - before
    (cancelled,) = [sequence for sequence in scheduler.running if "Say 7." in engine.decode(sequence.token_ids)]
    assert cancelled.blocks is not None
    tasks[7].cancel()
    while len(scheduler.running) == CALLS:
        await asyncio.sleep(0.001)
    assert cancelled not in scheduler.running
    assert cancelled.blocks is None  # while the others still run
    is_gone = True
    assert [number for number, task in enumerate(tasks) if task.done()] == [7]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    turning.cancel()
    assert isinstance(answers.pop(7), asyncio.CancelledError)
    assert all(answer.usage_metadata["output_tokens"] == TOKENS for answer in answers)
    assert spent().steps <= TOKENS + 10  # and a few for prompts; two rounds would take more
    assert len(started) <= 1  # the engine prepares requests on one; nobody waits on a thread
    assert turns > CALLS
    idle()


async def test_what_is_wrong_with_a_request_is_raised_where_it_is_awaited(engine: Engine) -> None:
    """The engine prepares requests on a thread of its own; errors found there reach the caller."""
    for model in (ChatForeword(engine=engine), ForewordLLM(engine=engine)):
        with pytest.raises(ValueError, match="max_model_len"):
            await model.ainvoke("word " * engine.max_model_len)
        with pytest.raises(ValueError, match="max_model_len"):
            [chunk async for chunk in model.astream("word " * engine.max_model_len)]


def test_calls_from_several_event_loops(engine: Engine) -> None:
    llm = ChatForeword(engine=engine, temperature=0, max_tokens=4)
    texts = [asyncio.run(llm.ainvoke("Say yes.")).text for _ in range(2)]
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(llm.ainvoke("Say yes.")).text)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [texts[0]] * 3
    assert texts[0] == texts[1] == llm.invoke("Say yes.").text
