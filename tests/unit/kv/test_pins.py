"""Pins: what stays, how much may, and for how long."""

from __future__ import annotations

import pytest

from foreword.kv.cache import KVCacheManager
from foreword.kv.pins import Pinned, PinsFullError

NS = b"ns"
SYSTEM = list(range(8))  # four blocks of two


def serve(manager: KVCacheManager, tokens: list[int], namespace: bytes = NS) -> int:
    match = manager.lookup(namespace, tokens, len(tokens) - 1)
    assert manager.can_allocate(match, len(tokens))
    held = manager.allocate(namespace, match, len(tokens))
    manager.finish_copies()
    manager.release(held, tokens, len(tokens))
    return match.num_tokens


def cached(manager: KVCacheManager, tokens: list[int]) -> int:
    return manager.lookup(NS, tokens, len(tokens)).num_tokens


def flood(manager: KVCacheManager) -> None:
    """Traffic of several pool sizes that never returns."""
    for number in range(40):
        serve(manager, [1000 + 10 * number + i for i in range(8)])
        manager.check_integrity()


def pool(**options: int) -> KVCacheManager:
    manager = KVCacheManager(16, 2, **options)
    serve(manager, SYSTEM)
    return manager


def test_a_pinned_prefix_outlives_any_traffic() -> None:
    """Without the pin the same traffic drives it out; after the unpin too."""
    manager = pool()
    flood(manager)
    assert cached(manager, SYSTEM) == 0
    manager = pool()
    assert manager.pin(NS, SYSTEM, now_s=0.0) == Pinned(8, 4)
    assert (manager.pins.num_blocks, manager.num_available) == (4, 12)
    flood(manager)
    assert cached(manager, SYSTEM) == 8
    assert manager.unpin(NS, SYSTEM)
    assert manager.num_available == 16
    flood(manager)
    assert cached(manager, SYSTEM) == 0


def test_pinned_blocks_count_as_not_available() -> None:
    """A request that would need them is told that there is no room; one that shares them needs only the rest."""
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=0.0)
    other = list(range(100, 126))
    assert not manager.can_allocate(manager.lookup(NS, other, 25), 26)
    longer = SYSTEM + other[:24]
    assert manager.can_allocate(manager.lookup(NS, longer, 31), 32)
    serve(manager, longer)
    assert manager.evictions == 0


def test_a_prefix_that_ends_inside_a_block_pins_that_block() -> None:
    """The whole block stays, with what lies behind the prefix in it; the blocks after it may go."""
    manager = pool()
    assert manager.pin(NS, SYSTEM[:5], now_s=0.0) == Pinned(5, 3)
    assert manager.reset() == 1
    assert cached(manager, SYSTEM) == 6


def test_a_part_filled_last_block_stays_though_a_fuller_one_comes() -> None:
    """Unpinned it goes when the same tokens come with more behind them; a pin keeps it."""
    for pinned in (False, True):
        manager = KVCacheManager(16, 4)
        serve(manager, [1, 2, 3, 4, 5])
        if pinned:
            assert manager.pin(NS, [1, 2, 3, 4, 5], now_s=0.0) == Pinned(5, 2)
        serve(manager, [1, 2, 3, 4, 5, 6, 7])
        assert manager.allocator.num_cached == 2 + pinned
        manager.check_integrity()


def test_what_is_not_cached_cannot_be_pinned() -> None:
    """A pin says how many tokens it holds; of another namespace it holds none, and nothing is to be unpinned."""
    manager = pool()
    assert manager.pin(NS, [*SYSTEM, 99, 98, 97], now_s=0.0) == Pinned(8, 4)
    assert manager.pin(b"other", SYSTEM, now_s=0.0) == Pinned(0, 0)
    assert manager.pin(NS, [5, 5], now_s=0.0) == Pinned(0, 0)
    assert not manager.unpin(b"other", SYSTEM)
    assert not manager.unpin(NS, SYSTEM)
    assert manager.unpin(NS, [*SYSTEM, 99, 98, 97])
    assert len(manager.pins) == 0


def test_pins_are_counted() -> None:
    """Pinned twice takes two unpins; a second pin covers what has been cached since."""
    manager = pool()
    longer = [*SYSTEM, 20, 21, 22, 23]
    assert manager.pin(NS, longer[:10], now_s=0.0) == Pinned(8, 4)
    serve(manager, longer)
    with pytest.raises(ValueError, match="would need 1 more"):
        manager.pin(NS, longer[:10], now_s=0.0)
    manager.pins.max_blocks = 8
    assert manager.pin(NS, longer[:10], now_s=0.0) == Pinned(10, 5)
    assert manager.unpin(NS, longer[:10])
    assert manager.pins.num_blocks == 5
    assert manager.unpin(NS, longer[:10])
    assert manager.pins.num_blocks == 0
    assert not manager.unpin(NS, longer[:10])
    manager.check_integrity()


def test_nested_prefixes_share_their_blocks() -> None:
    """A block counts once, however many pins hold it, and stays until the last of them goes."""
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=0.0)
    manager.pin(NS, SYSTEM[:4], now_s=0.0)
    assert manager.pins.num_blocks == 4
    manager.unpin(NS, SYSTEM)
    assert manager.pins.num_blocks == 2
    flood(manager)
    assert cached(manager, SYSTEM) == 4


