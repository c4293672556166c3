"""One completion on its way through the engine."""

from __future__ import annotations

from enum import Enum, auto

from foreword.core.constraint import Constraint
from foreword.core.outputs import TokenLogprobs
from foreword.core.request import Request
from foreword.kv.explain import Evidence
from foreword.kv.prompt_log import LoggedPrompt
from foreword.kv.table import BlockTable
from foreword.kv.tiers import Flight, TieredCache


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """A prompt, what has been generated behind it, and how much of it has its KV.

    Attributes:
        index: which of the request's ``n`` completions.
        token_ids: prompt and generated tokens.
        num_computed: leading tokens whose KV is in ``blocks``.
        num_samples: completions the next sampled position starts (``n`` until the prompt is done, then 1).
        overtaken: how many later requests were admitted while it got no prefill.
        fetched: whether the tiers were asked for it since it last waited.
        flight: what it waits for, or waited for, before it is admitted.
        home: the cache that ``blocks`` are of, where it runs.
        cached_tokens: prompt tokens that were reused when it was first admitted; None before.
        evidence: what the cache knew of the prompt when it was first admitted; None before.
        logged: its entry in the log of prompts.
        constraint: what the output must look like; None leaves it open. Where a prompt's first sample is taken for
            several completions, all of them begin with it.
        prompt_logprobs: one entry per prompt token but the first, as far as computed; shared by the completions.
    """

    __slots__ = (
        "blocks", "cached_tokens", "constraint", "evidence", "fetched", "first_scheduled_s", "flight", "home", "index",
        "logged", "num_computed", "num_preemptions", "num_prompt", "num_samples", "overtaken", "prompt_logprobs",
        "request", "status", "token_ids",
    )  # fmt: skip

    def __init__(self, request: Request, index: int = 0, constraint: Constraint | None = None) -> None:
        self.request = request
        self.index = index
        self.constraint = constraint
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_samples = request.params.n
        self.num_preemptions = 0
        self.overtaken = 0
        self.fetched = False
        self.flight: Flight | None = None
        self.cached_tokens: int | None = None
        self.evidence: Evidence | None = None
        self.logged: LoggedPrompt | None = None
        self.first_scheduled_s: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.home: TieredCache | None = None
        self.blocks: BlockTable | None = None
        self.status = Status.WAITING

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the one token to compute is the last sampled one."""
        return self.remaining == 1 and len(self.token_ids) > self.num_prompt

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities need the prompt's logits, so its cached prefix cannot be skipped."""
        return self.request.params.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt - 1

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who keeps its blocks under memory pressure: the lowest. Never changes, so the first always gets done."""
        return (self.request.params.priority, self.request.number, self.index)
