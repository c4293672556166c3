"""The index half of the KV cache against a plain model: what every slot holds, and what every lookup must find."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.core.common_prefix import common_prefix_length
from foreword.kv.cache import KVCacheManager
from foreword.kv.eviction import POLICIES, EvictionPolicy, NodeStats, create_policy
from foreword.kv.pins import PinKey, PinsFullError
from foreword.kv.table import BlockTable
from foreword.kv.tree import Node

Content = tuple[bytes, tuple[int, ...]]
"""What a slot holds: the KV of the last of these tokens behind the others, in a namespace."""


def reference_common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def keep_the_oldest(stats: NodeStats) -> float:
    """A user's own policy, and a foolish one: the value of a node sinks when it is used."""
    return -stats.last_access


EVICTION: list[EvictionPolicy] = [*POLICIES.values(), create_policy(keep_the_oldest)]


@dataclass
class PinModel:
    """What must stay: tokens of a namespace, the blocks that hold them, how often pinned, and until when."""

    num_tokens: int
    blocks: list[int]
    times: int
    deadline_s: float


@dataclass(eq=False)
class Live:
    namespace: bytes
    tokens: list[int]
    held: BlockTable
    computed: int


class CacheModel:
    """A cache manager, what its slots hold, and the operations a scheduler may do, with choices from ``rng``."""

    def __init__(self, rng: random.Random) -> None:
        self.size = rng.choice([1, 2, 4, 16])
        self.num_blocks = rng.randint(3, 24)
        self.enabled = rng.random() < 0.9
        self.max_pinned = rng.choice([0, 1, 3, self.num_blocks // 2, self.num_blocks])
        self.manager = KVCacheManager(
            self.num_blocks,
            self.size,
            policy=rng.choice(EVICTION),
            enable_prefix_caching=self.enabled,
            max_pinned_blocks=self.max_pinned,
        )
        self.pins: dict[PinKey, PinModel] = {}
        self.now_s = 0.0
        self.content: dict[tuple[int, int], Content] = {}
        self.live: list[Live] = []

    # -- operations --------------------------------------------------------------------------------------------

    def arrive(self, rng: random.Random) -> None:
        """Look up, then allocate if there is room, as the scheduler does."""
        namespace = rng.choice([b"a", b"a", b"b"])
        tokens = self._draw_tokens(rng, namespace)
        limit = rng.choice([0, len(tokens), len(tokens) - 1, len(tokens) - 1])
        match = self.manager.lookup(namespace, tokens, limit)
        expected = self._longest_cached(namespace, tokens[:limit]) if self.enabled else 0
        assert match.num_tokens == expected, "matched != longest common prefix with what is cached"
        assert len(match.blocks) == expected // self.size
        assert (match.tail_block is None) == (expected % self.size == 0)
        if rng.random() < 0.2:
            match = match.whole_blocks(self.size)
        watermark = rng.choice([0, 0, 1, 2])
        if not self.manager.can_allocate(match, len(tokens), watermark):
            return
        evictions, free = self.manager.evictions, self.manager.allocator.num_free
        held = self.manager.allocate(namespace, match, len(tokens), rng.randint(0, 40), rng.choice([0, 0, 0, -1, 1]))
        assert self.manager.num_available >= watermark, "can_allocate promised more than was left"
        fresh = len(held.blocks) - len(match.blocks)
        assert self.manager.evictions - evictions == max(0, fresh - free), "evicted more or less than was needed"
        assert held.cached_tokens == match.num_tokens
        assert len(set(held.blocks)) == len(held.blocks) == -(-len(tokens) // self.size)
        self.live.append(Live(namespace, tokens, held, match.num_tokens))

    def compute(self, rng: random.Random) -> None:
        """A step: copies, then a chunk of one sequence (its next token if its prompt is done), then commit."""
        live = rng.choice(self.live)
        if live.computed == len(live.tokens):
            if not self.manager.can_grow(live.held, live.computed + 1):
                return
            self.manager.grow(live.held, live.computed + 1)
            live.tokens.append(rng.randint(0, 2))
        self._carry_out_copies()
        end = rng.randint(live.computed + 1, len(live.tokens))
        for position in range(live.computed, end):
            block = live.held.blocks[position // self.size]
            assert self.manager.allocator.users(block) == 1, "about to write into a block that others use"
            assert not self.manager.allocator._cached[block], "about to write into a cached block"
            self.content[block, position % self.size] = (live.namespace, tuple(live.tokens[: position + 1]))
        live.computed = end
        self.manager.commit(live.held, live.tokens, end)

    def fork(self, rng: random.Random) -> None:
        """A second owner of what is computed, copies of earlier forks done or not."""
        live = rng.choice(self.live)
        if live.computed < len(live.tokens):
            return
        held = self.manager.fork(live.held, live.computed)
        if held is None:
            assert live.computed % self.size
            assert self.manager.num_available == 0
            return
        self.live.append(Live(live.namespace, list(live.tokens), held, live.computed))

    def leave(self, rng: random.Random) -> None:
        """Finish, cancel or preempt (release), or fail (discard)."""
        live = self.live.pop(rng.randrange(len(self.live)))
        if rng.random() < 0.25:
            self.manager.discard(live.held)
            return
        waits = bool({copy.target for copy in self.manager.take_copies()} & set(live.held.blocks))
        self.manager.release(live.held, live.tokens, live.computed)
        if self.enabled and not waits:
            found = self.manager.lookup(live.namespace, live.tokens, live.computed)
            assert found.num_tokens == live.computed, "what was computed is not found again"

    def step_fails(self, _: random.Random) -> None:
        """The copies are never carried out, and every sequence that waited for one fails."""
        targets = {copy.target for copy in self.manager.take_copies()}
        failed = [live for live in self.live if targets & set(live.held.blocks)]
        self.manager.finish_copies()
        for live in failed:
            self.live.remove(live)
            self.manager.discard(live.held)

    def pin(self, rng: random.Random) -> None:
        """Pin a prefix, cached or not; more than the cap is refused and changes nothing."""
        namespace = rng.choice([b"a", b"a", b"b"])
        tokens = list(rng.choice(list(self.pins))[1]) if self.pins and rng.random() < 0.3 else None
        tokens = tokens or self._draw_tokens(rng, namespace)
        ttl_s, renewed = rng.choice([(None, False), (1.0, False), (5.0, False), (1.0, True), (5.0, True)])
        self._forget_lapsed()
        match = self.manager.lookup(namespace, tokens, len(tokens))
        expected = match.num_tokens
        blocks = match.blocks + ([] if match.tail_block is None else [match.tail_block])
        earlier = {block for pin in self.pins.values() for block in pin.blocks}
        if set(blocks) - earlier and len(earlier | set(blocks)) > self.max_pinned:
            with pytest.raises(PinsFullError):
                self.manager.pin(namespace, tokens, now_s=self.now_s, ttl_s=ttl_s, renewed=renewed)
            return
        pinned = self.manager.pin(namespace, tokens, now_s=self.now_s, ttl_s=ttl_s, renewed=renewed)
        assert pinned == (expected, len(blocks))
        if blocks:
            model = PinModel(expected, blocks, 1, float("inf") if ttl_s is None else self.now_s + ttl_s)
            key = PinKey(namespace, tuple(tokens), renewed)
            before = self.pins.pop(key, None)
            if before is not None:
                model.times += 0 if renewed else before.times
                model.deadline_s = max(model.deadline_s, before.deadline_s)
            self.pins[key] = model

    def unpin(self, rng: random.Random) -> None:
        """Take a pin back, once; of what is not pinned nothing can be taken."""
        assert not self.manager.unpin(b"a", [7, 7, 7])
        taken = [key for key in self.pins if not key.renewed]
        if not taken:
            return
        key = rng.choice(taken)
        assert self.manager.unpin(key[0], list(key[1]))
        self.pins[key].times -= 1
        if not self.pins[key].times:
            del self.pins[key]

    def drop_oldest_pin(self, _: random.Random) -> None:
        """What was pinned first goes first."""
        assert self.manager.drop_oldest_pin() == bool(self.pins)
        if self.pins:
            del self.pins[next(iter(self.pins))]

    def time_passes(self, rng: random.Random) -> None:
        """Pins lapse when the clock is shown."""
        self.now_s += rng.choice([0.5, 1.0, 3.0])
        self.manager.expire_pins(self.now_s)
        self._forget_lapsed()

    def _forget_lapsed(self) -> None:
        self.pins = {key: pin for key, pin in self.pins.items() if pin.deadline_s > self.now_s}

    def reset(self, _: random.Random) -> None:
        """After a reset only blocks in use or pinned stay cached."""
        unused = self.manager.allocator.num_evictable
        assert self.manager.reset() == unused
        assert self.manager.allocator.num_evictable == 0

    def drain(self) -> None:
        """When all have left and the cache is reset, every block is free again."""
        for live in self.live:
            self.manager.release(live.held, live.tokens, live.computed)
        self.manager.finish_copies()
        while any(not key.renewed for key in self.pins):
            self.unpin(random.Random(0))
        self.now_s += 10.0  # renewed pins end with their time only
        self.manager.expire_pins(self.now_s)
        self.manager.reset()
        self.manager.check_integrity()
        assert self.manager.allocator.num_free == self.num_blocks, "blocks leaked"

    def _draw_tokens(self, rng: random.Random, namespace: bytes) -> list[int]:
        """A prompt that often begins like something cached or live."""
        known = [path for path, _ in self._nodes(namespace)] + [live.tokens for live in self.live]
        base = rng.choice(known) if known and rng.random() < 0.7 else []
        base = base[: rng.randint(0, len(base))] if rng.random() < 0.7 else base
        rest = [rng.randint(0, 2) for _ in range(rng.randint(1, 4 * self.size))]
        return (base + rest)[: self.num_blocks * self.size]

    def _carry_out_copies(self) -> None:
        for source, target, count in self.manager.take_copies():
            for slot in range(count):
                self.content[target, slot] = self.content[source, slot]
        self.manager.finish_copies()

    # -- what must hold after each -----------------------------------------------------------------------------

    def check(self) -> None:
        self.manager.check_integrity()
        self._check_references()
        unwritten = {(c.target, slot) for c in self.manager.take_copies() for slot in range(c.num_tokens)}
        for live in self.live:
            assert live.held.runs == reference_runs(live.held.blocks)
            for position in range(live.computed):
                place = (live.held.blocks[position // self.size], position % self.size)
                if place not in unwritten:
                    assert self.content[place] == (live.namespace, tuple(live.tokens[: position + 1]))
        for namespace in (b"a", b"b"):
            for path, node in self._nodes(namespace):
                for offset in range(len(node.tokens)):
                    place = (node.blocks[offset // self.size], offset % self.size)
                    assert place not in unwritten, "the tree holds a block that is not written yet"
                    wanted = (namespace, tuple(path[: node.start + offset + 1]))
                    assert self.content[place] == wanted, "the tree holds a block with other tokens' KV"
                if not node.children and not self.manager.pins.count(node.blocks[-1]):
                    assert node in self.manager._queue, "a leaf is lost to eviction"
        for (namespace, tokens, _), pin in self.pins.items():
            found = self.manager.lookup(namespace, list(tokens), pin.num_tokens)
            assert found.num_tokens == pin.num_tokens or not self.enabled, "what is pinned was evicted"

    def _check_references(self) -> None:
        """A block has as many users as live sequences and unfinished copies name it."""
        uses = Counter(block for live in self.live for block in live.held.blocks)
        uses.update(copy.source for copy in self.manager.take_copies())
        uses.update(block for pin in self.pins.values() for block in pin.blocks)
        assert uses == {b: n for b in range(self.num_blocks) if (n := self.manager.allocator.users(b))}

    def _nodes(self, namespace: bytes) -> Iterator[tuple[list[int], Node]]:
        """Every node with the whole token sequence down to its end, read by walking the tree."""
        tree = self.manager._trees.get(namespace)
        pending = [(list[int](), tree.root)] if tree else []
        while pending:
            path, node = pending.pop()
            for child in node.children:
                pending.append((path + child.tokens, child))
                yield pending[-1]

    def _longest_cached(self, namespace: bytes, tokens: list[int]) -> int:
        return max((reference_common(path, tokens) for path, _ in self._nodes(namespace)), default=0)


def reference_runs(blocks: list[int]) -> list[tuple[int, int]]:
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][-1] + 1 == block:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [(run[0], len(run)) for run in runs]


SEEDS = st.integers(0, 2**32).map(random.Random)
SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


class CacheMachine(RuleBasedStateMachine):
    """The operations in any order; a failure shrinks to the shortest one."""

    @initialize(rng=SEEDS)
    def create(self, rng: random.Random) -> None:
        self.model = CacheModel(rng)

    @rule(rng=SEEDS)
    def arrive(self, rng: random.Random) -> None:
        self.model.arrive(rng)

    @precondition(lambda self: self.model.live)
    @rule(rng=SEEDS, name=st.sampled_from(["compute", "compute", "fork", "leave"]))
    def act(self, rng: random.Random, name: str) -> None:
        getattr(self.model, name)(rng)

    @rule(rng=SEEDS, name=st.sampled_from(["pin", "pin", "unpin", "time_passes"]))
    def steer(self, rng: random.Random, name: str) -> None:
        getattr(self.model, name)(rng)

    @rule(rng=SEEDS, name=st.sampled_from(["step_fails", "reset", "drop_oldest_pin"]))
    def disturb(self, rng: random.Random, name: str) -> None:
        getattr(self.model, name)(rng)

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.drain()


CacheMachine.TestCase.settings = settings(max_examples=1000 if SOAK else 60, stateful_step_count=50)
TestCacheAgainstModel = CacheMachine.TestCase


@pytest.mark.parametrize("seed", range(2000 if SOAK else 60))
def test_long_random_runs_obey_the_model(seed: int) -> None:
    """Conservation, contents and longest-prefix matching over 300 operations under memory pressure."""
    rng = random.Random(seed)
    model = CacheModel(rng)
    steer = ["pin"] * 8 + ["unpin"] * 4 + ["time_passes"] * 3
    names = ["arrive"] * 36 + ["compute"] * 54 + ["fork"] * 12 + ["leave"] * 30 + ["step_fails"] * 6 + ["reset"] + steer
    for _ in range(300):
        name = rng.choice(names)
        if model.live or name not in ("compute", "fork", "leave"):
            getattr(model, name)(rng)
        model.check()
    model.drain()


def test_common_prefix_length_is_what_it_says() -> None:
    """The bisecting comparison equals the naive one at every length and offset."""
    tokens = [0, 1] * 40
    for changed in range(80):
        other = list(tokens)
        other[changed] = 7
        for start in (0, 2, 4):
            for limit in (0, 1, 5, 33, 100):
                expected = min(limit, reference_common(tokens[start:], other[start:]))
                assert common_prefix_length(tokens, start, other, start, limit) == expected
