"""The engine thread: posting, calling, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from foreword import EngineClosedError
from foreword.engine.loop import EngineLoop


class FakeCore:
    """Counts steps; has as much work as it is given."""

    def __init__(self) -> None:
        self.work = 0
        self.steps = 0
        self.ended: list[Any] = []
        self.on_step: Callable[[], None] = lambda: None
        self.stalled = False

    def enter_thread(self, nudge: Callable[[], None]) -> None:
        self.nudge = nudge

    @property
    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> None:
        self.on_step()
        self.work -= 1
        self.steps += 1

    def cancel_all(self) -> None:
        self.ended.append("cancelled")

    def abandon(self, error: BaseException) -> None:
        self.ended.append(error)

    def close(self) -> None: ...


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def loop(core: FakeCore) -> Iterator[EngineLoop]:
    made = EngineLoop(core)  # type: ignore[arg-type]
    yield made
    made.close()


def give(core: FakeCore, work: int) -> Callable[[], None]:
    def action() -> None:
        core.work += work

    return action


def test_work_is_done_and_then_the_thread_rests(loop: EngineLoop, core: FakeCore) -> None:
    """Posted work is stepped through to its end; without work no step is made."""
    done = threading.Event()
    core.on_step = lambda: done.set() if core.work == 1 else None
    assert loop.call(lambda: core.steps) == 0
    loop.post(give(core, 5))
    assert done.wait(30)
    while loop.call(lambda: core.has_work):
        pass
    assert loop.call(lambda: core.steps) == 5


def test_actions_run_in_order_on_the_engine_thread(loop: EngineLoop) -> None:
    """Everything that touches the core runs on one thread, in the order it was posted."""
    seen: list[tuple[int, str]] = []
    for number in range(100):
        loop.post(lambda number=number: seen.append((number, threading.current_thread().name)))
    loop.call(lambda: None)
    assert seen == [(number, "foreword-engine") for number in range(100)]


def test_an_error_in_a_call_is_the_callers(loop: EngineLoop) -> None:
    """``call`` hands exceptions back and the thread lives on."""
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0)
    assert loop.call(lambda: 7) == 7


def test_calling_from_the_engine_thread_does_not_deadlock(loop: EngineLoop) -> None:
    """A callback that asks the engine something gets its answer."""
    assert loop.call(lambda: loop.call(lambda: loop.call(lambda: 5))) == 5


def test_close_ends_the_thread_and_what_is_live(loop: EngineLoop, core: FakeCore) -> None:
    """After close nothing is accepted, the live requests were cancelled, and closing again is harmless."""
    loop.post(give(core, 10**9))
    loop.close()
    loop.close()
    assert not loop._thread.is_alive()
    assert core.ended == ["cancelled"]
    for use in (loop.post, loop.call):
        with pytest.raises(EngineClosedError, match="closed"):
            use(lambda: None)


def test_close_from_the_engine_thread(loop: EngineLoop) -> None:
    """Closing from a callback does not wait for itself."""
    loop.call(loop.close)
    loop._thread.join(30)
    assert not loop._thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_a_step_that_raises_ends_everything_with_its_error(core: FakeCore, error: BaseException) -> None:
    """Whatever escapes a step: live requests get it, callers that come later get EngineClosedError caused by it."""
    loop = EngineLoop(core)  # type: ignore[arg-type]

    def fail() -> None:
        raise error

    core.on_step = fail
    loop.post(give(core, 1))
    loop._thread.join(30)
    assert core.ended == [error]
    with pytest.raises(EngineClosedError) as caught:
        loop.call(lambda: None)
    assert caught.value.__cause__ is error
    loop.close()


def test_calls_that_wait_while_the_thread_dies_are_answered(core: FakeCore) -> None:
    """No caller is left waiting when the thread dies with calls in its inbox."""
    loop = EngineLoop(core)  # type: ignore[arg-type]
    in_step, go_on = threading.Event(), threading.Event()

    def die() -> None:
        in_step.set()
        go_on.wait(30)
        raise RuntimeError("a bug")

    core.on_step = die
    loop.post(give(core, 1))
    assert in_step.wait(30)
    answers: list[Any] = []

    def call() -> None:
        try:
            answers.append(loop.call(lambda: 1))
        except EngineClosedError as error:
            answers.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 8
