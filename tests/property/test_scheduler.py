"""The scheduler with a runner that computes nothing: every request finishes, nothing leaks, nobody starves."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from foreword.core.request import Request
from foreword.core.sampling import SamplingParams
from foreword.kv.eviction import POLICIES as EVICTION
from foreword.kv.host import CacheStore
from foreword.kv.tiers import Lanes, TieredCache
from foreword.scheduling.plan import StepPlan
from foreword.scheduling.policy import POLICIES, Candidate, LongestPrefixMatch, ShortestPrefillFirst, create_policy
from foreword.scheduling.scheduler import Scheduler
from foreword.scheduling.sequence import Sequence, Status

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"


class LastComeFirstServed:
    """A user's own policy, and the least fair one."""

    def key(self, candidate: Candidate) -> Any:
        return -candidate.number


class Copying(Executor):
    """Runs what is submitted some time later, or when somebody waits for it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Copied(self.rng, lambda: fn(*args, **kwargs))


class Copied(Future[Any]):
    def __init__(self, rng: random.Random, task: Callable[[], Any]) -> None:
        super().__init__()
        self.rng, self.task = rng, task

    def done(self) -> bool:
        if not super().done() and self.rng.random() < 0.4:
            self.set_result(self.task())
        return super().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not super().done():
            self.set_result(self.task())
        return super().exception(timeout)


class Block(NamedTuple):
    """A block of the harness's content."""

    content: dict[tuple[int, int], tuple[int, ...]]
    number: int
    size: int

    def copy_(self, source: Block) -> None:
        for slot in range(self.size):
            self.content.pop((self.number, slot), None)
            if (source.number, slot) in self.content:
                self.content[self.number, slot] = self.content[source.number, slot]


class Pool(NamedTuple):
    content: dict[tuple[int, int], tuple[int, ...]]
    block_size: int

    def block(self, number: int) -> Block:
        return Block(self.content, number, self.block_size)


