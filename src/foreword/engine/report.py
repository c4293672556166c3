"""The cache report: the latest requests' explanations, added up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from foreword.core.explanation import CacheExplanation, PromptPiece
from foreword.core.report import CacheReport, DivergencePoint, PrefixSaving
from foreword.engine.explain import LazyExplanation

_MAX_TOKENS = 1_000_000  # prompt tokens of the requests that are remembered, at four bytes each and their texts
_SHOWN = 80  # characters


class Explanations:
    """The explanations of the latest requests; what is not asked for is never worked out."""

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._kept: deque[LazyExplanation] = deque()

    def add(self, explanation: LazyExplanation) -> None:
        self._kept.append(explanation)
        self._num_tokens += explanation.weight
        while self._num_tokens > self._max_tokens and len(self._kept) > 1:
            self._num_tokens -= self._kept.popleft().weight

    def snapshot(self) -> list[LazyExplanation]:
        return list(self._kept)


def report(explanations: Iterable[LazyExplanation]) -> CacheReport:
    """Add up what was reused and what was lost."""
    found = list(explanations)
    values = [each.value for each in found]
    seconds = [value.lost_seconds for value in values if value.lost_seconds is not None]
    return CacheReport(
        requests=len(found),
        prompt_tokens=sum(value.prompt_tokens for value in values),
        reused_tokens=sum(each.reused_tokens for each in found),
        lost_tokens=sum(value.lost_tokens for value in values),
        lost_seconds=sum(seconds) if seconds else None,
        prefixes=_savings(found),
        divergences=_divergences(values),
    )


def _savings(found: list[LazyExplanation]) -> list[PrefixSaving]:
    """Per beginning, up to the end of a piece: the pieces of each prompt, as far as it was reused."""
    groups: dict[tuple[PromptPiece, int, int, str], list[int]] = {}  # tokens of the piece that each request reused
    for each in found:
        begin = 0
        for piece, text, end in each.pieces():
            if begin >= each.reused_tokens:
                break
            groups.setdefault((piece, begin, end, text), []).append(min(end, each.reused_tokens) - begin)
            begin = end
    rows = [
        PrefixSaving(text[:_SHOWN], piece, end, sum(reused == end - begin for reused in group), sum(group))
        for (piece, begin, end, text), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.tokens_saved)


def _divergences(values: list[CacheExplanation]) -> list[DivergencePoint]:
    """Per piece, reason and cause: the matches that stopped there."""
    groups: dict[tuple[object, ...], list[CacheExplanation]] = {}
    for value in values:
        if value.reason != "complete":
            groups.setdefault((value.piece, value.reason, value.cause), []).append(value)
    rows = []
    for group in groups.values():
        worst = max(group, key=lambda value: value.lost_tokens)
        rows.append(
            DivergencePoint(
                piece=worst.piece,
                reason=worst.reason,
                cause=worst.cause,
                requests=len(group),
                tokens_lost=sum(value.lost_tokens for value in group),
                position=min(value.position or 0 for value in group),
                before_text=worst.before_text,
                expected_text=worst.expected_text,
                actual_text=worst.actual_text,
            )
        )
    return sorted(rows, key=lambda row: (-row.tokens_lost, -row.requests))
