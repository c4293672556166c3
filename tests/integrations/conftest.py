"""One real engine for all adapter tests: the process's shared one, which the adapters find by themselves too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from foreword import Engine, EngineStats

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    from foreword import Engine

    engine = Engine.shared(MODEL)
    yield engine
    engine.close()


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
