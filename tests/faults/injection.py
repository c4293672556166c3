"""What the tests that put errors into an engine share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class InjectedError(Exception):
    """What the tests raise."""


@contextmanager
def replaced(target: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``target.name`` is ``make(original)`` meanwhile."""
    original = getattr(target, name)
    setattr(target, name, make(original))
    try:
        yield
    finally:
        delattr(target, name)
