"""Native async (LangChain 2; L35095): coroutines of the engine, not threads, and cancelling one cancels its request."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from langchain_foreword import ChatForeword, ForewordLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine, EngineStats


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
    engine: Engine, spent: Callable[[], EngineStats]
) -> None:
    llm = ChatForeword(engine=engine, temperature=0, max_tokens=6, ignore_eos=True)
    threads = threading.active_count()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    tasks = [asyncio.create_task(llm.ainvoke(f"Say {number}.")) for number in range(16)]
    await _running(engine)
    assert threading.active_count() == threads
    answers = await asyncio.gather(*tasks)
    ticking.cancel()
    assert len(answers) == 16
    assert spent().steps <= 6 + 8
    assert ticks > 5  # the loop kept running


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
