"""Between a cache and the tiers below it: what is brought up, what is put down, when that is worth it, and who waits.

Copies run on a thread of their own while the model computes. The books are kept on the engine thread alone: a transfer
holds its blocks from the moment it begins until it has landed there, like a sequence that uses them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foreword.core.common_prefix import common_prefix_length
from foreword.kv.cache import KVCacheManager
from foreword.kv.explain import Stop
from foreword.kv.table import BlockTable
from foreword.kv.tier import BlockStore, Tier, Transfer
from foreword.kv.tree import PrefixMatch


class _Load(NamedTuple):
    """One tier's share of a fetch, from ``start``, a block border, to ``end``."""

    tier: Tier
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Flight:
    """Blocks on their way.

    Attributes:
        land: keeps the books of it, on the engine thread.
        namespace, tokens: what it brings up; no tokens, if nothing.
        frees: it lets go of blocks when it lands.
        forgotten: what it brings is not wanted any more.
        landed: it is over, and a lookup finds what it brought.
    """

    future: Future[int]
    land: Callable[[int], None]
    namespace: bytes = b""
    tokens: list[int] = field(default_factory=list)
    frees: bool = False
    forgotten: bool = False
    landed: bool = False


class Lanes(NamedTuple):
    """Where copies run, each kind one after another: what goes down takes little time and frees blocks, what comes up
    takes as long as the slowest tier. ``closing`` ends what comes up early."""

    up: Executor
    down: Executor
    closing: threading.Event

    @classmethod
    def create(cls, initializer: Callable[[], None] | None = None) -> Lanes:
        """Two threads, which start when they are needed and call ``initializer`` first."""
        up, down = (ThreadPoolExecutor(1, f"foreword-tiers-{way}", initializer) for way in ("up", "down"))
        return cls(up, down, threading.Event())

    def close(self) -> None:
        """Wait for what was handed in."""
        self.up.shutdown()
        self.down.shutdown()


