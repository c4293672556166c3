"""Which cached blocks go first."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from foreword.kv.cache import KVCacheManager
from foreword.kv.eviction import (
    POLICIES,
    QUADRATIC_BLOCKS,
    EvictionPolicy,
    EvictionQueue,
    NodeStats,
    cost_aware,
    create_policy,
    lfu,
    lru,
    segmented_lru,
)
from foreword.kv.table import BlockTable
from foreword.kv.tree import Node

NS = b"ns"


def serve(
    manager: KVCacheManager, tokens: list[int], *, keep_running: bool = False, priority: int = 0
) -> tuple[int, BlockTable]:
    """Compute ``tokens`` as a request; gives the tokens that were cached."""
    match = manager.lookup(NS, tokens, len(tokens) - 1)
    assert manager.can_allocate(match, len(tokens))
    held = manager.allocate(NS, match, len(tokens), priority=priority)
    manager.finish_copies()
    manager.commit(held, tokens, len(tokens))
    if not keep_running:
        manager.release(held, tokens, len(tokens))
    return match.num_tokens, held


def cached(manager: KVCacheManager, tokens: list[int]) -> int:
    return manager.lookup(NS, tokens, len(tokens)).num_tokens


def test_tails_go_before_heads() -> None:
    """A cached sequence shrinks from its end, one block at a time."""
    manager = KVCacheManager(10, 2)
    old = list(range(12))
    serve(manager, old)
    for taken in range(1, 7):
        manager._evict(1)
        assert cached(manager, old) == 12 - 2 * taken
    assert manager.evictions == 6


def test_only_as_much_goes_as_is_needed() -> None:
    """Pressure evicts little by little, never the whole cache."""
    manager = KVCacheManager(20, 2)
    for start in range(0, 40, 10):
        serve(manager, list(range(start, start + 10)))
    assert manager.allocator.num_free == 0
    serve(manager, [100, 101, 102, 103])
    assert manager.evictions == 2
    assert manager.allocator.num_cached == 20


def test_leaves_go_before_what_they_hang_on() -> None:
    """A shared head outlives its branches, although it is older."""
    manager = KVCacheManager(12, 2)
    head = [1, 2, 3, 4]
    serve(manager, head)
    for branch in range(3):
        serve(manager, [*head, 10 * branch + 5, 10 * branch + 6])
    manager._evict(3)
    assert cached(manager, head) == 4
    manager._evict(2)
    assert cached(manager, head) == 0


def test_blocks_in_use_never_go() -> None:
    """What a running sequence uses stays, what merely hangs on it goes."""
    manager = KVCacheManager(8, 2)
    serve(manager, list(range(16)))
    _, held = serve(manager, [0, 1, 2, 3, 50], keep_running=True)
    assert manager.num_available == 5
    assert manager.reset() == 5
    assert cached(manager, list(range(16))) == 4
    assert cached(manager, [0, 1, 2, 3, 50]) == 4
    manager.check_integrity()
    manager.release(held, [0, 1, 2, 3, 50], 5)
    assert cached(manager, [0, 1, 2, 3, 50]) == 5


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Among leaves of one segment the order is that of last use."""
    manager = KVCacheManager(6, 2, policy=lru)
    a, b, c = [0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]
    for tokens in (a, b, c, a, c):
        serve(manager, tokens)
    serve(manager, [30, 31, 32, 33])
    assert [cached(manager, tokens) for tokens in (a, b, c)] == [4, 0, 4]


def run_scan(policy: EvictionPolicy) -> int:
    """Tokens hit by a system prompt, reused once, that returns between scans of prompts that never do."""
    manager = KVCacheManager(40, 2, policy=policy)
    system, hits = list(range(20)), 0
    rng = random.Random(0)
    serve(manager, [*system, 999])
    for round_number in range(30):
        hits += serve(manager, [*system, 1000 + round_number])[0]
        for _ in range(3):
            serve(manager, [rng.randint(2000, 10**6) for _ in range(30)])
    return hits


