"""Preparing requests off the event loop.

Rendering and tokenizing a long prompt takes milliseconds, compiling a new grammar more. Many calls that start together
would hold up their event loop for as long as all of that takes; so it is done on one thread beside it. Waiting for an
answer needs no thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from foreword import OutputChunk, RequestOutput

T = TypeVar("T")

_lock = threading.Lock()
_pool: tuple[int, ThreadPoolExecutor] | None = None  # with its process: a forked child has no such thread


async def off_loop(function: Callable[[], T]) -> T:
    """The result of `function`, called on the preparing thread.

    Not on the loop's own pool: its threads may all be waiting for calls like the one that is prepared.
    """
    return await asyncio.get_running_loop().run_in_executor(_executor(), function)


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid():
            _pool = os.getpid(), ThreadPoolExecutor(1, "foreword-prepare")
        return _pool[1]


async def apieces_of(make: Callable[[], AsyncGenerator[OutputChunk, None]]) -> AsyncGenerator[OutputChunk, None]:
    """The pieces of `make()`, a stream of the engine that is prepared off the loop. Closing it cancels the request."""
    pieces = await off_loop(make)
    try:
        async for piece in pieces:
            yield piece
    finally:
        await pieces.aclose()


async def aoutput_of(make: Callable[[], AsyncGenerator[OutputChunk, None]]) -> RequestOutput:
    """The whole output of `make()`, as of `apieces_of`. Cancelling it cancels the request."""
    output = None
    pieces = await off_loop(make)
    try:
        async for piece in pieces:
            output = piece.output
    finally:
        await pieces.aclose()
    assert output is not None, "a stream ended without its last chunk"
    return output
