"""The block ledger: runs, growth, reference counts."""

from __future__ import annotations

import random

import pytest

from foreword.kv import blocks
from foreword.kv.blocks import BlockAllocator
from foreword.kv.cache import KVCacheManager


def test_a_sequence_gets_one_run() -> None:
    """Blocks come side by side where there is a run of that length, even behind smaller gaps."""
    ledger = BlockAllocator(20)
    first, second, third = ledger.allocate(3), ledger.allocate(4), ledger.allocate(3)
    ledger.release(second)
    assert ledger.allocate(10) == list(range(10, 20))
    assert ledger.allocate(4) == second
    assert (first, third) == ([0, 1, 2], [7, 8, 9])
    ledger.check_integrity()


def test_few_runs_when_no_single_one_is_long_enough() -> None:
    """A fragmented pool is served from its longest gaps first."""
    ledger = BlockAllocator(12)
    held = ledger.allocate(12)
    ledger.release([held[i] for i in (1, 3, 4, 5, 8, 9)])
    assert ledger.allocate(5) == [3, 4, 5, 8, 9]
    assert ledger.allocate(1) == [1]
    assert ledger.num_free == 0


def test_growth_continues_the_run() -> None:
    """With ``room`` asked for, a sequence grows in place while another was placed behind that room."""
    ledger = BlockAllocator(40)
    first = ledger.allocate(2, room=5)
    second = ledger.allocate(2, room=5)
    assert second[0] >= first[-1] + 1 + 5
    for sequence in (first, second):
        for _ in range(5):
            sequence += ledger.allocate(1, after=sequence[-1])
        assert sequence == list(range(sequence[0], sequence[0] + 7))
    ledger.check_integrity()


def test_growth_at_the_end_of_the_pool_wraps() -> None:
    """Behind the last block there is nothing: growth goes elsewhere."""
    ledger = BlockAllocator(6)
    blocks = ledger.allocate(6)
    ledger.release(blocks[:2])
    assert ledger.allocate(2, after=5) == [0, 1]


def test_shared_blocks_live_until_the_last_user_leaves() -> None:
    """Reference counts: free only when nobody uses the block and the tree does not hold it."""
    ledger = BlockAllocator(4)
    blocks = ledger.allocate(2)
    ledger.share(blocks)
    ledger.cache(blocks[0])
    assert (ledger.num_free, ledger.num_held, ledger.num_cached, ledger.num_evictable) == (2, 1, 1, 0)
    ledger.release(blocks)
    assert ledger.num_free == 2
    ledger.release(blocks)
    assert (ledger.num_free, ledger.num_held, ledger.num_cached, ledger.num_evictable) == (3, 0, 1, 1)
    ledger.share(blocks[:1])
    assert ledger.num_evictable == 0
    ledger.release(blocks[:1])
    ledger.uncache(blocks[0])
    assert (ledger.num_free, ledger.num_cached, ledger.num_evictable) == (4, 0, 0)
    ledger.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_found_across_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search passes over full chunks and misses no run, one across their borders neither."""
    monkeypatch.setattr(blocks, "_CHUNK", 4)
    rng = random.Random(seed)
    ledger, held = BlockAllocator(rng.randint(20, 41)), list[list[int]]()
    for _ in range(150):
        if held and rng.random() < 0.5:
            ledger.release(held.pop(rng.randrange(len(held))))
        count = rng.randint(1, 9)
        if count <= ledger.num_free:
            runs = bytes(ledger._free).split(b"\x00")
            taken = ledger.allocate(count, room=rng.choice([0, 0, 3]))
            assert len(set(taken)) == count
            if max(map(len, runs)) >= count:
                assert taken == list(range(taken[0], taken[0] + count)), "there was a run, and it was not found"
            held.append(taken)
        ledger.check_integrity()


@pytest.mark.parametrize("damage", ["double release", "lost block", "count"])
def test_the_conservation_law_notices_damage(damage: str) -> None:
    """``check_integrity`` fails on a double release, a leaked block and a wrong counter."""
    manager = KVCacheManager(4, 2)
    ledger = manager.allocator
    blocks = ledger.allocate(2)
    manager.check_integrity()
    if damage == "double release":
        ledger.release(blocks)
        ledger.release(blocks)
    elif damage == "lost block":
        ledger._users[blocks[0]] = 0
    else:
        ledger.num_free += 1
    with pytest.raises(AssertionError):
        manager.check_integrity()
