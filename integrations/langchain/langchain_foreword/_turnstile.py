"""Calls that start or end together take turns, so that their event loop keeps running.

Many tasks that become ready at once are run in one iteration of the loop, one after the other, each a millisecond or
two, and everybody else waits for all of them. Behind the turnstile they pass one per iteration.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def turn() -> None:
    """Wait for this call's turn on the running event loop."""
    lock = _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        await asyncio.sleep(0)
