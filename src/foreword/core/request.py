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
        max_tokens: tokens to generate at most: ``params.max_tokens``, or less where the context ends.
        source: what the prompt was rendered from, for explanations; None for a plain prompt.
        seed: what its random choices derive from: ``params.seed``, or drawn by the engine.
    """

    request_id: str
    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    namespace: bytes
    arrival_s: float
    max_tokens: int
    seed: int
    source: object = None
