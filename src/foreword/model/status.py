"""One line on stderr for work that takes more than two seconds; quicker work stays silent."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

DELAY_S = 2.0


@contextmanager
def status(message: str, enabled: bool = True) -> Iterator[None]:
    """Say ``message`` once the work inside has taken more than two seconds."""
    if not enabled:
        yield
        return
    timer = threading.Timer(DELAY_S, lambda: print(f"foreword: {message} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_bar(label: str, unit: str, enabled: bool = True) -> Callable[[Iterator[Any], int], Iterator[Any]]:
    """A wrapper of iterators that shows a progress bar if they take more than two seconds."""

    def wrap(items: Iterator[Any], total: int) -> Iterator[Any]:
        from tqdm import tqdm

        options = {"delay": DELAY_S, "file": sys.stderr, "leave": False}  # and none without a terminal
        return iter(
            tqdm(items, desc=f"foreword: {label}", total=total, unit=unit, disable=None if enabled else True, **options)
        )

    return wrap
