"""The replay of traces: the optimum against every possible choice, the policies against the optimum."""

from __future__ import annotations

import itertools
import random
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from foreword.kv.eviction import POLICIES
from foreword.kv.replay import replay, replay_optimum
from foreword.kv.trace import Trace, TraceHeader, TraceRequest

Path = tuple[int, ...]


def draw_trace(rng: random.Random, *, generated: bool, num_requests: int, size: int = 4) -> Trace:
    """Requests over a small tree of blocks; each block's number names all before it, as a hash does.

    With ``generated`` some of a request's blocks are no prompt, and may be ones that others have too.
    """
    numbers: dict[Path, int] = {}
    requests = []
    for at in range(num_requests):
        path = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 3)))
        blocks = [numbers.setdefault(path[: end + 1], len(numbers)) for end in range(len(path))]
        looked_up = rng.randint(0, len(blocks)) if generated else len(blocks)
        prompt = looked_up * size + 1 if looked_up else 0
        requests.append(TraceRequest(float(at), b"ns", 0, prompt, max(prompt, len(blocks) * size), blocks))
    return Trace(TraceHeader(size, 8, "00"), requests)


def best_by_trying(trace: Trace, num_blocks: int) -> int:
    """Tokens reused by the best of all choices: whole prefixes only, leaves first, every request leaves its blocks."""
    requests = [request for request in trace.requests if len(request.blocks) <= num_blocks]
    parent = {b: a for request in requests for a, b in itertools.pairwise(request.blocks)}
    size = trace.header.block_size

    @cache
    def best(index: int, cached: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        request = requests[index]
        looked_up = max(0, request.prompt - 1) // size
        found = sum(1 for _ in itertools.takewhile(cached.__contains__, request.blocks[:looked_up]))
        own = frozenset(request.blocks)
        others = sorted(cached - own)
        room = min(num_blocks - len(own), len(others))
        return size * found + max(
            best(index + 1, own | frozenset(kept))
            for count in range(room + 1)
            for kept in itertools.combinations(others, count)
            if all(parent.get(block) in own | set(kept) for block in kept if block in parent)
        )

    return best(0, frozenset())


@settings(max_examples=60)
@given(rng=st.integers(0, 2**32).map(random.Random))
def test_the_optimum_is_the_best_of_all_choices(rng: random.Random) -> None:
    """Over prompts alone the optimum is exact: no choice of evictions reuses more, and one reuses as much."""
    trace = draw_trace(rng, generated=False, num_requests=6)
    for num_blocks in (2, 3, 4, 5):
        assert replay_optimum(trace, num_blocks).reused_tokens == best_by_trying(trace, num_blocks)


@settings(max_examples=60)
@given(rng=st.integers(0, 2**32).map(random.Random))
def test_with_generated_blocks_no_choice_beats_the_optimum(rng: random.Random) -> None:
    """Where requests generate what is cached already it is a bound."""
    trace = draw_trace(rng, generated=True, num_requests=6)
    for num_blocks in (2, 3, 4, 5):
        assert replay_optimum(trace, num_blocks).reused_tokens >= best_by_trying(trace, num_blocks)


@pytest.mark.parametrize("seed", range(8))
def test_no_policy_beats_the_optimum(seed: int) -> None:
    """The policies run through the real cache manager, at every size, and look the same prompts up."""
    rng = random.Random(seed)
    trace = draw_trace(rng, generated=True, num_requests=200)
    for num_blocks in (*range(1, 15), 17):
        optimum = replay_optimum(trace, num_blocks)
        for name, policy in POLICIES.items():
            found = replay(trace, policy, num_blocks)
            assert found.reused_tokens <= optimum.reused_tokens, name
            assert (found.prompt_tokens, found.too_long) == (optimum.prompt_tokens, optimum.too_long)
            if num_blocks == 17:  # all 14 blocks there are, and what a request generates anew: nothing is evicted
                assert found.evictions == 0
                assert found.reused_tokens == optimum.reused_tokens
