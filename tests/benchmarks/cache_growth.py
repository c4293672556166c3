"""How the cost of the prefix cache's bookkeeping grows: ``python -m tests.benchmarks.cache_growth``.

A :class:`KVCacheManager` is filled to its last block, then asked and used as the scheduler does it. Shown is the
processor time of single operations, median and slowest, and its share of a decode step. Two shapes: conversations of 32
blocks behind 64 shared beginnings of 8 blocks each, and the worst one, sequences of a single block that all branch at
the root: there the search stays short, but the sorted list of children is moved when one comes or goes.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable

from foreword.kv.cache import KVCacheManager
from foreword.kv.prompt_log import LoggedPrompt

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BLOCK = 16
NAMESPACE = b"growth"
OPERATIONS = ("lookup", "explain", "request", "evict")


class Traffic:
    """Prompts that share a beginning: ``own`` blocks of their own behind ``shared`` ones of several beginnings."""

    def __init__(self, shared: int, own: int, beginnings: int) -> None:
        self._random = random.Random(0)
        self._words = list(range(1_000_000))
        self._own = own
        self._heads = [self._draw(shared) for _ in range(beginnings)]

    def prompt(self, place: float) -> list[int]:
        """A new prompt; ``place`` in [0, 1) says where it is sorted among the others behind its beginning."""
        own = self._draw(self._own)
        own[0] = self._words[int(place * len(self._words))]
        return self._random.choice(self._heads) + own

    def _draw(self, blocks: int) -> list[int]:
        return self._random.choices(self._words, k=blocks * BLOCK)


SHAPES: dict[str, Callable[[], Traffic]] = {
    "conversations of 32 blocks, 64 beginnings": lambda: Traffic(8, 24, 64),
    "single blocks, all at the root": lambda: Traffic(0, 1, 1),
}


def serve(manager: KVCacheManager, tokens: list[int]) -> None:
    """One request from admission to its end."""
    match = manager.lookup(NAMESPACE, tokens, len(tokens) - 1)
    assert manager.can_allocate(match, len(tokens))
    held = manager.allocate(NAMESPACE, match, len(tokens))
    manager.log.add(LoggedPrompt("", NAMESPACE, tokens, None))
    manager.finish_copies()
    manager.release(held, tokens, len(tokens))


def measure(traffic: Traffic, num_blocks: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each operation on a full cache of ``num_blocks``."""
    manager, recent, count = KVCacheManager(num_blocks, BLOCK), list[list[int]](), 0
    while manager.evictions == 0:  # in order, which is quicker than at random
        recent = [*recent[-63:], traffic.prompt(min(count / num_blocks, 0.999))]
        serve(manager, recent[-1])
        count += 1
    seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def timed(name: str, action: Callable[[], object]) -> None:
        start = time.thread_time_ns()
        action()
        seconds[name].append((time.thread_time_ns() - start) / 1000)

    places = random.Random(1)
    for number in range(repeats):
        known, new = recent[number % len(recent)], traffic.prompt(places.random())
        timed("lookup", lambda known=known: manager.lookup(NAMESPACE, known, len(known) - 1))  # type: ignore[misc]
        changed = [*known[:BLOCK], 0, *known[BLOCK + 1 :]]
        timed("explain", lambda changed=changed: manager.explain(NAMESPACE, changed))  # type: ignore[misc]
        timed("request", lambda new=new: serve(manager, new))  # type: ignore[misc]
        timed("evict", lambda: manager._evict(1))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=30.0, help="of a decode step, to compare (default: 30)")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BLOCKS")
    options = parser.parse_args()
    print("microseconds: median (slowest), median as a share of a step of", options.step_ms, "ms")
    print("lookup: a cached prompt; explain: one that leaves it in its second block, as for every output;")
    print("request: lookup, allocate, commit, release of a new one, evictions included;")
    print("evict: one block\n")
    for shape, create in SHAPES.items():
        print(shape)
        for size in options.sizes:
            gc.collect()
            gc.disable()
            found = measure(create(), size, options.repeats)
            gc.enable()
            cells = []
            for name, values in found.items():
                middle = statistics.median(values)
                share = middle / 1000 / options.step_ms
                cells.append(f"{name} {middle:8.1f} ({max(values):9.1f}) {share:7.3%}")
            print(f"{size:>10,} blocks  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
