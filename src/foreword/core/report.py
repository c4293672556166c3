"""Where the tokens of many prompts went: which beginnings were reused, and where the others parted from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from foreword.core.explanation import Cause, PromptPiece, Reason


@dataclass(frozen=True, slots=True)
class PrefixSaving:
    """A beginning that prompts had in common.

    Attributes:
        text: how its last piece begins.
        piece: its last piece.
        num_tokens: tokens of the beginning, this piece included.
        requests: how many requests reused all of it.
        tokens_saved: tokens of this piece that were reused instead of computed, over all requests.
    """

    text: str
    piece: PromptPiece
    num_tokens: int
    requests: int
    tokens_saved: int


@dataclass(frozen=True, slots=True)
class DivergencePoint:
    """A place where prompts parted from what was cached.

    Attributes:
        piece, reason, cause: as in :class:`foreword.CacheExplanation`.
        requests: how many requests parted here.
        tokens_lost: tokens they computed though the nearest prompt held the same text.
        position: the earliest place, as a token index.
        before_text, expected_text, actual_text: of the request that lost most.
    """

    piece: PromptPiece | None
    reason: Reason
    cause: Cause | None
    requests: int
    tokens_lost: int
    position: int
    before_text: str
    expected_text: str
    actual_text: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Where the tokens of the latest requests went.

    Attributes:
        requests: how many requests it is about.
        prompt_tokens: of all of them.
        reused_tokens: of those, taken from the cache.
        lost_tokens: computed though the nearest prompt held the same text.
        lost_seconds: the time that took at the prefill speed measured; None before any was.
        prefixes: what was reused, most tokens saved first.
        divergences: where matches stopped, most tokens lost first.
    """

    requests: int
    prompt_tokens: int
    reused_tokens: int
    lost_tokens: int
    lost_seconds: float | None
    prefixes: list[PrefixSaving]
    divergences: list[DivergencePoint]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON takes them."""
        rows = {
            "prefixes": [dataclasses.asdict(row) | {"piece": row.piece._asdict()} for row in self.prefixes],
            "divergences": [
                dataclasses.asdict(row) | {"piece": row.piece._asdict() if row.piece else None}
                for row in self.divergences
            ],
        }
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | rows

    def __str__(self) -> str:
        from foreword.core.explanation_text import render_report

        return render_report(self)
