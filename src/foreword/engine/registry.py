"""One engine per model and options in a process."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

from foreword.core.config import EngineConfig

if TYPE_CHECKING:
    from foreword.engine.engine import Engine

_lock = threading.Lock()
_engines: dict[EngineConfig, tuple[Engine, int]] = {}  # the engine and how many users it has


def acquire(model: str, **options: Any) -> Engine:
    """The process's engine for ``model`` and ``options``, created on first use. Pair with :func:`release`."""
    from foreword.engine.engine import Engine

    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for option in options:
        if option not in known:
            raise ValueError(f"unknown engine option {option!r}; known are {', '.join(known)}")
    key = EngineConfig(model=model, **options)
    with _lock:
        engine, users = _engines.get(key, (None, 0))
        if engine is None or engine.closed:
            engine, users = Engine(model, **options), 0
        engine.shared_as = key
        _engines[key] = (engine, users + 1)
        return engine


def release(key: EngineConfig, engine: Engine) -> bool:
    """One user fewer; True if it was the last and the engine must be closed."""
    with _lock:
        current, users = _engines.get(key, (None, 0))
        if current is not engine:
            return True
        if users > 1:
            _engines[key] = (engine, users - 1)
            return False
        del _engines[key]
        return True
