"""Calls that start or end together take turns, so that their event loop keeps running.

Many tasks that become ready at once are run in one iteration of the loop, one after the other, each a millisecond or
two, and everybody else waits for all of them. Behind the turnstile as many pass per iteration as fit in a few.
"""

from __future__ import annotations

import asyncio
import time
from weakref import WeakKeyDictionary

_SHARE_S = 0.008  # of one iteration


class _Burst:
    """When the first call of this iteration passed; None before it."""

    begun: float | None = None

    def end(self) -> None:
        self.begun = None


_bursts: WeakKeyDictionary[asyncio.AbstractEventLoop, _Burst] = WeakKeyDictionary()


async def turn() -> None:
    """Wait for this call's turn on the running event loop, in a later iteration: LangChain's own beginning of all the
    calls is over by then, and what a call sets going beside the loop does not take time from it.
    """
    loop = asyncio.get_running_loop()
    burst = _bursts.setdefault(loop, _Burst())
    await asyncio.sleep(0)
    while burst.begun is not None and time.monotonic() - burst.begun > _SHARE_S:
        await asyncio.sleep(0)
    if burst.begun is None:
        burst.begun = time.monotonic()
        loop.call_soon(burst.end)
