"""The engine thread ends, by a bug of ours or because nobody needs it: nobody is left waiting, nothing is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from foreword import Engine, EngineClosedError, RequestFailedError
from support import random_ids

from .injection import InjectedError

TinyEngine = Callable[..., Engine]


def test_the_death_of_the_engine_thread_leaves_nobody_waiting(new_tiny: TinyEngine) -> None:
    """A bug in the scheduler itself: all callers get an error with the cause, later ones EngineClosedError."""
    engine = new_tiny(max_num_seqs=2)
    errors: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            engine.generate(random_ids(seed, 4), max_tokens=None, ignore_eos=True)
        except Exception as error:
            errors.append(error)

    stream = engine.stream([1], max_tokens=None, ignore_eos=True)
    next(stream)
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()

    def die(*_: Any) -> None:
        raise InjectedError("injected")

    engine._loop.core.scheduler.schedule = die  # type: ignore[method-assign]
    with pytest.raises(RequestFailedError) as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, InjectedError)
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(errors) == 5
    assert all(isinstance(error, (RequestFailedError, EngineClosedError)) for error in errors)
    with pytest.raises(EngineClosedError):
        engine.generate([1])
    with pytest.raises(EngineClosedError):
        engine.stats()
    engine.close()


def test_an_action_that_raises_leaves_nobody_waiting(new_tiny: TinyEngine) -> None:
    """A bug in one posted action ends the engine; what was posted behind it gets its answer."""
    engine = new_tiny()
    hold = threading.Event()
    engine._loop.post(hold.wait)
    engine._loop.post(lambda: 1 // 0)
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(engine.generate([1], max_tokens=1))
        except (EngineClosedError, RequestFailedError) as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    hold.set()
    for thread in threads:
        thread.join(timeout=60)
    assert len(answers) == 3
    assert engine.closed
    with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
        engine.generate([1])


def test_a_forgotten_engine_ends_its_thread(tiny_dir: Any) -> None:
    """An engine that nobody refers to is collected, and its thread ends."""
    from support import tiny_options

    engine = Engine(str(tiny_dir), **tiny_options())
    engine.generate([1], max_tokens=2)
    list(engine.stream([1], max_tokens=2))
    thread, gone = engine._loop._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_close_frees_weights_and_pool(tiny_dir: Any) -> None:
    """After ``close`` nothing keeps the weights and the KV pool, even while somebody holds the engine."""
    from support import tiny_options

    engine = Engine(str(tiny_dir), **tiny_options())
    output = engine.generate([1, 2, 3], max_tokens=2)
    runner = weakref.ref(engine._loop.core.runner)
    engine.close()
    gc.collect()
    assert runner() is None
    assert engine.closed
    assert output.token_ids


class Waiting:
    """A caller on a thread of its own, with what it was told."""

    def __init__(self, engine: Engine) -> None:
        self.heard: list[Any] = []
        self._call = lambda: engine.generate([1, 2, 3])
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self.heard.append(self._call())
        except (EngineClosedError, RequestFailedError) as error:
            self.heard.append(error)

    def told(self) -> Any:
        """What it was told; fails if it waits on."""
        self._thread.join(timeout=60)
        [told] = self.heard
        return told


def raising(*_: Any, **__: Any) -> Any:
    raise InjectedError("injected")


def waiting(engine: Engine) -> list[Waiting]:
    """Three callers whose requests the engine has, and does not compute."""
    engine._loop.core.step = lambda: None  # type: ignore[method-assign]
    callers = [Waiting(engine) for _ in range(3)]
    while engine.stats().waiting < 3:
        pass
    return callers


def test_several_actions_that_raise_leave_nobody_waiting(new_tiny: TinyEngine) -> None:
    """The first ends the engine, the others meet one that ends already: who posted in between gets an answer."""
    engine, hold = new_tiny(), threading.Event()
    engine._loop.post(hold.wait)
    while engine._loop._inbox:  # until it holds the thread
        pass
    callers = []
    for _ in range(3):
        engine._loop.post(raising)
        posted = len(engine._loop._inbox)
        callers.append(Waiting(engine))
        while len(engine._loop._inbox) == posted:
            pass
    hold.set()
    for caller in callers:
        assert isinstance(caller.told().__cause__, InjectedError)
    assert engine.closed


def test_a_close_that_cannot_end_a_request_leaves_nobody_waiting(new_tiny: TinyEngine) -> None:
    """A bug in the scheduler shows while the engine closes: every caller is told, and the tiers are closed."""
    engine = new_tiny()
    callers, core = waiting(engine), engine._loop.core
    core.scheduler.finish = raising  # type: ignore[method-assign]
    closed = threading.Event()
    core.close = closed.set  # type: ignore[method-assign]
    engine.close()
    for caller in callers:
        assert isinstance(caller.told().__cause__, InjectedError)
    assert closed.is_set()


def test_a_consumer_that_raises_when_the_engine_fails(new_tiny: TinyEngine) -> None:
    """The engine thread fails, and the first consumer that is told raises what nobody catches: the others are told."""
    engine, heard = new_tiny(), list[Any]()

    def put(chunk: Any) -> None:
        heard.append(chunk.output.error.__cause__)
        raise SystemExit

    core = engine._loop.core
    core.step = lambda: None  # type: ignore[method-assign]
    engine._client.submit(engine._client.prepare([[9]], None, {}), put, stream=False)
    callers = waiting(engine)
    core.step = raising  # type: ignore[method-assign]
    for caller in callers:
        assert isinstance(caller.told().__cause__, InjectedError)
    [error] = heard
    assert isinstance(error, InjectedError)
    assert engine.closed