def test_slru_outlives_a_scan() -> None:
    """What was reused survives a burst of prompts that never return; under plain LRU the burst drives it out."""
    assert run_scan(segmented_lru) == 30 * 20
    assert run_scan(lru) == 20


def test_an_abandoned_favourite_leaves_in_the_end() -> None:
    """Protection is bounded: after eight pool sizes of other traffic a shared prefix goes too."""
    manager = KVCacheManager(20, 2)
    favourite = list(range(10))
    for number in range(5):
        serve(manager, [*favourite, 50 + number])
    for number in range(20):
        serve(manager, [1000 + number * 10 + i for i in range(10)])
    assert cached(manager, favourite) == 10
    for number in range(50):
        serve(manager, [1000 + number * 10 + i for i in range(10)])
    assert cached(manager, favourite) == 0


def test_policies_are_pure_and_order_by_use() -> None:
    """Later is kept longer; reuse lifts a node above those without, branches above both, for a bounded time."""
    fresh, reused, shared = NodeStats(100, 0, 10), NodeStats(100, 3, 10), NodeStats(100, 3, 10, branches=1)
    assert lru(fresh) == lru(reused) == lru(shared)
    assert segmented_lru(fresh) < segmented_lru(NodeStats(101, 0, 10)) < segmented_lru(reused) < segmented_lru(shared)
    assert segmented_lru(NodeStats(111, 0, 10)) > segmented_lru(reused)
    assert segmented_lru(NodeStats(181, 0, 10)) > segmented_lru(shared)


def test_a_conversation_does_not_branch_and_a_system_prompt_does() -> None:
    """Each turn goes on behind the last one, part-filled blocks included; another conversation goes another way."""
    manager, history = KVCacheManager(50, 4), [1, 2, 3, 4, 5]
    for turn in range(6):
        serve(manager, history)
        history = [*history, *range(100 * turn + 10, 100 * turn + 13)]
    assert {node.branches for node in manager._trees[NS].nodes()} == {0}
    serve(manager, [1, 2, 3, 4, 900, 901])
    serve(manager, [1, 2, 3, 4, 800, 801])
    branched = [node for node in manager._trees[NS].nodes() if node.branches]
    assert [(node.tokens, node.branches) for node in branched] == [([1, 2, 3, 4], 2)]


def test_lfu_keeps_what_is_used_most_and_forgets() -> None:
    """More uses are kept longer; what was often used long ago is overtaken by what is used now."""
    assert lfu(NodeStats(1, 5, 10)) > lfu(NodeStats(9, 4, 10))
    manager = KVCacheManager(6, 2, policy=lfu)
    often, once = [0, 1, 2, 3], [10, 11, 12, 13]
    for tokens in (once, often, often, often):
        serve(manager, tokens)
    serve(manager, [20, 21, 22, 23])
    serve(manager, [30, 31, 32, 33])
    assert [cached(manager, tokens) for tokens in (often, once)] == [4, 0]
    for number in range(30):  # each new one, used twice, ages the rest
        serve(manager, [100 + 4 * number + i for i in range(4)])
        serve(manager, [100 + 4 * number + i for i in range(4)])
    assert cached(manager, often) == 0


def test_cost_counts_depth() -> None:
    """Of two blocks used as often the deeper one, which costs more to compute, is kept; uses outweigh depth."""
    shallow, deep = NodeStats(5, 1, 10, depth=1), NodeStats(5, 1, 10, depth=QUADRATIC_BLOCKS)
    assert cost_aware(shallow) < cost_aware(deep) == pytest.approx(4.0)
    assert cost_aware(deep) < cost_aware(NodeStats(5, 9, 10, depth=1))
    assert cost_aware(NodeStats(5, 0, 10, age=7.0)) > cost_aware(deep)


