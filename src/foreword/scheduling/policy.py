"""In which order prompts get their share of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from foreword.core.validation import reject


class Candidate:
    """What a policy sees of a request that wants prefill.

    Attributes:
        number: order of submission, counted from 0.
        priority: ``SamplingParams.priority``; smaller is more urgent.
        total_tokens: length of the prompt (after a preemption: with what was generated).
        waited_s: seconds since submission.
        overtaken: how many later requests were admitted while it got no prefill.
        num_preemptions: how often it lost its blocks.
    """

    __slots__ = ("_count_cached", "number", "num_preemptions", "overtaken", "priority", "total_tokens", "waited_s")

    def __init__(
        self,
        *,
        number: int,
        priority: int,
        total_tokens: int,
        waited_s: float,
        overtaken: int,
        num_preemptions: int,
        count_cached: Callable[[], int],
    ) -> None:
        self.number = number
        self.priority = priority
        self.total_tokens = total_tokens
        self.waited_s = waited_s
        self.overtaken = overtaken
        self.num_preemptions = num_preemptions
        self._count_cached = count_cached

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is there already. Looked up when asked for: most policies never do."""
        return self._count_cached()

    @property
    def remaining_tokens(self) -> int:
        return self.total_tokens - self.cached_tokens


class SchedulingPolicy(Protocol):
    """A policy is one method; smaller keys go first. Keys are compared within one step only."""

    def key(self, candidate: Candidate) -> Any:
        """The sort key of ``candidate``."""


class FirstComeFirstServed:
    def key(self, candidate: Candidate) -> Any:
        return candidate.number


class Priority:
    """Smaller ``SamplingParams.priority`` first, then by arrival."""

    def key(self, candidate: Candidate) -> Any:
        return (candidate.priority, candidate.number)


@dataclass(frozen=True)
class ShortestPrefillFirst:
    """Least left to compute first. Who was overtaken ``max_overtakes`` times goes before all who were not."""

    max_overtakes: int = 16

    def key(self, candidate: Candidate) -> Any:
        if candidate.overtaken >= self.max_overtakes:
            return (0, candidate.number, 0)
        return (1, candidate.remaining_tokens, candidate.number)


@dataclass(frozen=True)
class LongestPrefixMatch:
    """Most cached tokens first, so that prefixes are used before they are evicted; ageing as above."""

    max_overtakes: int = 16

    def key(self, candidate: Candidate) -> Any:
        if candidate.overtaken >= self.max_overtakes:
            return (0, candidate.number, 0)
        return (1, -candidate.cached_tokens, candidate.number)


POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "shortest_prefill_first": ShortestPrefillFirst,
    "longest_prefix_match": LongestPrefixMatch,
}


def create_policy(policy: str | type | SchedulingPolicy) -> SchedulingPolicy:
    """The policy of that name, or an instance of the user's own class.

    Raises:
        ValueError: no such name, or the object has no ``key`` method.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]()
    if not callable(getattr(policy, "key", None)):
        reject("scheduling_policy", policy, f"choose one of {', '.join(POLICIES)} or pass a class with a method key")
    return policy() if isinstance(policy, type) else policy  # type: ignore[return-value]
