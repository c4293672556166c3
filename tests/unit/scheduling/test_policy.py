"""Scheduling policies: the built-in ones and a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreword import Candidate, Engine
from foreword.scheduling.policy import (
    POLICIES,
    FirstComeFirstServed,
    LongestPrefixMatch,
    Priority,
    SchedulingPolicy,
    ShortestPrefillFirst,
    create_policy,
)


def candidate(number: int, **changes: Any) -> Candidate:
    defaults: dict[str, Any] = {
        "priority": 0, "total_tokens": 10, "waited_s": 0.0, "overtaken": 0, "num_preemptions": 0, "cached": 0,
    }  # fmt: skip
    values = {**defaults, **changes}
    cached = values.pop("cached")
    return Candidate(number=number, count_cached=lambda: cached, **values)


def order(policy: SchedulingPolicy, *candidates: Candidate) -> list[int]:
    return [c.number for c in sorted(candidates, key=policy.key)]


def test_first_come_first_served() -> None:
    """By number of submission, whatever else differs."""
    assert order(FirstComeFirstServed(), candidate(2, priority=-9), candidate(0, total_tokens=99), candidate(1)) == [
        0,
        1,
        2,
    ]


def test_priority() -> None:
    """Smaller numbers first, equals by arrival."""
    assert order(Priority(), candidate(0), candidate(1, priority=-1), candidate(2, priority=1), candidate(3)) == [
        1,
        0,
        3,
        2,
    ]


def test_shortest_prefill_first() -> None:
    """By what is left to compute, cached tokens off; who was overtaken often goes before all others."""
    policy = ShortestPrefillFirst(max_overtakes=3)
    a, b, c = candidate(0, total_tokens=50), candidate(1, total_tokens=60, cached=55), candidate(2, total_tokens=9)
    assert order(policy, a, b, c) == [1, 2, 0]
    assert order(policy, candidate(0, total_tokens=50, overtaken=3), b, c) == [0, 1, 2]
    assert order(policy, candidate(5, overtaken=9, total_tokens=99), candidate(4, overtaken=3), c) == [4, 5, 2]


def test_longest_prefix_match() -> None:
    """By cached tokens, most first; ageing as for the shortest."""
    policy = LongestPrefixMatch(max_overtakes=3)
    assert order(policy, candidate(0), candidate(1, cached=5), candidate(2, cached=9)) == [2, 1, 0]
    assert order(policy, candidate(0, overtaken=3), candidate(1, cached=5)) == [0, 1]


def test_the_cache_is_only_asked_when_a_policy_wants_to_know() -> None:
    """``cached_tokens`` is a look-up made on demand."""
    asked: list[int] = []
    lazy = Candidate(
        number=0, priority=0, total_tokens=10, waited_s=0.0, overtaken=0, num_preemptions=0,
        count_cached=lambda: asked.append(1) or 4,
    )  # fmt: skip
    FirstComeFirstServed().key(lazy)
    Priority().key(lazy)
    assert asked == []
    assert (lazy.remaining_tokens, asked) == (6, [1])


def test_policies_by_name_class_and_instance() -> None:
    """A name, a class or an instance; anything else is refused with the list of names."""
    for name, policy in POLICIES.items():
        assert type(create_policy(name)) is policy
    own = ShortestPrefillFirst(2)
    assert create_policy(own) is own
    assert isinstance(create_policy(Priority), Priority)
    for wrong in ("fastest", 5, None, object()):
        with pytest.raises(ValueError, match=r"scheduling_policy.*fcfs"):
            create_policy(wrong)  # type: ignore[arg-type]


def test_a_users_own_policy_orders_the_engine(new_tiny: Callable[..., Engine]) -> None:
    """A class with one method, passed to the engine, decides who is computed first."""
    seen: list[int] = []

    class LongestPromptFirst:
        def key(self, candidate: Candidate) -> Any:
            seen.append(candidate.number)
            return (-candidate.total_tokens, candidate.waited_s >= 0.0)

    engine = new_tiny(scheduling_policy=LongestPromptFirst, max_num_seqs=1, max_num_batched_tokens=64)
    ends: list[int] = []
    requests = engine._client.prepare([[1] * n for n in (3, 9, 5)], None, {"max_tokens": 1})
    original = engine._loop.core.scheduler.finish
    engine._loop.core.scheduler.finish = lambda s: (ends.append(s.num_prompt), original(s))[1]  # type: ignore[method-assign]
    outputs = engine._client.run(requests)
    assert len(outputs) == 3
    assert ends == [9, 5, 3]
    assert set(seen) == {0, 1, 2}