def test_a_lower_priority_goes_first_whatever_the_policy() -> None:
    """Priorities form classes; within one the policy decides. Reuse lifts a prefix to the priority of who reuses it."""
    for policy in POLICIES.values():
        manager = KVCacheManager(12, 2, policy=policy)
        scan, plain, dear = [0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]
        serve(manager, dear, priority=1)
        serve(manager, plain)
        for _ in range(5):
            serve(manager, scan, priority=-1)
        manager._evict(2)
        assert [cached(manager, tokens) for tokens in (scan, plain, dear)] == [0, 4, 4]
        manager._evict(2)
        assert [cached(manager, tokens) for tokens in (plain, dear)] == [0, 4]
        serve(manager, plain)
        serve(manager, plain, priority=2)
        manager._evict(2)
        assert [cached(manager, tokens) for tokens in (plain, dear)] == [4, 0]


def test_a_continuation_of_another_priority_is_a_node_of_its_own() -> None:
    """What a plain request adds behind a dear beginning does not become dear with it."""
    manager = KVCacheManager(12, 2)
    match = manager.lookup(NS, [1, 2], 1)
    held = manager.allocate(NS, match, 2, priority=3)
    manager.commit(held, [1, 2], 2)
    held.priority = 0
    manager.grow(held, 4)
    manager.commit(held, [1, 2, 3, 4], 4)
    manager.release(held, [1, 2, 3, 4], 4)
    serve(manager, [7, 8], priority=1)
    manager._evict(1)
    assert cached(manager, [1, 2, 3, 4]) == 2
    manager._evict(1)
    assert (cached(manager, [1, 2]), cached(manager, [7, 8])) == (2, 0)


def test_policies_by_name_and_of_ones_own() -> None:
    """A name, or a function of the statistics; anything else is refused, naming the option."""
    assert create_policy("slru") is segmented_lru
    assert list(POLICIES) == ["slru", "lru", "lfu", "cost"]
    seen: list[NodeStats] = []

    def newest_first(stats: NodeStats) -> float:
        seen.append(stats)
        return -stats.last_access

    manager = KVCacheManager(6, 2, policy=create_policy(newest_first))
    a, b = [0, 1, 2, 3], [10, 11, 12, 13]
    for tokens in (a, b):
        serve(manager, tokens)
    manager._evict(3)
    assert [cached(manager, tokens) for tokens in (a, b)] == [2, 0]
    assert {stats.depth for stats in seen} == {1, 2}
    wrong: Any
    for wrong in ("fifo", None, 5):
        with pytest.raises(ValueError, match=r"eviction_policy=.*slru"):
            create_policy(wrong)


@pytest.mark.parametrize("fault", ["raises", "nan", "text"])
def test_a_policy_that_fails_gives_way_to_lru(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and nobody's request ends."""

    def policy(_: NodeStats) -> Any:
        return 1 / 0 if fault == "raises" else {"nan": float("nan"), "text": "last"}[fault]

    with caplog.at_level(logging.ERROR, logger="foreword"):
        guarded = create_policy(policy)
        assert [guarded(NodeStats(5, 1, 10)), guarded(NodeStats(6, 1, 10))] == [5, 6]
    assert [record.message for record in caplog.records if "eviction policy failed" in record.message] == [
        caplog.records[0].message
    ]


def test_the_queue_moves_entries() -> None:
    """Pushing again moves an entry, discarding drops it, equals leave in order of arrival; stale ones are purged."""
    queue: EvictionQueue[str] = EvictionQueue()
    for name, priority in (("a", 3), ("b", 1), ("c", 1), ("d", 2), ("a", 0)):
        queue.push(name, priority)
    queue.discard("d")
    queue.discard("unknown")
    assert len(queue) == 3
    assert [queue.pop(), queue.pop(), queue.pop(), queue.pop()] == ["a", "b", "c", None]
    for turn in range(10_000):
        queue.push("x", turn)
    assert len(queue._heap) < 200, "stale entries pile up"
    assert queue.pop() == "x"


def test_reset_forgets_and_reports() -> None:
    """After a reset nothing is matched and every block is free."""
    manager = KVCacheManager(10, 4)
    serve(manager, list(range(18)))
    assert manager.reset() == 5
    assert cached(manager, list(range(18))) == 0
    assert manager.allocator.num_free == 10
    assert not any(isinstance(node, Node) for tree in manager._trees.values() for node in tree.nodes())
