"""A request as it enters the engine."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its options; nothing in it changes while it runs.

    Attributes:
        number: position in the order of submission, counted from 0.
        namespace: the cache namespace whose entries it may reuse.
        arrival_s: submission time on the monotonic clock.
    """

    request_id: str
    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    namespace: bytes
    arrival_s: float