@dataclass
class Harness:
    """Drives a scheduler as the engine does, writing into a dictionary instead of tensors."""

    scheduler: Scheduler
    content: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    computed: int = 0
    steps: int = 0
    on_step: Callable[[StepPlan], None] = lambda _: None

    def submit(self, number: int, prompt: list[int], max_tokens: int, n: int = 1, priority: int = 0) -> Sequence:
        params = SamplingParams(n=n, priority=priority)
        request = Request(f"req-{number}", number, prompt, params, b"ns", 0.0, max_tokens, 0)
        sequence = Sequence(request)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Schedule, check the plan, compute, commit, sample."""
        scheduler, size = self.scheduler, self.scheduler.cache.block_size
        waiting_before = set(scheduler.waiting)
        plan = scheduler.schedule(0.0)
        self.steps += 1
        if not plan.chunks and scheduler.moving:
            return plan
        self._check_plan(plan, waiting_before)
        for source, target, count in plan.copies:
            for slot in range(count):
                self.content[target, slot] = self.content[source, slot]
        for sequence, start, length in plan.chunks:
            for position in range(start, start + length):  # all writes of a step come before its reads
                place = (sequence.blocks.blocks[position // size], position % size)
                self.content[place] = tuple(sequence.token_ids[: position + 1])
        for sequence, start, length in plan.chunks:
            for position in range(start + length):
                place = (sequence.blocks.blocks[position // size], position % size)
                assert self.content[place] == tuple(sequence.token_ids[: position + 1]), "reads what is not its own"
        self.computed += sum(chunk.length for chunk in plan.chunks)
        scheduler.advance(plan)
        for chunk in [c for c in plan.chunks if c.end == len(c.sequence.token_ids)]:
            children = [
                scheduler.fork(chunk.sequence, index)
                for index in range(chunk.sequence.index + 1, chunk.sequence.index + chunk.sequence.num_samples)
            ]
            chunk.sequence.num_samples = 1
            self.sequences += children
            for sequence in [chunk.sequence, *children]:
                self._sample(sequence)
        for home in scheduler.homes:
            home.check_integrity()
        self.on_step(plan)
        return plan

    def run(self, limit: int) -> None:
        """Step until nothing is left; more than ``limit`` steps means that it never ends."""
        while self.scheduler.has_work:
            assert self.steps < limit, "the scheduler does not come to an end"
            self.step()

    def _sample(self, sequence: Sequence) -> None:
        """The next token, a function of request, completion and position, so that the end result can be checked."""
        position = len(sequence.token_ids)
        sequence.token_ids.append(expected_token(sequence, position))
        if position + 1 - sequence.num_prompt >= sequence.request.max_tokens:
            self.scheduler.finish(sequence)
            self.finished.append(sequence)

    def _check_plan(self, plan: StepPlan, waiting_before: set[Sequence]) -> None:
        scheduler = self.scheduler
        assert plan.chunks, "a step in which nothing is computed"
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks), "a sequence twice in one step"
        assert len(scheduler.running) <= scheduler.max_num_seqs
        decodes = [chunk for chunk in plan.chunks if chunk.sequence.is_decoding and chunk.length == 1]
        prompts = [chunk for chunk in plan.chunks if chunk not in decodes]
        total = sum(chunk.length for chunk in plan.chunks)
        if scheduler.chunked_prefill:
            assert total <= scheduler.max_num_batched_tokens, "the step's token budget is exceeded"
        elif len(prompts) > 1:
            assert total - prompts[0].length <= scheduler.max_num_batched_tokens
        for sequence, start, length in plan.chunks:
            assert sequence.status is Status.RUNNING
            assert start == sequence.num_computed
            assert 1 <= length <= sequence.remaining, "at least one token is computed"
            if not scheduler.chunked_prefill:
                assert length == sequence.remaining, "a prompt was split"
        for home in scheduler.homes:
            running = [sequence for sequence in scheduler.running if sequence.home is home]
            admitted = [c.sequence for c in plan.chunks if c.sequence in waiting_before and c.sequence.home is home]
            if len(running) > len(admitted) > 0:
                assert home.num_available >= len(running) - len(admitted), "the watermark was passed"


def expected_token(sequence: Sequence, position: int) -> int:
    return (sequence.request.number * 7 + sequence.index * 3 + position) % 3


def make(rng: random.Random, policy: Any = "fcfs", **options: Any) -> Harness:
    size = options.pop("block_size", rng.choice([1, 2, 4]))
    blocks = options.pop("num_blocks", rng.randint(6, 30))
    kept: dict[str, Any] = {"policy": rng.choice(list(EVICTION.values()))}
    kept["enable_prefix_caching"] = options.pop("caching", rng.random() < 0.85)
    content: dict[tuple[int, int], tuple[int, ...]] = {}
    lanes = Lanes(Copying(rng), Copying(rng), threading.Event())
    cache, host = TieredCache(blocks, size, max_pinned_blocks=blocks, lanes=lanes, **kept), None
    if host_blocks := options.pop("host_blocks", 0):
        host = TieredCache(host_blocks, size, first_block=blocks, max_pinned_blocks=host_blocks, lanes=lanes, **kept)
        pool: Any = Pool(content, size)
        cache.put_on(CacheStore(pool, host, takes=True))
        host.put_on(CacheStore(pool, cache, takes=False))
    options.setdefault("max_num_seqs", rng.randint(1, 6))
    options.setdefault("max_num_batched_tokens", rng.randint(1, 24))
    options.setdefault("chunked_prefill", rng.random() < 0.7)
    return Harness(Scheduler(cache, create_policy(policy), host=host, **options), content)


@pytest.mark.parametrize("policy", [*POLICIES, LastComeFirstServed], ids=str)
@pytest.mark.parametrize("seed", range(400 if SOAK else 30))
def test_every_request_finishes_whole(policy: Any, seed: int) -> None:
    """Random arrivals, priorities, n, aborts, pins, tiny pools, host tiers: all end, complete and unmixed."""
    rng = random.Random(f"{policy}/{seed}")
    harness = make(rng, policy, host_blocks=rng.choice([0, 0, 5, 40]), attends_host=rng.random() < 0.7)
    scheduler = harness.scheduler
    capacity = scheduler.capacity
    shared = [rng.randint(0, 2) for _ in range(capacity)]
    number, work, aborted = 0, 0, set[Sequence]()
    while number < 25 or scheduler.has_work:
        assert harness.steps < 200 + 30 * work, "preempting and resuming without end"
        if number < 25 and rng.random() < 0.4:
            length = rng.randint(1, capacity)
            common = rng.randint(0, length)
            prompt = shared[:common] + [rng.randint(0, 2) for _ in range(length - common)]
            max_tokens, n = rng.randint(1, min(12, capacity + 1 - length)), rng.choice([1, 1, 1, 2, 4])
            harness.submit(number, prompt, max_tokens, n, priority=rng.randint(-1, 1))
            number, work = number + 1, work + n * (length + max_tokens)
        if rng.random() < 0.05 and (live := [s for s in harness.sequences if s.status is not Status.FINISHED]):
            victim = rng.choice(live)
            scheduler.finish(victim)
            aborted.add(victim)
        if rng.random() < 0.1:  # as much as the whole pool: pins must give way where a request could never run
            rng.choice(scheduler.homes).pin(b"ns", shared[: rng.randint(1, capacity)], now_s=0.0)
        if scheduler.has_work:
            harness.step()
    for sequence in harness.sequences:
        assert sequence.status is Status.FINISHED
        prompt = sequence.request.prompt_token_ids
        generated = [expected_token(sequence, p) for p in range(len(prompt), len(sequence.token_ids))]
        assert sequence.token_ids == prompt + generated
        if sequence not in aborted:
            assert len(generated) == sequence.request.max_tokens
    for home in scheduler.homes:
        home.settle()
    for home in scheduler.homes:
        home.finish_copies()
        assert home.allocator.num_held == 0
        while home.drop_oldest_pin():
            pass
        assert home.allocator.num_evictable == home.allocator.num_cached
    scheduler.cache.reset()
    assert all(home.allocator.num_free == home.allocator.num_blocks for home in scheduler.homes)


def test_pins_give_way_only_where_nothing_could_run(caplog: pytest.LogCaptureFixture) -> None:
    """A request that fits beside the pins leaves them; one that does not gets the oldest pin's room, with a warning."""
    harness = make(random.Random(0), caching=True, num_blocks=10, block_size=2, max_num_seqs=2)
    cache = harness.scheduler.cache
    for number, first in enumerate((1, 2)):
        harness.submit(number, [first] * 6, 1)
        harness.run(20)
        assert cache.pin(b"ns", [first] * 6, now_s=0.0).num_tokens == 6
    harness.submit(2, [3] * 8, 1)
    harness.run(40)
    assert (len(cache.pins), caplog.messages) == (2, [])
    harness.submit(3, [4] * 12, 1)
    harness.run(60)
    assert len(harness.finished) == 4
    assert not cache.unpin(b"ns", [1] * 6)
    assert cache.unpin(b"ns", [2] * 6)
    [warning] = [message for message in caplog.messages if "unpinned" in message]
    assert "a request of 12 tokens needs its KV memory" in warning


