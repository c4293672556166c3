"""One engine per model and options in a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from foreword.core.config import EngineConfig
from foreword.core.validation import reject

if TYPE_CHECKING:
    from foreword.engine.engine import Engine


class _Entry:
    """An engine and how many users it has. Its lock is held while the engine is made, so that others need not wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.users = 0


_lock = threading.Lock()
_entries: dict[EngineConfig, _Entry] = {}


def acquire(config: EngineConfig, create: Callable[[], Engine]) -> Engine:
    """The process's engine for ``config``, created on first use. Pair with :func:`release`."""
    try:
        hash(config)
    except TypeError:
        reject("scheduling_policy", config.scheduling_policy, "give something hashable to share an engine by it")
    with _lock:
        entry = _entries.setdefault(config, _Entry())
    with entry.lock:
        if entry.engine is None or entry.engine.closed:
            entry.engine, entry.users = create(), 0
            entry.engine.shared_as = config
        entry.users += 1
        return entry.engine


def release(config: EngineConfig, engine: Engine) -> bool:
    """One user fewer; True if it was the last and the engine must be closed."""
    with _lock:
        entry = _entries.setdefault(config, _Entry())
    with entry.lock:
        if entry.engine is not engine:
            return True
        entry.users -= 1
        if entry.users > 0:
            return False
        entry.engine = None
        return True


def _start_over() -> None:
    """A forked child has neither the engines' threads nor whoever held a lock."""
    global _lock
    _lock = threading.Lock()
    _entries.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
