"""A lazy way to an engine, for adapters: found on first use, shared with everyone who wants the same one."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from foreword.core.config import EngineConfig

if TYPE_CHECKING:
    from foreword.engine.engine import Engine


class EngineHandle:
    """A way to an engine that costs nothing until it is used.

    Args:
        model: the model's name; None takes that of the given engine.
        given: an engine of the caller's. It is used as it is, and never closed here.
        options: engine options; without a given engine, ``Engine.shared(model, **options)`` is asked for one.

    Raises:
        ValueError: ``given`` is no engine, or ``model`` or ``options`` contradict it; an option is unknown or wrong.
    """

    def __init__(self, model: str | None, given: Engine | None, options: dict[str, Any]) -> None:
        self.model = _check_given(model, given, options) if given is not None else _check_options(model, options)
        self._given = given
        self._options = options
        self._held: dict[str, Engine] = {}  # our references to shared engines, by model
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy elsewhere finds an engine of its own; one that was given cannot go along."""
        if self._given is not None:
            raise TypeError("a model with engine= cannot be pickled: the engine lives in this process")
        return (type(self), (self.model, None, self._options))

    def loaded(self, model: str) -> Engine | None:
        """The engine if it is there already.

        Raises:
            ValueError: the caller's engine runs another model.
        """
        if self._given is not None:
            if model != self._given.model:
                raise ValueError(
                    f"model={model!r} cannot run on the engine given as engine=, which runs {self._given.model!r}: "
                    "create another model object for it"
                )
            return self._given
        engine = self._held.get(model)
        return None if engine is None or engine.closed else engine

    def get(self, model: str) -> Engine:
        """The engine, loaded if need be. After :meth:`close` it is loaded again."""
        engine = self.loaded(model)
        if engine is not None:
            return engine
        from foreword.engine.engine import Engine

        with self._lock:
            engine = self.loaded(model)  # another thread may have been first
            if engine is None:
                engine = self._held[model] = Engine.shared(model, **self._options)
            return engine

    def max_model_len(self, model: str) -> int | None:
        """The longest context of a request; None where telling it would take loading or fetching the model."""
        engine = self.loaded(model)
        if engine is not None:
            return engine.max_model_len
        from foreword.model.source import context_length

        return self._options.get("max_model_len") or context_length(model)

    async def aget(self, model: str) -> Engine:
        """As :meth:`get`; the event loop keeps running while a model is loaded."""
        engine = self.loaded(model)
        return engine if engine is not None else await asyncio.to_thread(self.get, model)

    def close(self) -> None:
        """Give back what was taken from the registry; an engine closes with its last user."""
        with self._lock:
            engines = list(self._held.values())
            self._held.clear()
        for engine in engines:
            engine.close()


def _check_given(model: str | None, given: Engine, options: dict[str, Any]) -> str:
    from foreword.engine.engine import Engine

    if not isinstance(given, Engine):
        raise ValueError(f"engine={given!r} is no foreword.Engine")
    if options:
        raise ValueError("give engine= or engine_options=, not both: a running engine has its options already")
    if model is not None and model != given.model:
        raise ValueError(f"model={model!r} contradicts engine=, which runs {given.model!r}")
    return given.model


def _check_options(model: str | None, options: dict[str, Any]) -> str:
    if model is None:
        raise ValueError("give model= or engine=")
    return EngineConfig.build(model, **options).model
