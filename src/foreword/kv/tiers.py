"""Between a cache and the tiers below it: what is brought up, what is put down, when that is worth it, and who waits.

Copies run on a thread of their own while the model computes. The books are kept on the engine thread alone: a transfer
holds its blocks from the moment it begins until it has landed there, like a sequence that uses them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, Protocol, TypeVar

from foreword.core.common_prefix import common_prefix_length
from foreword.kv.cache import KVCacheManager
from foreword.kv.table import BlockTable
from foreword.kv.tree import PrefixMatch

logger = logging.getLogger("foreword")
T = TypeVar("T")

_MEASURED_TOKENS = 64
"""Transfers of fewer tokens do not show how quick a tier is."""

_REFUSALS = 16
"""A tier that is too slow is tried again each so many times: it may have become quicker."""


class Transfer(NamedTuple):
    """Blocks to be copied.

    Attributes:
        run: copies, on any thread; how many tokens.
        land: called once on the engine thread when that is over, whatever came of it.
    """

    run: Callable[[], int]
    land: Callable[[], None]


class BlockStore(Protocol):
    """A tier: where blocks are kept besides the pool. Its methods are called on the engine thread and copy nothing."""

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        """How many of ``tokens[start:limit]`` are stored in a row from ``start``, a block border, on."""

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


class _Tier:
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

    def run(self, transfer: Transfer) -> int:
        """Carry out a transfer of its; how many tokens were copied."""
        return self.ask(lambda _: transfer.run()) or 0

    def is_worth(self, prefill_speed: float | None) -> bool:
        """Whether tokens had better come from here than be computed. A tier may take twice as long: others compute
        meanwhile."""
        if self._speed is None or prefill_speed is None or 2 * self._speed >= prefill_speed:
            return True
        self._refusals = (self._refusals + 1) % _REFUSALS
        return self._refusals == 0

    def measure(self, tokens: int, seconds: float) -> None:
        """``tokens`` came in ``seconds``."""
        if tokens >= _MEASURED_TOKENS:
            speed = tokens / max(seconds, 1e-9)
            self._speed = speed if self._speed is None else 0.5 * self._speed + 0.5 * speed


class _Load(NamedTuple):
    """One tier's share of a fetch, from ``start``, a block border, to ``end``."""

    tier: _Tier
    start: int
    end: int


class _Flight(NamedTuple):
    """A transfer under way; ``tokens`` are empty unless it brings them."""

    namespace: bytes
    tokens: list[int]
    future: Future[int]
    land: Callable[[int], None]


