"""Time limits and second attempts of a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from foreword import RequestFailedError

T = TypeVar("T")


class Limits(NamedTuple):
    """How long a call may take, and how often it is begun again.

    Attributes:
        timeout: seconds until the answer must be complete; None waits as long as it takes.
        retries: further attempts when the computation fails; of a stream only while nothing was shown.
    """

    timeout: float | None
    retries: int

    @classmethod
    def checked(cls, timeout: Any, retries: Any) -> Limits:
        """The limits of a call.

        Raises:
            ValueError: `timeout` is no number above 0, or `retries` no count.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
            raise ValueError(f"timeout={timeout!r}: give seconds above 0, or None")
        if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
            raise ValueError(f"max_retries={retries!r}: give an integer of at least 0")
        return cls(timeout, retries or 0)


def result(limits: Limits, call: Callable[[], T], acall: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of `call`; where it must end in time that of `acall`, which does the same and can be cancelled."""
    for _ in range(limits.retries):
        try:
            return _result(limits.timeout, call, acall)
        except RequestFailedError:
            continue
    return _result(limits.timeout, call, acall)


def _result(timeout: float | None, call: Callable[[], T], acall: Callable[[], Coroutine[Any, Any, T]]) -> T:
    if timeout is None:
        return call()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(_within(timeout, acall()))
    with ThreadPoolExecutor(1, "foreword-wait") as pool:  # this thread's event loop is the one that called us
        return pool.submit(_run, _within(timeout, acall())).result()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, which would also take the thread's current event loop away."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)


async def aresult(limits: Limits, acall: Callable[[], Awaitable[T]]) -> T:
    """As `result`, for asyncio."""
    for _ in range(limits.retries):
        try:
            return await _within(limits.timeout, acall())
        except RequestFailedError:
            continue
    return await _within(limits.timeout, acall())


def pieces(
    limits: Limits, make: Callable[[], Generator[T, None, None]], amake: Callable[[], AsyncGenerator[T, None]]
) -> Generator[T, None, None]:
    """The pieces of `make()`; where they must end in time, those of `amake()`, whose waiting can be ended."""
    if limits.timeout is not None:
        yield from _timed(apieces(limits, amake))
        return
    retries = limits.retries
    while True:
        begun, source = False, make()
        try:
            for piece in source:
                begun = True
                yield piece
            return
        except RequestFailedError:
            if begun or not retries:
                raise
            retries -= 1
        finally:
            source.close()  # cancels the request


def _timed(source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """The pieces of `source`, each waited for on a loop and a thread of their own: this one's may be running."""
    with ThreadPoolExecutor(1, "foreword-wait") as pool:
        loop = asyncio.new_event_loop()
        try:
            while True:
                try:
                    yield pool.submit(loop.run_until_complete, anext(source)).result()
                except StopAsyncIteration:
                    return
        finally:
            pool.submit(loop.run_until_complete, source.aclose()).result()
            loop.close()


async def apieces(limits: Limits, make: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """As `pieces`, for asyncio, where waiting for a piece ends with the time."""
    start, retries = time.monotonic(), limits.retries
    while True:
        begun, source = False, make()
        try:
            while True:
                try:
                    yield await _next(source, limits.timeout, start)
                except StopAsyncIteration:
                    return
                begun = True
        except RequestFailedError:
            if begun or not retries:
                raise
            retries -= 1
        finally:
            await source.aclose()


async def _next(source: AsyncGenerator[T, None], timeout: float | None, start: float) -> T:
    if timeout is None:
        return await anext(source)
    return await _within(timeout, anext(source), since=start)


async def _within(timeout: float | None, answer: Awaitable[T], since: float | None = None) -> T:
    """The result of `answer`, which is cancelled `timeout` seconds after `since`."""
    if timeout is None:
        return await answer
    left = timeout if since is None else timeout - (time.monotonic() - since)
    limit = asyncio.timeout(left)
    try:
        async with limit:
            return await answer
    except TimeoutError:
        if limit.expired():
            raise _late(timeout) from None
        raise


def _late(timeout: float) -> TimeoutError:
    return TimeoutError(f"the answer was not complete after timeout={timeout:g} seconds; its request was cancelled")
