"""What comes back from a request."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from foreword.core.errors import ForewordError
from foreword.core.explanation import CacheExplanation
from foreword.core.message import AssistantMessage, MessageDelta

logger = logging.getLogger("foreword")

FinishReason = Literal["stop", "length", "cancelled", "error"]
TokenLogprobs = dict[int, float]
"""Natural-log probabilities by token id."""


_COMPARED_TOKENS = 64
"""To compute so many takes many times as long as to compare texts, a few milliseconds at most."""


class Explained(Protocol):
    """Something that knows why a prompt's match with the cache stopped."""

    @property
    def value(self) -> CacheExplanation: ...

    @property
    def brief(self) -> CacheExplanation:
        """Reason and position alone, at no cost."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. For ``n > 1`` the completion tokens of all completions are added up.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens whose KV was reused instead of computed.
        completion_tokens: tokens generated.
        time_to_first_token_s: seconds from submission to the first token; None before it.
        total_time_s: seconds from submission to the end.
        queue_time_s: seconds from submission until the request first ran; None if it never did.
        num_preemptions: how often the request lost its blocks to others and was resumed.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token_s: float | None = None
    total_time_s: float = 0.0
    queue_time_s: float | None = None
    num_preemptions: int = 0

    def timing(self) -> dict[str, float | None]:
        """Seconds and rates by name, for metadata."""
        return {
            "time_to_first_token_s": self.time_to_first_token_s,
            "total_time_s": self.total_time_s,
            "queue_time_s": self.queue_time_s,
            "tokens_per_second": self.tokens_per_second,
        }

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second after the first one; None if there was no second."""
        if self.time_to_first_token_s is None or self.completion_tokens < 2:
            return None
        decode_s = self.total_time_s - self.time_to_first_token_s
        return (self.completion_tokens - 1) / decode_s if decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the ``n`` completions of a prompt.

    Attributes:
        stop_reason: the stop string or stop token id that ended it; None at an end-of-sequence token.
        logprobs: per generated token, the log-probabilities asked for; None if none were.
        error: what went wrong when ``finish_reason`` is "error", the original exception chained as its cause; or that
            the engine was closed meanwhile, with "cancelled".
        message: of a chat, the answer taken apart into content, reasoning and tool calls; None for other prompts.
        complete: whether the text is all that ``structured`` asks for; False where it was cut before. A number that was
            cut looks like a whole one, everything else in JSON does not parse.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: ForewordError | None = None
    message: AssistantMessage | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished request. ``text``, ``message`` and their like are those of ``outputs[0]``.

    Attributes:
        prompt_logprobs: per prompt token, the log-probabilities asked for; the first entry is None.
        explained: gives ``prefix``.
        cache_salt: of the request, for :meth:`foreword.Engine.fork`.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    explained: Explained | None = field(default=None, repr=False, compare=False)
    cache_salt: str | None = field(default=None, repr=False, compare=False)

    @property
    def prefix(self) -> CacheExplanation | None:
        """How much of the prompt was cached, and where and why the match stopped; worked out when it is first read.

        None if the request never ran, or on an engine without prefix caching.
        """
        return self.explained.value if self.explained else None

    def prefix_cache(self) -> dict[str, Any]:
        """``prefix`` by field names, with ``cached_tokens``, for metadata that nobody may ever read.

        What another salt has is not told. Where few tokens had to be computed, texts are not compared, which would take
        a part of the time that those took: then reason and position are all that is said. ``prefix`` has the rest.
        """
        usage = self.usage
        found: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        if self.explained is not None:
            worth_it = usage.prompt_tokens - usage.cached_tokens >= _COMPARED_TOKENS
            found |= _told(self.explained, compared=worth_it).to_dict()
        return found

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def message(self) -> AssistantMessage | None:
        return self.outputs[0].message

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def error(self) -> ForewordError | None:
        return self.outputs[0].error


def _told(explained: Explained, *, compared: bool) -> CacheExplanation:
    """What metadata says: it may reach other people than those who run the engine, and must never lose an answer."""
    try:
        found = explained.value if compared else explained.brief
    except Exception:
        logger.exception("a prompt could not be explained; its metadata has reason and position only")
        found = explained.brief
    if found.reason != "other_namespace":
        return found
    return dataclasses.replace(found, reason="never_seen", cause=None, lost_tokens=0, lost_seconds=None, nearest=None)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of a streamed completion; the pieces of one ``index`` add up to its text and token ids.

    Attributes:
        index: which of the ``n`` completions.
        text: new text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens.
        finish_reason: set on the last chunk of each completion.
        output: the whole request, on the very last chunk only.
        delta: of a chat, what the chunk adds to the answer's parts; ``text`` holds all of it as the model wrote it.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    output: RequestOutput | None = None
    delta: MessageDelta | None = None

    @property
    def usage(self) -> Usage | None:
        """Usage of the whole request, on the very last chunk only."""
        return self.output.usage if self.output else None


@dataclass(frozen=True, slots=True)
class Warmed:
    """What :meth:`foreword.Engine.warm` did.

    Attributes:
        prompt_tokens: tokens of the beginning.
        cached_tokens: of those, cached before.
        pinned_tokens: of those, pinned now; 0 if no pin was asked for.
    """

    prompt_tokens: int
    cached_tokens: int
    pinned_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine. Blocks obey ``free + held + cached == total``.

    Attributes:
        running: sequences that take part in steps.
        waiting: sequences that wait for a place or for memory.
        blocks_total: KV blocks of the pool.
        blocks_free: blocks that hold nothing.
        blocks_held: blocks only running requests hold.
        blocks_cached: blocks in the prefix tree, whether in use or not.
        blocks_pinned: cached blocks, of the pool and of the host tier, that a pin keeps.
        prompt_tokens: prompt tokens of all requests that were admitted.
        tokens_reused: prompt tokens taken from the cache.
        tokens_restored: of those, tokens that came from the host or disk tier.
        tokens_prefilled: tokens computed in prefill; recomputation after a preemption is included.
        tokens_generated: tokens sampled.
        preemptions: how often a sequence lost its blocks.
        evictions: cached blocks of the pool that were given away.
        swap_blocks_total, swap_blocks_free: blocks of the host tier, and those that hold nothing.
        steps: forward passes.
        prefill_tokens_per_s: speed of prefill, over the last steps that computed little else; None before the first.
        kv_tiles_used: tiles of 128 positions of a KV head that attention put against queries, each sequence counted.
        kv_tiles_read: tiles that were brought in for that; fewer where sequences shared a beginning. Both are 0 with
            kernels that do not share.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_pinned: int = 0
    prompt_tokens: int = 0
    tokens_reused: int = 0
    tokens_restored: int = 0
    tokens_prefilled: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    evictions: int = 0
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    steps: int = 0
    prefill_tokens_per_s: float | None = None
    kv_tiles_used: int = 0
    kv_tiles_read: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were reused, in [0, 1]."""
        return self.tokens_reused / self.prompt_tokens if self.prompt_tokens else 0.0