class TieredCache(KVCacheManager):
    """A cache with tiers below it, or with none.

    Args:
        stores: the tiers, the quickest first; the others are asked for what it does not have.
        executor: where copies run, one after another; not needed without a tier.
        options: of :class:`foreword.kv.cache.KVCacheManager`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        stores: Sequence[BlockStore] = (),
        executor: Executor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.restored_tokens = 0
        self.on_done: Callable[[], None] = lambda: None  # called, on any thread, when something is ready to land
        self._tiers = [_Tier(store) for store in stores]
        self._executor = executor
        self._flights: deque[_Flight] = deque()

    @property
    def has_tiers(self) -> bool:
        return bool(self._tiers)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._flights)

    def stored(self, namespace: bytes, tokens: list[int], cached: int) -> int:
        """How many of the first ``tokens`` can be had without computing them, ``cached`` of which are in the pool."""
        loads = self._plan(namespace, tokens, cached // self.block_size * self.block_size)
        return max(cached, loads[-1].end) if loads else cached

    def is_bringing(self, namespace: bytes, tokens: list[int], limit: int, cached: int) -> bool:
        """Whether more than the ``cached`` first of ``tokens[:limit]`` are on their way."""
        return any(
            common_prefix_length(flight.tokens, 0, tokens, 0, limit) > cached
            for flight in self._flights
            if flight.namespace == namespace and len(flight.tokens) > cached
        )

    def fetch(self, namespace: bytes, tokens: list[int], match: PrefixMatch, speed: float | None) -> bool:
        """Bring what the tiers have of ``tokens`` beyond ``match``; when it has landed a lookup finds it.

        The caller has seen that there is room. False: there is nothing, or to compute it, at ``speed`` tokens per
        second, is quicker.
        """
        match, cached = match.whole_blocks(self.block_size), match.num_tokens
        loads = self._plan(namespace, tokens, match.num_tokens, speed)
        if not loads or loads[-1].end <= cached:
            return False
        tokens = tokens[: loads[-1].end]
        held = self.allocate(namespace, match, len(tokens))

        def begin(load: _Load) -> Transfer | None:
            blocks = held.blocks[load.start // self.block_size :]
            return load.tier.ask(lambda store: store.load(namespace, tokens, load.start, len(tokens), blocks))

        begun = [(load, begin(load)) for load in loads]
        parts = [(load, transfer) for load, transfer in begun if transfer is not None]

        def land(end: int) -> None:
            for _, transfer in parts:
                transfer.land()
            self.restored_tokens += max(0, end - cached)
            if end > cached:
                self.release(held, tokens, end)
            else:
                self.discard(held)

        self._start(namespace, tokens, lambda: _load_all(parts), land)
        return True

    def retire(self, held: BlockTable, tokens: list[int], num_computed: int) -> None:
        """Release, and have the tiers keep it too."""
        if self.enabled and num_computed and not self._copies_into(held):
            self.commit(held, tokens, num_computed)
            self._save(held.namespace, tokens[:num_computed], held.blocks[: self.blocks_for(num_computed)])
        self.release(held, tokens, num_computed)

    def save(self, namespace: bytes, tokens: list[int]) -> None:
        """Have the tiers keep what is cached of ``tokens``; returns when they do."""
        match = self.lookup(namespace, tokens, len(tokens)).whole_blocks(self.block_size)
        if match.blocks:
            self._save(namespace, tokens[: match.num_tokens], match.blocks)
        self.settle()

    def poll(self) -> None:
        """Let land what has arrived."""
        while self._flights and self._flights[0].future.done():
            flight = self._flights.popleft()
            flight.land(flight.future.result())

    def wait(self) -> bool:
        """Wait until one more has landed. False if nothing is under way."""
        if not self._flights:
            return False
        self._flights[0].future.exception()
        self.poll()
        return True

    def settle(self) -> None:
        """Wait until all have landed."""
        while self.wait():
            pass

    def reset(self) -> int:
        """Forget every cached block that no sequence uses and no pin holds, in tiers that do not outlive the process
        too. Returns how many of the pool."""
        self.settle()
        for tier in self._tiers:
            tier.ask(lambda store: store.reset())
        return super().reset()

    def flush(self) -> None:
        """Wait until what has landed is where it survives; callable from any thread."""
        for tier in self._tiers:
            tier.ask(lambda store: store.flush())

    def close(self) -> None:
        """Wait for everything, write out what is left, and let go of the tiers."""
        self.settle()
        super().close()
        if self._executor is not None:
            self._executor.shutdown()
        for tier in self._tiers:
            tier.close()

    def _save(self, namespace: bytes, tokens: list[int], blocks: list[int]) -> None:
        asked = [(tier, tier.ask(lambda store: store.save(namespace, tokens, blocks))) for tier in self._tiers]
        parts = [(tier, transfer) for tier, transfer in asked if transfer is not None]
        if not parts:
            return
        self.allocator.share(blocks)

        def land(_: int) -> None:
            for _tier, transfer in parts:
                transfer.land()
            self.allocator.release(blocks)

        self._start(namespace, [], lambda: _save_all(parts), land)

    def _plan(self, namespace: bytes, tokens: list[int], start: int, speed: float | None = None) -> list[_Load]:
        """Which tier has how much of ``tokens[start:]``, and is worth asking if computing goes at ``speed``."""
        loads, end = list[_Load](), start
        for tier in self._tiers if self.enabled else ():
            border = end // self.block_size * self.block_size
            stored = border + tier.peek(namespace, tokens, border)
            # inside a block that is there already, one that has less of it would spoil it
            if stored > end and tier.is_worth(speed):
                loads.append(_Load(tier, border, stored))
                end = stored
        return loads

    def _start(self, namespace: bytes, tokens: list[int], run: Callable[[], int], land: Callable[[int], None]) -> None:
        assert self._executor is not None
        try:
            future = self._executor.submit(run)
        except RuntimeError:  # the interpreter ends, and starts no more threads
            future = Future()
            future.set_result(run())
        self._flights.append(_Flight(namespace, tokens, future, land))
        future.add_done_callback(lambda _: self.on_done())


def _load_all(parts: Sequence[tuple[_Load, Transfer]]) -> int:
    """Up to where all tokens came."""
    end = parts[0][0].start if parts else 0
    for load, transfer in parts:
        if load.start > end:  # the one before brought less than it had
            break
        began = time.monotonic()
        copied = load.tier.run(transfer)
        if copied:
            end = load.start + copied
            load.tier.measure(copied, time.monotonic() - began)
    return end


def _save_all(parts: Sequence[tuple[_Tier, Transfer]]) -> int:
    return sum(tier.run(transfer) for tier, transfer in parts)
