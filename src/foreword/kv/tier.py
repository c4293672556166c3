"""A tier below a cache: what it can do, and how quick it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

logger = logging.getLogger("foreword")
T = TypeVar("T")

_MEASURED_TOKENS = 64
"""Transfers of fewer tokens do not show how quick a tier is."""

_USUAL_RATIO = 20
"""How much quicker a tier is taken to be than computing, until it has been measured."""

_REFUSALS = 16
"""A tier that is too slow is tried again each so many times: it may have become quicker."""


class Transfer(NamedTuple):
    """Blocks to be copied.

    Attributes:
        run: copies, on any thread, and stops early once the event is set; how many tokens.
        land: called once on the engine thread when that is over, whatever came of it.
    """

    run: Callable[[threading.Event], int]
    land: Callable[[], None]


class BlockStore(Protocol):
    """A tier: where blocks are kept besides the pool. Its methods are called on the engine thread and copy nothing."""

    def is_open(self, namespace: bytes) -> bool:
        """Whether what there is of a namespace is known, so that :meth:`peek` answers at once."""

    def open(self, namespace: bytes) -> None:
        """See to it; callable from any thread."""

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """How many of ``tokens[start:limit]`` are stored in a row from ``start``, a block border, on."""

    def behind(self, namespace: bytes, tokens: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens that are stored behind ``tokens``."""

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> Transfer:
        """Fill ``blocks`` with the stored KV of ``tokens[start:limit]``, as far as it is there when it runs."""

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> Transfer | None:
        """Store the KV of ``tokens``, which ``blocks`` hold. None: it is there already, or there is no room."""

    def reset(self) -> None:
        """Forget what does not survive the process."""

    def flush(self) -> None:
        """Wait until what was saved is where it survives; callable from any thread."""

    def close(self) -> None:
        """Flush, and let go of everything."""


class Tier:
    """A store, and how quick it was lately."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._failed = False
        self._speed: float | None = None  # tokens per second
        self._refusals = 0

    def ask(self, action: Callable[[BlockStore], T]) -> T | None:
        """What the store says, on any thread; one that fails has had its day, and requests go on without it."""
        if self._failed:
            return None
        try:
            return action(self._store)
        except Exception:
            logger.exception("a tier below the KV pool failed; from now on it is not used")
            self._failed = True
            return None

    def close(self) -> None:
        """Whatever its state."""
        self._failed = False
        self.ask(lambda store: store.close())

    def peek(self, namespace: bytes, tokens: list[int], start: int) -> int:
        """How many of ``tokens[start:]`` it has."""
        return self.ask(lambda store: store.peek(namespace, tokens, start, len(tokens))) or 0

    def run(self, transfer: Transfer, stop: threading.Event) -> int:
        """Carry out a transfer of its; how many tokens were copied."""
        return self.ask(lambda _: transfer.run(stop)) or 0

    def is_worth(self, gain: int, ahead: int, prefill_speed: float | None) -> bool:
        """Whether ``gain`` tokens had better come from here, behind ``ahead`` others, than be computed.

        A tier may take twice as long: others compute meanwhile. One that is too slow is tried again now and then.
        """
        if prefill_speed is None:
            return True
        seconds = (gain + ahead) / (self._speed or _USUAL_RATIO * prefill_speed)
        if seconds * prefill_speed <= 2 * gain:
            return True
        self._refusals = (self._refusals + 1) % _REFUSALS
        return self._refusals == 0 and not ahead

    def measure(self, tokens: int, seconds: float) -> None:
        """``tokens`` came in ``seconds``."""
        if tokens >= _MEASURED_TOKENS:
            speed = tokens / max(seconds, 1e-9)
            self._speed = speed if self._speed is None else 0.5 * self._speed + 0.5 * speed
