"""The engines that a process shares."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine, EngineClosedError, ModelLoadError
from foreword.engine import registry
from support import tiny_options


@pytest.fixture
def options(tiny_dir: Path) -> Iterator[dict[str, Any]]:
    yield {"model": str(tiny_dir), **tiny_options(blocks=16)}
    for config, entry in list(registry._entries.items()):
        if config.model == str(tiny_dir):
            if entry.engine is not None:
                entry.engine._closer()
            del registry._entries[config]


def test_one_engine_per_model_and_options(options: dict[str, Any], tiny_dir: Path) -> None:
    """Equal options share, spelled out defaults too; other options get another engine."""
    first = Engine.shared(**options)
    assert Engine.shared(**options) is first
    assert Engine.shared(**options, scheduling_policy="fcfs") is first
    assert Engine.shared(**options, max_num_seqs=3) is not first
    assert Engine(str(tiny_dir), **tiny_options(blocks=16)) is not first


def test_it_closes_with_its_last_user(options: dict[str, Any]) -> None:
    """Each ``shared`` needs one ``close``; the last one ends the engine, the next ``shared`` makes a new one."""
    users = [Engine.shared(**options) for _ in range(3)]
    users[0].close()
    users[1].close()
    assert users[2].generate([1], max_tokens=1).finish_reason
    users[2].close()
    assert users[2].closed
    with pytest.raises(EngineClosedError):
        users[2].generate([1])
    again = Engine.shared(**options)
    assert again is not users[0]
    users[2].close()
    assert again.generate([1], max_tokens=1).finish_reason, "a late close of the old engine closed the new one"


def test_equal_sizes_share(options: dict[str, Any]) -> None:
    """A size is the same however it is spelled."""
    size = options.pop("kv_cache_memory")
    assert Engine.shared(**options, kv_cache_memory=size) is Engine.shared(**options, kv_cache_memory=f"{size}B")


def test_a_policy_that_cannot_be_compared_is_named(options: dict[str, Any]) -> None:
    """The key of the registry must be hashable."""

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def key(self, candidate: Any) -> Any:
            return candidate.number

    with pytest.raises(ValueError, match="scheduling_policy"):
        Engine.shared(**options, scheduling_policy=Unhashable())


def test_a_dead_engine_is_replaced(options: dict[str, Any]) -> None:
    """An engine that was closed behind the registry's back is not handed out again."""
    first = Engine.shared(**options)
    first._closer()
    second = Engine.shared(**options)
    assert second is not first
    assert not second.closed


def test_threads_that_ask_at_once_get_the_same(options: dict[str, Any]) -> None:
    """Sixteen threads at once load one engine."""
    with ThreadPoolExecutor(16) as pool:
        engines = list(pool.map(lambda _: Engine.shared(**options), range(16)))
    assert len(set(map(id, engines))) == 1
    for engine in engines:
        assert not engine.closed
        engine.close()
    assert engines[0].closed


def test_a_failed_load_leaves_nothing(tmp_path: Path) -> None:
    """A model that cannot be loaded raises each time and is not remembered."""
    for _ in range(2):
        with pytest.raises(ModelLoadError):
            Engine.shared(str(tmp_path))
    assert not any(entry.engine for config, entry in registry._entries.items() if config.model == str(tmp_path))


def test_context_managers_share_too(options: dict[str, Any]) -> None:
    """Leaving one ``with`` does not close the engine under another."""
    with Engine.shared(**options) as outer:
        with Engine.shared(**options) as inner:
            assert inner is outer
        assert not outer.closed
    assert outer.closed
