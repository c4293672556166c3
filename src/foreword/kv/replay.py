"""What a recorded trace would have reused under another eviction policy or with another amount of memory.

Each request looks its prompt up, takes its blocks and leaves them in the cache, one request after the other in the
order of their admission. Counted are whole blocks: the engine itself also reuses the beginning of a block, which hashes
of whole blocks cannot show.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from foreword.kv.cache import KVCacheManager
from foreword.kv.eviction import EvictionPolicy
from foreword.kv.trace import Trace, TraceRequest

Blocks = list[int]


class Replayed(NamedTuple):
    """What a replay found.

    Attributes:
        prompt_tokens: that were looked up.
        reused_tokens: of them in the cache, counted in whole blocks.
        evictions: blocks that left the cache; None for the optimum, which keeps nothing for nothing.
        too_long: requests that do not fit the pool alone. Their prompts count as looked up and not found.
    """

    prompt_tokens: int
    reused_tokens: int
    evictions: int | None
    too_long: int

    @property
    def hit_rate(self) -> float:
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(trace: Trace, policy: EvictionPolicy, num_blocks: int) -> Replayed:
    """Run a trace through a :class:`KVCacheManager` with ``policy`` and a pool of ``num_blocks``.

    A block's hash stands for its tokens: the manager is given blocks of one token each, the hash.
    """
    manager = KVCacheManager(num_blocks, 1, policy=policy)

    def run(request: TraceRequest, looked_up: int) -> int:
        namespace, blocks = request.namespace, request.blocks
        match = manager.lookup(namespace, blocks, looked_up)
        # blocks that the request generates anew although they are cached are found when it commits them
        held = manager.allocate(namespace, match, len(blocks), priority=request.priority)
        manager.release(held, blocks, len(blocks))
        return match.num_tokens

    replayed = _run_all(trace, num_blocks, run)
    return replayed._replace(evictions=manager.evictions)


def replay_optimum(trace: Trace, num_blocks: int) -> Replayed:
    """The most that any policy could have reused: Belady's MIN (Belady, 1966), which knows the future.

    It keeps the blocks that are looked up again soonest. A block is never looked up later than those behind it, so that
    what it drops are tails before heads, as a prefix cache must; hence it is the optimum of the replay's model, not
    only a bound, unless a request generated a block that was cached already: then it may be a little more than could
    be had. It is proven as for intervals: between two uses a block takes one place, each use is worth the same,
    and where there are too many, dropping the one that ends last never loses (Carlisle and Lloyd, 1995).
    """
    next_use = _next_uses(trace, num_blocks)
    kept: dict[int, int] = {}  # hash of a block: the request that looks it up next
    latest: list[tuple[int, int, int]] = []  # (-that request, -depth, hash); entries go stale
    index = -1

    def run(request: TraceRequest, looked_up: int) -> int:
        nonlocal index
        index += 1
        found = sum(block in kept for block in request.blocks[:looked_up])
        for block in request.blocks:
            kept.pop(block, None)
        while len(kept) > num_blocks - len(request.blocks):  # beside the request's own
            dropped, _, block = heapq.heappop(latest)
            if kept.get(block) == -dropped:
                del kept[block]
        for depth, (block, use) in enumerate(zip(request.blocks, next_use[index], strict=True)):
            if use is not None:
                kept[block] = use
                heapq.heappush(latest, (-use, -depth, block))
        return found

    return _run_all(trace, num_blocks, run)


def _run_all(trace: Trace, num_blocks: int, run: Callable[[TraceRequest, int], int]) -> Replayed:
    """Send every request that fits through ``run``, which gives the blocks that it found."""
    size = trace.header.block_size
    prompt_tokens = reused = too_long = 0
    for request in trace.requests:
        prompt_tokens += request.prompt
        if len(request.blocks) > num_blocks:
            too_long += 1
        elif request.blocks:
            reused += size * run(request, _looked_up(request, size))
    return Replayed(prompt_tokens, reused, None, too_long)


def _next_uses(trace: Trace, num_blocks: int) -> list[list[int | None]]:
    """For each request that fits and each of its blocks: the next such request, if it finds the block by looking up.

    One that generates the block anew makes it whether it is cached or not, so that keeping it until then gains nothing.
    """
    size = trace.header.block_size
    requests = [request for request in trace.requests if request.blocks and len(request.blocks) <= num_blocks]
    upcoming: dict[int, int | None] = {}
    uses: list[list[int | None]] = [[] for _ in requests]
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        uses[index] = [upcoming.get(block) for block in request.blocks]
        looked_up = _looked_up(request, size)
        upcoming.update(dict.fromkeys(request.blocks[:looked_up], index))
        upcoming.update(dict.fromkeys(request.blocks[looked_up:]))
    return uses


def _looked_up(request: TraceRequest, block_size: int) -> int:
    """Whole blocks of the prompt that may be reused: one token must be computed."""
    return max(0, request.prompt - 1) // block_size


def pool_sizes(trace: Trace, asked: Sequence[int] | None = None) -> list[int]:
    """The pool sizes to replay at: those asked for, or the recorded one, a half, a quarter and an eighth of it.

    Raises:
        ValueError: a size is not positive.
    """
    for size in asked or ():
        if size < 1:
            raise ValueError(f"--blocks is {size}: give at least 1")
    recorded = trace.header.num_blocks
    return list(asked) if asked else sorted({max(1, recorded // part) for part in (1, 2, 4, 8)}, reverse=True)
