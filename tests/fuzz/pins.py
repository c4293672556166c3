"""What pins promise, kept beside the engine's own ledger of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from foreword import Engine

from .submission import Violation


@dataclass
class Promise:
    """A pinned prefix: how often, until when, how many of its tokens were cached, and in which blocks."""

    times: int
    deadline_s: float
    num_tokens: int
    blocks: set[int]


class Pins:
    """Pins of one engine, in the cache of the pool (``home`` 0) or of the host tier (1), if it has one.

    Everything happens on the engine thread.
    """

    def __init__(self, engine: Engine, home: int) -> None:
        self._home = home
        self.dropped = 0
        self.offset_s = 0.0
        self._engine = engine
        self._held: dict[tuple[bytes, tuple[int, ...]], Promise] = {}  # the one pinned longest ago first
        engine._loop.call(self._watch)

    def pin(self, salt: str | None, tokens: list[int], ttl_s: float | None) -> str:
        """Pin what is cached of ``tokens``; says what came of it."""
        return self._engine._loop.call(lambda: self._pin(self._namespace(salt), tokens, ttl_s))

    def unpin(self, which: int, *, unknown: bool) -> str:
        """Take one of the pins back, or one that there is not."""
        return self._engine._loop.call(lambda: self._unpin(which, unknown))

    def lapse(self, seconds: float) -> None:
        """Move the clock."""

        def move() -> None:
            self.offset_s += seconds
            self._check()

        self._engine._loop.call(move)

    def check(self) -> int:
        """What is pinned is cached, and counted. Returns the number of blocks."""
        return self._engine._loop.call(self._check)

    def release(self) -> None:
        """Take all of them back."""
        while self._engine._loop.call(lambda: bool(self._held)):
            self.unpin(0, unknown=False)
        if blocks := self.check():
            raise Violation(f"{blocks} blocks are pinned, by nobody")

    def _namespace(self, salt: str | None) -> bytes:
        return self._engine._client._namespace_key(salt or "")

    @property
    def _cache(self) -> Any:
        homes = self._engine._loop.core.scheduler.homes
        return homes[min(self._home, len(homes) - 1)]

    def _watch(self) -> None:
        scheduler, cache = self._engine._loop.core.scheduler, self._cache
        drop, schedule = cache.drop_oldest_pin, scheduler.schedule

        def drop_oldest_pin() -> bool:
            oldest = next(iter(self._held), None)
            if any(sequence.home is cache for sequence in scheduler.running):
                raise Violation("a pin was taken back though somebody runs and will make room")
            if (self._cache.pins.oldest or (None,))[:2] != (oldest or (None,)):
                raise Violation("a pin was taken back that is not the oldest")
            self._held.pop(oldest, None)
            self.dropped += oldest is not None
            return bool(drop())

        def schedule_later(now_s: float) -> Any:
            self._expire(now_s + self.offset_s)
            return schedule(now_s + self.offset_s)

        cache.drop_oldest_pin, scheduler.schedule = drop_oldest_pin, schedule_later

    def _now(self) -> float:
        now_s = time.monotonic() + self.offset_s
        self._expire(now_s)
        return now_s

    def _expire(self, now_s: float) -> None:
        self._held = {key: promise for key, promise in self._held.items() if promise.deadline_s > now_s}

    def _blocks(self) -> set[int]:
        return set().union(*(promise.blocks for promise in self._held.values()))

    def _pin(self, namespace: bytes, tokens: list[int], ttl_s: float | None) -> str:
        cache, now_s, key = self._cache, self._now(), (namespace, tuple(tokens))
        match = cache.lookup(namespace, tokens, len(tokens))
        blocks = set(match.blocks) | ({match.tail_block} - {None})
        fits = blocks <= self._blocks() or len(blocks | self._blocks()) <= cache.pins.max_blocks
        try:
            pinned = cache.pin(namespace, tokens, now_s=now_s, ttl_s=ttl_s)
        except ValueError as error:
            if fits:
                raise Violation(f"a pin on {blocks} beside {self._blocks()} was refused: {error}") from error
            return "refused"
        if not fits:
            raise Violation(f"pins on {blocks} beside {self._blocks()} are more than {cache.pins.max_blocks}")
        if pinned != (match.num_tokens, len(blocks)):
            raise Violation(f"pinned {pinned}, where {match.num_tokens} tokens are cached in {blocks}")
        if blocks:
            deadline_s = float("inf") if ttl_s is None else now_s + ttl_s
            earlier = self._held.pop(key, Promise(0, 0.0, 0, set()))
            self._held[key] = Promise(earlier.times + 1, max(deadline_s, earlier.deadline_s), match.num_tokens, blocks)
        self._check()
        return f"{match.num_tokens} of {len(tokens)} tokens in {len(blocks)} blocks, ttl {ttl_s}"

    def _unpin(self, which: int, unknown: bool) -> str:
        self._cache.expire_pins(self._now())
        keys = list(self._held)
        if unknown or not keys:
            if self._cache.unpin(b"nobody's", (1, 2, 3)):
                raise Violation("what was never pinned was unpinned")
            return "one that there is not"
        key = keys[which % len(keys)]
        if not self._cache.unpin(key[0], list(key[1])):
            raise Violation(f"a pin on {self._held[key]} was not there")
        self._held[key].times -= 1
        if not self._held[key].times:
            del self._held[key]
        self._check()
        return f"pin {which % len(keys)} of {len(keys)}"

    def _check(self) -> int:
        cache = self._cache
        cache.expire_pins(self._now())
        for (namespace, tokens), promise in self._held.items():
            found = cache.lookup(namespace, list(tokens), len(tokens)).num_tokens
            if found < promise.num_tokens:
                raise Violation(f"{promise.num_tokens} tokens are pinned, {found} of them are cached")
        blocks = self._blocks()
        if cache.pins.num_blocks != len(blocks) or len(cache.pins) != len(self._held):
            raise Violation(
                f"{len(cache.pins)} pins on {cache.pins.num_blocks} blocks, not {len(self._held)} on {blocks}"
            )
        return len(blocks)
