"""Consumers that raise or have left: they lose their own request, nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from foreword import Engine
from foreword.engine.loop import AsyncChannel
from support import assert_idle, random_ids

from .injection import InjectedError, replaced

TinyEngine = Callable[..., Engine]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def test_a_consumer_that_raises_loses_its_own_request_only(tiny: TinyEngine) -> None:
    """A sink that raises, as a closed event loop's does, cancels its request; the neighbours go on."""
    engine = tiny()
    expected = engine.generate([1, 2, 3], **GREEDY).token_ids
    seen: list[Any] = []

    def broken(chunk: Any) -> None:
        seen.append(chunk)
        raise InjectedError("injected")

    long = engine._client.prepare([[9, 8, 7]], None, {**GREEDY, "max_tokens": 500})
    engine._client.submit(long, broken, stream=True)
    assert engine.generate([1, 2, 3], **GREEDY).token_ids == expected
    assert len(seen) == 1, "a consumer that raised is called no more"
    assert_idle(engine)


def test_a_consumer_that_raises_when_its_completions_are_cancelled(new_tiny: TinyEngine) -> None:
    """The first completion's end ends the second one; none ends twice, and the report counts one request."""
    engine, ended = new_tiny(), threading.Event()
    finished: list[Any] = []

    def put(chunk: Any) -> None:
        if chunk.finish_reason is not None:
            ended.set()
            raise InjectedError("injected into a consumer")

    core = engine._loop.core
    with replaced(
        core.scheduler, "finish", lambda original: lambda *a, **k: (finished.append(a[0]), original(*a, **k))
    ):
        batch = engine._client.prepare([random_ids(1, 20)], None, {**GREEDY, "max_tokens": 500, "n": 2})
        [request] = engine._client.submit(batch, put, stream=True)
        while engine.stats().running < 2:
            pass
        engine._loop.call(lambda: core.cancel([request.request_id]))
    assert ended.is_set()
    assert len(finished) == len(set(map(id, finished))) == 2
    assert engine.cache_report().requests == 1
    assert_idle(engine)


def test_an_event_loop_that_ended_cancels_its_requests(tiny: TinyEngine, caplog: Any) -> None:
    """A stream whose event loop is gone: the engine notices at the next piece, frees the blocks and logs nothing."""
    engine = tiny()
    before = engine.stats().tokens_generated

    async def channel() -> AsyncChannel:
        return AsyncChannel()

    lost = asyncio.run(channel())
    engine._client.submit(engine._client.prepare([[1, 2]], None, {**GREEDY, "max_tokens": None}), lost.put, stream=True)
    while (stats := engine.stats()).running + stats.waiting:
        pass
    assert stats.tokens_generated - before == 1
    assert_idle(engine)
    assert not caplog.records


def test_a_consumer_that_leaves_is_no_error(tiny: TinyEngine, caplog: Any) -> None:
    """Cancelling a task whose event loop ends at once is ordinary: nothing is logged, the blocks are back."""
    engine = tiny()

    async def leave() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.agenerate([1, 2], **{**GREEDY, "max_tokens": None}), 0.05)

    asyncio.run(leave())
    assert_idle(engine)
    assert not caplog.records
