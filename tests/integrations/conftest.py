"""Two engines for all adapter tests, both the process's shared ones, so that adapters find them by name too.

Most tests run on one of random weights, whose tokens cost next to nothing: they read counts, kinds and forms, and
compare texts with each other. The default model answers where a test reads what it says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from foreword import Engine, EngineStats

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """The tiny llama with the default model's tokenizer and chat template."""
    from support import save_tiny_chat

    return save_tiny_chat(tmp_path_factory.mktemp("chat"), model_dir)


@pytest.fixture(scope="session")
def tiny_engine(chat_dir: Path) -> Iterator[Engine]:
    """An engine whose texts are random."""
    from foreword import Engine

    engine = Engine.shared(str(chat_dir))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def real_engine() -> Iterator[Engine]:
    """The default model's engine."""
    from foreword import Engine

    engine = Engine.shared(MODEL)
    yield engine
    engine.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """The engine that all other fixtures mean: the tiny one, unless the test or its module uses ``real_engine``."""
    return request.getfixturevalue("real_engine" if "real_engine" in request.fixturenames else "tiny_engine")


@pytest.fixture
def brief(engine: Engine, tiny_engine: Engine) -> dict[str, Any]:
    """Options of an LLM that comes to an end: without a bias random tokens fill a string up to ``max_tokens``."""
    bias = {"logit_bias": {engine.encode('"')[-1]: 6.0}} if engine is tiny_engine else {}
    return {"temperature": 0, "max_tokens": 64, **bias}


@pytest.fixture
def cold(engine: Engine) -> Engine:
    """The engine with nothing cached, and nothing pinned or remembered of tests that came before."""
    core = engine._loop.core
    core.scheduler.cache.log = type(core.scheduler.cache.log)()
    engine._loop.call(lambda: [None for _ in iter(core.scheduler.cache.drop_oldest_pin, False)])
    engine.reset_prefix_cache()
    return engine


@pytest.fixture
def idle(engine: Engine) -> Iterator[Callable[[], None]]:
    """Asserts that nothing runs and no request holds a block; also after the test."""

    def check() -> None:
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
        engine.check_integrity()

    yield check
    check()


@pytest.fixture
def spent(engine: Engine) -> Callable[[], EngineStats]:
    """What the engine's counters gained since the test began."""
    from foreword import EngineStats

    before = engine.stats()
    counters = ("prompt_tokens", "tokens_reused", "tokens_prefilled", "tokens_generated", "steps")
    assert set(counters) <= {field.name for field in fields(EngineStats)}

    def gained() -> EngineStats:
        now = engine.stats()
        return EngineStats(**{name: getattr(now, name) - getattr(before, name) for name in counters})

    return gained


@pytest.fixture
def computing_when(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Has the engine make steps only while a condition holds, and any after 20 s: who waits for one must not hang."""
    core = engine._loop.core
    step = core.step

    def only_when(is_ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 20

        def step_when_ready() -> None:
            if is_ready() or time.monotonic() > end:
                step()
            else:
                time.sleep(0.001)

        monkeypatch.setattr(core, "step", step_when_ready)

    return only_when


@pytest.fixture
def together(engine: Engine, computing_when: Callable[[Callable[[], bool]], None]) -> Callable[[int], None]:
    """Has the engine compute nothing until so many requests wait: whoever asks one after the other is found out."""

    def wait_for(count: int) -> None:
        scheduler, arrived = engine._loop.core.scheduler, threading.Event()

        def all_are_there() -> bool:
            if len(scheduler.waiting) == count:
                arrived.set()
            return arrived.is_set()

        computing_when(all_are_there)

    return wait_for


@pytest.fixture(scope="session")
def document() -> str:
    """About 200 tokens that several questions share."""
    return (
        "The lighthouse at Port Wren was built in 1874 by the engineer Ada Holm. It is 31 metres tall and painted "
        "in red and white bands. Its lamp burned whale oil until 1911, when the harbour company laid an electric "
        "cable across the bay. The first keeper was Jonas Pike, who lived in the tower with his wife and four "
        "children for twenty-two years. During the storm of 1903 he rowed out alone and brought nine sailors of "
        "the schooner Marigold ashore. The lighthouse was automated in 1968 and the keeper's house became a small "
        "museum, which opens on Sundays from May to September. Visitors may climb the 142 steps to the gallery, "
        "from which the islands of the outer bank can be seen on clear days. The light can be seen for eighteen "
        "nautical miles."
    )


@pytest.fixture
def unpinned(engine: Engine) -> Iterator[Engine]:
    """The engine with nothing pinned or cached; what the test pins lapses after it."""

    def unpin() -> None:
        engine._loop.call(lambda: engine._loop.core.scheduler.cache.expire_pins(float("inf")))
        assert engine.stats().blocks_pinned == 0

    unpin()
    engine.reset_prefix_cache()
    yield engine
    unpin()
    engine.check_integrity()
