# ruff: noqa: ARG002 - a protocol's arguments
"""Several tiers below the pool: each block holds what the one says that was counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foreword.kv.cache import KVCacheManager
from foreword.kv.tier import Transfer
from foreword.kv.tiers import TieredCache
from support import inline_lanes

TOKENS = list(range(64))


class Fake:
    """A store that has the first ``has`` tokens; what it loads is noted slot by slot, other slots are spoilt."""

    def __init__(self, has: int, slots: dict[tuple[int, int], int], size: int = 16) -> None:
        self.has, self.slots, self.size = has, slots, size

    def is_open(self, namespace: bytes) -> bool:
        return True

    def open(self, namespace: bytes) -> None: ...

    def behind(self, namespace: bytes, tokens: list[int], count: int) -> list[int]:
        return []

    def peek(self, namespace: bytes, tokens: list[int], start: int, limit: int) -> int:
        return max(0, min(self.has, limit) - start)

    def load(self, namespace: bytes, tokens: list[int], start: int, limit: int, blocks: Sequence[int]) -> Transfer:
        end = start + self.peek(namespace, tokens, start, limit)

        def run(_: Any) -> int:
            for number, block in enumerate(blocks):
                first = start + number * self.size
                if first < end:
                    for slot in range(self.size):
                        self.slots[block, slot] = tokens[first + slot] if first + slot < end else -1
            return end - start

        return Transfer(run, lambda: None)

    def save(self, namespace: bytes, tokens: list[int], blocks: Sequence[int]) -> Transfer:
        raise RuntimeError("planted")

    def reset(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("first", [0, 5, 10, 16, 26, 40])
@pytest.mark.parametrize("second", [0, 5, 10, 16, 21, 26, 48])
def test_a_later_tier_spoils_nothing(first: int, second: int) -> None:
    slots: dict[tuple[int, int], int] = {}
    manager = TieredCache(12, 16, lanes=inline_lanes())
    manager.put_on(Fake(first, slots), Fake(second, slots))
    manager.fetch(b"", TOKENS[:60], manager.lookup(b"", TOKENS, 60), None)
    manager.poll()
    match, count = manager.lookup(b"", TOKENS, 60), max(first, second)
    assert match.num_tokens == manager.find_stop(b"", TOKENS[:60], 9).num_tokens == manager.restored_tokens == count
    blocks = match.blocks if match.tail_block is None else [*match.blocks, match.tail_block]
    assert [slots[blocks[at // 16], at % 16] for at in range(count)] == TOKENS[:count]
    manager.check_integrity()


def test_what_was_fetched_is_shared_and_a_store_that_fails_is_left(caplog: pytest.LogCaptureFixture) -> None:
    slots: dict[tuple[int, int], int] = {}
    manager = TieredCache(12, 16, lanes=inline_lanes())
    manager.put_on(Fake(40, slots))
    manager.fetch(b"", TOKENS[:63], manager.lookup(b"", TOKENS, 63), None)
    manager.poll()
    assert (manager.lookup(b"", TOKENS, 63).num_tokens, manager.restored_tokens) == (40, 40)
    assert manager.allocator.num_held == 0
    held = manager.allocate(b"", manager.lookup(b"", TOKENS, 63), 64)
    manager.finish_copies()
    manager.retire(held, TOKENS, 64)
    assert "a tier below the KV pool failed" in caplog.text
    assert manager.find_stop(b"x", TOKENS, 9) == (0, [])
    assert manager.lookup(b"", TOKENS, 64).num_tokens == 64
    manager.check_integrity()


def test_looking_up_makes_nothing() -> None:
    manager = KVCacheManager(12, 16)
    for number in range(100):
        assert manager.lookup(bytes([number]), TOKENS, 64).num_tokens == 0
    assert not manager._trees
    held = manager.allocate(b"x", manager.lookup(b"x", TOKENS, 64), 64)
    manager.release(held, TOKENS, 64)
    assert manager.lookup(b"x", TOKENS, 64).num_tokens == 64
    assert manager.lookup(b"y", TOKENS, 64).num_tokens == 0
    manager.check_integrity()