def test_the_cap_names_sizes() -> None:
    """A pin that would pass it is refused and changes nothing; the default is a quarter of the pool."""
    manager = pool()
    assert manager.pins.max_blocks == 4
    serve(manager, [50, 51, 52, 53])
    manager.pin(NS, SYSTEM[:6], now_s=0.0)
    with pytest.raises(PinsFullError) as refused:
        manager.pin(NS, [50, 51, 52, 53], now_s=0.0)
    assert (refused.value.needed, refused.value.pinned, refused.value.most) == (2, 3, 4)
    manager.check_integrity()
    assert (manager.pins.num_blocks, len(manager.pins)) == (3, 1)
    assert manager.pin(NS, SYSTEM[:2], now_s=0.0) == Pinned(2, 1)  # needs no block more
    with pytest.raises(PinsFullError, match="pins may hold 0 blocks"):
        pool(max_pinned_blocks=0).pin(NS, SYSTEM, now_s=0.0)


def test_a_renewed_pin_counts_once() -> None:
    """However often a cache point is used; and what was pinned besides neither ends with it nor keeps it."""
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=0.0, ttl_s=5.0, renewed=True)
    manager.pin(NS, SYSTEM, now_s=4.0, ttl_s=5.0, renewed=True)
    manager.pin(NS, SYSTEM, now_s=4.0)
    assert manager.unpin(NS, SYSTEM)
    assert not manager.unpin(NS, SYSTEM)
    manager.expire_pins(8.9)
    assert (manager.pins.num_blocks, len(manager.pins)) == (4, 1)
    manager.expire_pins(9.0)
    assert manager.pins.num_blocks == 0
    manager.check_integrity()


def test_a_pin_lapses() -> None:
    """After its time it holds nothing, room for others included; pinned again, the longer time counts."""
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=10.0, ttl_s=5.0)
    manager.expire_pins(14.9)
    assert manager.pins.num_blocks == 4
    manager.pin(NS, SYSTEM, now_s=14.9, ttl_s=1.0)  # until 15.9, but twice
    manager.expire_pins(15.0)
    assert manager.pins.num_blocks == 4
    serve(manager, [50, 51])
    assert manager.pin(NS, [50, 51], now_s=16.0) == Pinned(2, 1)  # lapsed meanwhile: there is room
    assert not manager.unpin(NS, SYSTEM)
    manager.pin(NS, [50, 51], now_s=16.0, ttl_s=1.0)
    manager.expire_pins(1e9)
    assert manager.pins.num_blocks == 1, "once pinned without an end it has none"
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="ttl"):
            manager.pin(NS, SYSTEM, now_s=0.0, ttl_s=wrong)


def test_renewing_a_pin_for_ever_leaves_no_trace() -> None:
    """Stale deadlines do not pile up."""
    manager = pool()
    for second in range(5000):
        manager.pin(NS, SYSTEM, now_s=float(second), ttl_s=1e6)
        manager.unpin(NS, SYSTEM)
    assert len(manager.pins._deadlines) < 200


def test_the_queue_does_not_meet_pinned_leaves_again() -> None:
    """A pinned leaf leaves the eviction queue when it is met, and comes back with the unpin: no scan of pins."""
    manager = KVCacheManager(400, 2, max_pinned_blocks=400)
    for number in range(100):
        serve(manager, [10 * number, 10 * number + 1])
        manager.pin(NS, [10 * number, 10 * number + 1], now_s=0.0)
    serve(manager, [5000 + i for i in range(500)])
    serve(manager, [6000 + i for i in range(200)])
    assert manager.evictions == 50
    assert len(manager._queue) == 2
    manager.unpin(NS, [0, 1])
    assert len(manager._queue) == 3
    manager._evict(1)
    assert cached(manager, [0, 1]) == 0


def test_a_reset_spares_pins() -> None:
    """What was pinned was meant to stay; unpinned it goes as well."""
    manager = pool()
    serve(manager, [50, 51, 52])
    manager.pin(NS, SYSTEM, now_s=0.0)
    assert manager.reset() == 2
    assert cached(manager, SYSTEM) == 8
    manager.unpin(NS, SYSTEM)
    assert manager.reset() == 4


def test_a_pin_survives_splits_and_its_own_branches() -> None:
    """Others branch off inside the pinned run; the run stays whole, and the unpin finds what became of it."""
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=0.0)
    for cut in (2, 4, 6):
        serve(manager, [*SYSTEM[:cut], 70 + cut, 71 + cut])
        manager.check_integrity()
    flood(manager)
    assert cached(manager, SYSTEM) == 8
    manager.unpin(NS, SYSTEM)
    flood(manager)
    assert cached(manager, SYSTEM) == 0


def test_damage_is_noticed() -> None:
    """``check_integrity`` fails when a pin holds no reference, or a count is wrong."""
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=0.0)
    manager.allocator.release(manager.lookup(NS, SYSTEM, 8).blocks)
    with pytest.raises(AssertionError, match="a pin holds nothing"):
        manager.check_integrity()
    manager = pool()
    manager.pin(NS, SYSTEM, now_s=0.0)
    manager.pins._counts[manager.lookup(NS, SYSTEM, 8).blocks[0]] = 2
    with pytest.raises(AssertionError, match="miscounted"):
        manager.check_integrity()
