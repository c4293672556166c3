"""The engine thread, and the channels through which other threads and event loops hear from it."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from foreword.core.errors import EngineClosedError
from foreword.core.outputs import OutputChunk
from foreword.engine.core import EngineCore
from foreword.engine.request_state import ConsumerLeftError

logger = logging.getLogger("foreword")
T = TypeVar("T")


class EngineLoop:
    """Owns the engine thread. Everything that touches the core is a callable run there, between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core: EngineCore | None = core
        self._inbox: deque[Callable[[], Any]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="foreword-engine", daemon=True)
        self._thread.start()

    @property
    def core(self) -> EngineCore:
        """The core. Use it on the engine thread only, that is in what is posted or called."""
        assert self._core is not None, "used after the engine thread ended"
        return self._core

    @property
    def closed(self) -> bool:
        """Whether nothing can be posted any more."""
        return self._closing or self._process != os.getpid()

    def check_process(self) -> None:
        """Raises ``EngineClosedError`` in a forked child. Takes no lock: the fork may have left it locked."""
        if self._process != os.getpid():
            raise EngineClosedError(
                f"this engine belongs to process {self._process}; its thread does not exist in this forked child. "
                "Create the engine in the child, or start children with the 'spawn' method"
            )

    def check_usable(self) -> None:
        """Raises ``EngineClosedError`` where :attr:`closed`."""
        self.check_process()
        if self._failure is not None:
            raise EngineClosedError(f"the engine failed ({self._failure!r}); create a new Engine") from self._failure
        if self._closing:
            raise EngineClosedError("the engine is closed; create a new Engine")

    def post(self, action: Callable[[], Any]) -> None:
        """Have ``action`` run on the engine thread before the next step.

        Raises:
            EngineClosedError: the engine is closed or its thread has died.
        """
        self.check_usable()
        with self._wake:
            self.check_usable()
            self._inbox.append(action)
            self._wake.notify()

    def _nudge(self) -> None:
        """See whether there is something to do, whatever the engine's state."""
        with self._wake:
            self._inbox.append(lambda: None)
            self._wake.notify()

    def call(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the engine thread and wait for its result."""
        if threading.current_thread() is self._thread:
            return action()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future.result()

    def close(self) -> None:
        """Cancel what is live and end the thread. May be called twice; in a forked child there is no thread to end."""
        if self._process != os.getpid():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._join()

    def _join(self) -> None:
        """Wait for the thread through Ctrl-C too: an interpreter that exits under a running step aborts.

        Not on a thread that it waits for itself, where the garbage collector may have found the engine.
        """
        if threading.current_thread().name.startswith("foreword-"):
            return
        interrupt: KeyboardInterrupt | None = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        try:
            self.core.enter_thread(self._nudge)
            while self._take_actions():
                if self.core.has_work:
                    self.core.step()
        except BaseException as error:
            self._fail(error)
        finally:
            self._shut_down()

    def _fail(self, error: BaseException) -> None:
        """A bug of ours. The first one is what everybody is told."""
        logger.error("the engine thread failed", exc_info=error)
        if self._failure is None:
            self._failure = error

    def _take_actions(self) -> bool:
        """Wait for something to do and run what was posted. False once the engine is closing."""
        with self._wake:
            while not (self._inbox or self._closing or self.core.has_work):
                self._wake.wait()
            closing = self._closing
        for _ in range(len(self._inbox)):  # what is posted meanwhile has its turn after the next step
            self._inbox.popleft()()
            self.core.stalled = False
        return not closing

    def _shut_down(self) -> None:
        """Let nobody wait, whatever fails on the way: run what was posted, end what is live."""
        with self._wake:
            self._closing = True
        while self._inbox:
            self._attempt(self._inbox.popleft())
        if self._failure is None:
            self._attempt(self.core.cancel_all)
        if self._failure is not None:
            self.core.abandon(self._failure)
        self._attempt(self.core.close)
        self._core = None  # weights and KV pool go with it, whoever still holds the engine

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except BaseException as error:
            self._fail(error)


class SyncChannel:
    """Chunks for a thread that waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[OutputChunk] = queue.SimpleQueue()
        self.put = self._queue.put
        self.get = self._queue.get


class AsyncChannel:
    """Chunks for a coroutine of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[OutputChunk] = asyncio.Queue()
        self.get = self._queue.get

    def put(self, chunk: OutputChunk) -> None:
        """Called on the engine thread.

        Raises:
            ConsumerLeftError: the event loop is closed, which cancels the request.
        """
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, chunk)
        except RuntimeError as error:
            raise ConsumerLeftError("the event loop is closed") from error