def test_pins_lapse_by_the_steps_clock() -> None:
    """The time given to a step ends pins before anything is admitted."""
    harness = make(random.Random(0), caching=True, num_blocks=6, block_size=2, max_num_seqs=2)
    scheduler = harness.scheduler
    harness.submit(0, [1] * 8, 1)
    harness.run(20)
    scheduler.cache.pin(b"ns", [1] * 8, now_s=0.0, ttl_s=30.0)
    harness.submit(1, [2] * 8, 1)
    assert [chunk.sequence.request.number for chunk in scheduler.schedule(31.0).chunks] == [1]
    assert len(scheduler.cache.pins) == 0


@pytest.mark.parametrize("seed", range(20))
def test_failed_steps_return_every_block(seed: int) -> None:
    """Steps that fail at random take their sequences along and leave no block and no unwritten KV behind."""
    rng = random.Random(seed)
    harness = make(rng, caching=True, num_blocks=24, block_size=4, max_num_seqs=4)
    scheduler = harness.scheduler
    shared = [rng.randint(0, 1) for _ in range(60)]
    for number in range(60):
        common = rng.randint(0, 50)
        harness.submit(number, [*shared[:common], rng.randint(0, 1)], rng.randint(1, 6), rng.choice([1, 2]))
        for _ in range(rng.randint(0, 4)):
            if scheduler.has_work and rng.random() < 0.25:
                plan = scheduler.schedule(0.0)
                assert {id(s) for s in scheduler.fail(plan)} == {id(c.sequence) for c in plan.chunks}
                scheduler.cache.check_integrity()
                for namespace_tree in scheduler.cache._trees.values():
                    for node in namespace_tree.nodes():
                        for offset in range(len(node.tokens)):
                            place = (node.blocks[offset // 4], offset % 4)
                            assert written(harness, place)[-1] == node.tokens[offset]
            elif scheduler.has_work:
                harness.step()
    harness.run(limit=2000)
    scheduler.cache.finish_copies()
    scheduler.cache.reset()
    assert scheduler.cache.allocator.num_free == 24


def written(harness: Harness, place: tuple[int, int]) -> tuple[int, ...]:
    assert place in harness.content, "the tree holds KV that was never written"
    return harness.content[place]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_common_cold_prefix_is_computed_once(n: int, chunked: bool) -> None:
    """Eight requests that arrive together with one cold prefix compute it once."""
    harness = make(
        random.Random(0), block_size=4, num_blocks=200, caching=True, max_num_seqs=32, max_num_batched_tokens=24,
        chunked_prefill=chunked,
    )  # fmt: skip
    shared = [1] * 40
    for number in range(8):
        harness.submit(number, [*shared, 2, number % 3, number // 3], 2, n)
    harness.run(limit=100)
    assert harness.scheduler.stats.tokens_prefilled <= 40 + 8 * 3
    assert harness.scheduler.stats.tokens_reused >= 7 * 40
    assert len(harness.finished) == 8 * n


@pytest.mark.parametrize("policy", [ShortestPrefillFirst(4), LongestPrefixMatch(4)])
def test_overtaking_is_bounded(policy: Any) -> None:
    """A long cold request under a stream of short or cached ones is overtaken at most the bound plus one step."""
    harness = make(
        random.Random(1), policy, block_size=4, num_blocks=400, caching=True, max_num_seqs=8,
        max_num_batched_tokens=16, chunked_prefill=True,
    )  # fmt: skip
    harness.submit(0, [0] * 12, 1)
    harness.run(limit=10)
    victim = harness.submit(1, [1] * 120, 2)
    number, last = 2, 0
    while victim.status is not Status.FINISHED:
        assert harness.steps < 200, "starved"
        for _ in range(12):
            harness.submit(number, [0] * 11 + [2], 2)
            number += 1
        harness.step()
        last = max(last, victim.overtaken)
    assert 0 < last <= 4 + 8, "overtaken more often than the bound and one step's sequences allow"


def test_first_come_first_served_serves_in_order() -> None:
    """Under fcfs first tokens come in the order of submission."""
    rng = random.Random(2)
    harness = make(rng, caching=False, num_blocks=30, block_size=4, max_num_seqs=3, max_num_batched_tokens=8)
    order: list[int] = []
    harness.on_step = lambda plan: order.extend(
        c.sequence.request.number for c in plan.chunks if len(c.sequence.token_ids) == c.sequence.num_prompt + 1
    )
    for number in range(12):
        harness.submit(number, [rng.randint(0, 2) for _ in range(rng.randint(1, 40))], 3)
    harness.run(limit=500)
    assert list(dict.fromkeys(order)) == list(range(12))


def test_urgent_requests_go_first_and_are_preempted_last() -> None:
    """Under priority the smaller number is admitted first and keeps its blocks under pressure."""
    harness = make(
        random.Random(3), "priority", caching=True, num_blocks=8, block_size=2, max_num_seqs=4,
        max_num_batched_tokens=16, chunked_prefill=True,
    )  # fmt: skip
    low = harness.submit(0, [0, 0, 0], 8, priority=5)
    urgent = harness.submit(1, [1, 1, 1], 8, priority=-5)
    middle = harness.submit(2, [2, 2, 2], 8)
    harness.run(limit=200)
    assert [s.request.number for s in harness.finished] == [1, 2, 0]
    assert urgent.num_preemptions == 0
    assert low.num_preemptions + middle.num_preemptions > 0, "the pool was meant to be too small for all"


def test_the_hit_rate_ignores_a_preempted_request_meeting_itself() -> None:
    """What a preempted request finds of its own KV is not counted as reuse."""
    harness = make(
        random.Random(4), caching=True, num_blocks=9, block_size=2, max_num_seqs=4, max_num_batched_tokens=16,
        chunked_prefill=True,
    )  # fmt: skip
    harness.submit(0, [0, 1, 0], 10)
    harness.submit(1, [1, 0, 1], 10)
    harness.run(limit=200)
    assert harness.scheduler.stats.preemptions > 0
    assert harness.scheduler.stats.tokens_reused == 0
    assert harness.scheduler.stats.prompt_tokens == 6


def test_cached_tokens_are_counted_when_scheduled() -> None:
    """A request submitted before its prefix was cached, scheduled after, counts the hit."""
    harness = make(
        random.Random(5), caching=True, num_blocks=40, block_size=4, max_num_seqs=1, max_num_batched_tokens=64,
        chunked_prefill=True,
    )  # fmt: skip
    harness.submit(0, [1] * 20, 1)
    second = harness.submit(1, [1] * 20 + [2], 1)
    assert second.cached_tokens is None
    harness.run(limit=10)
    assert second.cached_tokens == 20


def test_full_hits_compute_one_token_and_skip_the_last_sampled_one() -> None:
    """A wholly cached prompt computes one token; the last sampled token has no KV to reuse."""
    harness = make(
        random.Random(6), caching=True, num_blocks=40, block_size=4, max_num_seqs=2, max_num_batched_tokens=64,
        chunked_prefill=True,
    )  # fmt: skip
    first = harness.submit(0, [1] * 10, 3)
    harness.run(limit=10)
    again = harness.submit(1, [1] * 10, 1)
    harness.run(limit=20)
    assert again.cached_tokens == 9
    longer = harness.submit(2, [*first.token_ids, 0, 0], 1)
    harness.run(limit=30)
    assert longer.cached_tokens == len(first.token_ids) - 1
