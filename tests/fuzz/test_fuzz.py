"""20,000 random operations on real engines: outputs equal to the bit, every block back, no thread or memory left.

In four parts, which several processes can share.
"""

from __future__ import annotations

import gc
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cases import KINDS, Population
from .driver import World, fuzz, make_plan, resident_bytes
from .operations import OPERATIONS

OPERATIONS_OF_A_SEED = 5_000
AGAIN = {1: 1500}
"""By seed: of its operations, those that happen a second time."""
TOLERATED_BYTES = 16 * 2**20
"""Growth of the process while operations happen again whose references are there: fragments of the allocators."""


@pytest.fixture
def world(tiny_dir: Path) -> Iterator[World]:
    world = World(tiny_dir)
    yield world
    world.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_random_operations(world: World, seed: int) -> None:
    """In epochs that are stepped, free, and driven by three threads, with and without a disk tier."""
    threads = set(threading.enumerate())
    repeated = AGAIN.get(seed, 0)
    summary = fuzz(world, seed, OPERATIONS_OF_A_SEED - repeated)
    before = resident_bytes()
    again = fuzz(world, seed, repeated)
    grown = resident_bytes() - before
    for failure in summary.failures + again.failures:
        raise failure
    assert set(summary.names) == set(OPERATIONS), "an operation never happened"
    totals = world.totals
    rare = ("preemptions", "errors raised", "disk errors raised", "pins dropped", "prompts in another spelling")
    assert min(totals[name] for name in (*rare, "evictions", "tokens_reused", "tokens_restored")) > 2, totals
    assert min(totals["completions compared in full"], totals["completions interrupted"]) > OPERATIONS_OF_A_SEED // 20
    assert grown < TOLERATED_BYTES
    left = {thread for thread in threading.enumerate() if thread.name.startswith("foreword")} - threads
    assert left == world.reference.threads()


def test_an_epoch_leaves_no_memory(world: World) -> None:
    """The same epoch over and over: from the second time on, what Python holds is the same but for 32 KiB."""
    plans = (make_plan(1, epoch, most=100) for epoch in range(99))
    plan = next(plan for plan in plans if plan.mode == "stepped" and plan.path.cost == 1)
    world.run(plan)
    world.run(plan)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            world.run(plan)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[2] - sizes[1] < 32 * 2**10, sizes


def test_the_same_seed_gives_the_same_operations() -> None:
    """A plan depends on its seed and number alone; other numbers and seeds give others."""
    assert make_plan(3, 4) == make_plan(3, 4)
    assert len({str(make_plan(seed, epoch)) for seed in range(3) for epoch in range(5)}) == 15


def test_the_population_asks_for_everything() -> None:
    """Every kind of sampling, several completions, turns of conversations, text, equal prompts."""
    population, rng = Population(1), random.Random(0)
    cases = [population.draw(rng) for _ in range(2000)]
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.n for case in cases} == {1, 2, 3}
    assert any(case.base is not None and case.base.base is not None for case in cases)
    assert any(case.as_text for case in cases)
    prompts = {str(case.own_prompt()) for case in set(cases) if case.base is None}
    assert len(prompts) < len({case.number for case in cases if case.base is None})