class TieredCache(KVCacheManager):
    """A cache with tiers below it, or with none.

    Args:
        lanes: shared with others that have the same tiers; None creates them.
        options: of :class:`foreword.kv.cache.KVCacheManager`.
    """

    def __init__(self, num_blocks: int, block_size: int, *, lanes: Lanes | None = None, **options: Any) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.restored_tokens = 0
        self.on_done: Callable[[], None] = lambda: None  # called, on any thread, when something is ready to land
        self._tiers: list[Tier] = []
        self._lanes = lanes or Lanes.create()
        self._flights: list[Flight] = []

    def put_on(self, *stores: BlockStore) -> None:
        """Set the tiers, the quickest first; the others are asked for what it does not have."""
        self._tiers = [Tier(store) for store in stores] if self.enabled else []

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._flights)

    @property
    def saving(self) -> bool:
        """Whether anything is on its way down."""
        return any(flight.frees for flight in self._flights)

    @property
    def under_way(self) -> list[Future[int]]:
        """What is, to be waited for on another thread."""
        return [flight.future for flight in self._flights]

    def find_stop(self, namespace: bytes, tokens: list[int], count: int) -> Stop:
        """Where what can be had of ``tokens`` without computing it ends, and up to ``count`` tokens that are cached or
        stored behind it."""
        stop = super().find_stop(namespace, tokens, count)
        if stop.num_tokens == len(tokens):
            return stop
        loads = self._plan(namespace, tokens, stop.num_tokens)
        end = max(stop.num_tokens, loads[-1].end if loads else 0)
        if end == len(tokens) or (end == stop.num_tokens and stop.instead):
            return stop._replace(num_tokens=end)
        behind = (tier.ask(lambda store: store.behind(namespace, tokens[:end], count)) for tier in self._tiers)
        return Stop(end, next(filter(None, behind), []))

    def is_bringing(self, namespace: bytes, tokens: list[int], limit: int, cached: int) -> bool:
        """Whether most of what is missing behind the ``cached`` first of ``tokens[:limit]`` is on its way.

        For less it does not pay to wait for somebody else's copy.
        """
        enough = cached + (limit - cached) // 2
        return any(
            common_prefix_length(flight.tokens, 0, tokens, 0, limit) > enough
            for flight in self._flights
            if flight.namespace == namespace and len(flight.tokens) > enough and not flight.forgotten
        )

    def open(self, namespace: bytes) -> Flight | None:
        """Have the tiers find out what they have of a namespace; None: they know."""
        closed = [tier for tier in self._tiers if tier.ask(lambda store: store.is_open(namespace)) is False]
        return self._start(self._lanes.up, lambda: _open_all(closed, namespace), lambda _: None) if closed else None

    def open_now(self, namespace: bytes) -> None:
        """The same, at once and on any thread."""
        _open_all(self._tiers, namespace)

    def fetch(self, namespace: bytes, tokens: list[int], match: PrefixMatch, speed: float | None) -> Flight | None:
        """Bring what the tiers have of ``tokens`` beyond ``match``; when it has landed a lookup finds it.

        The caller has seen that there is room. None: there is nothing, or to compute it, at ``speed`` tokens per
        second, is quicker.
        """
        match, cached = match.whole_blocks(self.block_size), match.num_tokens
        loads = self._plan(namespace, tokens, cached, speed)
        if not loads:
            return None
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

        stop = self._lanes.closing
        return self._start(self._lanes.up, lambda: _load_all(parts, stop), land, namespace=namespace, tokens=tokens)

    def retire(self, held: BlockTable, tokens: list[int], num_computed: int) -> None:
        """Release, and have the tiers keep it too."""
        if self.enabled and num_computed and not self._copies_into(held):
            self.commit(held, tokens, num_computed)
            self._save(held.namespace, tokens[:num_computed], held.blocks[: self.blocks_for(num_computed)])
        self.release(held, tokens, num_computed)

    def poll(self) -> None:
        """Let land what has arrived."""
        for flight in [flight for flight in self._flights if flight.future.done()]:
            self._flights.remove(flight)
            flight.land(0 if flight.forgotten else flight.future.result())
            flight.landed = True

    def wait_for_room(self) -> bool:
        """Wait until blocks on their way down are let go of, which is soon. False if there are none."""
        down = [flight for flight in self._flights if flight.frees]
        for flight in down:
            flight.future.exception()
        self.poll()
        return bool(down)

    def settle(self) -> None:
        """Wait until all have landed."""
        for flight in self._flights:
            flight.future.exception()
        self.poll()

    def reset(self) -> int:
        """Forget every cached block that no sequence uses and no pin holds, in tiers that do not outlive the process
        too. Returns how many of the pool."""
        self.forget_flights()
        for tier in self._tiers:
            tier.ask(lambda store: store.reset())
        return super().reset()

    def forget_flights(self) -> None:
        """What is on its way up is not kept when it lands; what is on its way down has landed."""
        self.wait_for_room()
        for flight in self._flights:
            flight.forgotten = True

    def flush(self) -> None:
        """Wait until what has landed is where it survives; callable from any thread."""
        for tier in self._tiers:
            tier.ask(lambda store: store.flush())

    def close(self) -> None:
        """Write out what is left, bring up nothing more, and let go of the tiers."""
        self._lanes.closing.set()
        self.settle()
        super().close()
        self._lanes.close()
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

        def run() -> int:
            return sum(tier.run(transfer, self._lanes.closing) for tier, transfer in parts)

        self._start(self._lanes.down, run, land, frees=True)

    def _plan(self, namespace: bytes, tokens: list[int], cached: int, speed: float | None = None) -> list[_Load]:
        """Which tier has how much of ``tokens[cached:]``, and is worth asking if computing goes at ``speed``."""
        loads, end = list[_Load](), cached
        ahead = sum(len(flight.tokens) for flight in self._flights)
        for tier in self._tiers:
            border = end // self.block_size * self.block_size
            stored = border + tier.peek(namespace, tokens, border)
            # inside a block that is there already, one that has less of it would spoil it
            if stored > end and tier.is_worth(stored - end, ahead, speed):
                loads.append(_Load(tier, border, stored))
                end = stored
        return loads

    def _start(self, lane: Executor, run: Callable[[], int], land: Callable[[int], None], **brings: Any) -> Flight:
        try:
            future = lane.submit(run)
        except RuntimeError:  # the interpreter ends, or the system has no more threads
            future = Future()
            future.set_result(run())
        flight = Flight(future, land, **brings)
        self._flights.append(flight)
        future.add_done_callback(lambda _: self.on_done())
        return flight


def _open_all(tiers: Sequence[Tier], namespace: bytes) -> int:
    for tier in tiers:
        tier.ask(lambda store: store.open(namespace))
    return 0


def _load_all(parts: Sequence[tuple[_Load, Transfer]], stop: threading.Event) -> int:
    """Up to where all tokens came."""
    end = parts[0][0].start if parts else 0
    for load, transfer in parts:
        if load.start > end or stop.is_set():  # the one before brought less than it had
            break
        began = time.monotonic()
        copied = load.tier.run(transfer, stop)
        if copied:
            end = load.start + copied
            load.tier.measure(copied, time.monotonic() - began)
    return end
