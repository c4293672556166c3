"""An explanation as people read it in a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foreword.core.explanation import CacheExplanation
    from foreword.core.report import CacheReport

_ROWS = 8  # of each table of a report

_REASONS = {
    "complete": "all of it is cached",
    "diverged": "a prompt that is cached goes on differently",
    "evicted": "the rest was cached and has given way to other prompts",
    "never_seen": "nothing that is cached goes on from here",
    "other_namespace": "the rest is cached for another model, adapter or salt only",
}
_CAUSES = {
    "clock": "a clock or a date: put it behind what stays the same, or leave out what changes often",
    "identifier": "an id or a name of this request: put it behind what stays the same",
    "tool_order": "the same tools in another order: sort them (canonical_tools=True does)",
    "json_key_order": "the same JSON with its keys in another order: write it with sort_keys=True",
    "document_order": "the same documents in another order: sort them by a key of their own, not by score",
    "whitespace": "white space alone: build the text in one place",
    "history_changed": "an earlier turn was rewritten: add to the history, do not edit it",
    "history_truncated": "the oldest turns were dropped: drop many at a time and seldom",
    "retokenized": "the same text in other tokens: pass the model's own answers back as messages",
    "namespace": "another model, adapter or cache_salt",
}


def render(explanation: CacheExplanation, *, colour: bool | None = None) -> str:
    """Some lines of text; ``colour`` None colours where standard output is a terminal that wants it."""
    if colour is None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    matched, total = explanation.matched_tokens, explanation.prompt_tokens
    share = f" ({min(round(100 * matched / total), 99 + matched // total)} %)" if total else ""  # 100 % is all of it
    lines = [f"{matched:,} of {total:,} prompt tokens are cached{share}: {_REASONS[explanation.reason]}"]
    if explanation.position is not None:
        lines.append(f"  where    token {explanation.position:,}, in {explanation.piece}")
        before = _tail(explanation.before_text)
        if explanation.expected_text:
            lines.append(f"  cached   {before}{_paint(_head(explanation.expected_text), '32', colour)}")
        lines.append(f"  now      {before}{_paint(_head(explanation.actual_text), '31', colour)}")
    if explanation.cause:
        lines.append(f"  cause    {explanation.cause}: {_CAUSES[explanation.cause]}")
    if explanation.reusable_share is not None:
        lines.append(f"  share    {100 * explanation.reusable_share:.0f} % of the documents' tokens in a stable order")
    if explanation.lost_tokens:
        seconds = "" if explanation.lost_seconds is None else f", {explanation.lost_seconds:.3g} s"
        lines.append(f"  lost     {explanation.lost_tokens:,} tokens computed again{seconds}")
    return "\n".join(lines)


def render_report(report: CacheReport) -> str:
    """Two tables: what was reused, and where matches stopped."""
    share = f" ({100 * report.reused_tokens / report.prompt_tokens:.0f} %)" if report.prompt_tokens else ""
    seconds = "" if report.lost_seconds is None else f", {report.lost_seconds:.3g} s"
    lines = [
        f"{report.requests:,} requests, {report.prompt_tokens:,} prompt tokens, "
        f"{report.reused_tokens:,} reused{share}, {report.lost_tokens:,} lost{seconds}",
        "",
        f"{'tokens saved':>12}  {'requests':>8}  what was reused",
    ]
    for saving in report.prefixes[:_ROWS]:
        lines.append(f"{saving.tokens_saved:>12,}  {saving.requests:>8,}  {saving.piece}: {_head(saving.text)}")
    lines += ["", f"{'tokens lost':>12}  {'requests':>8}  where it stopped"]
    for point in report.divergences[:_ROWS]:
        why = point.cause or point.reason
        place = f"token {point.position:,}, {point.piece}: {_tail(point.before_text)}"
        lines.append(f"{point.tokens_lost:>12,}  {point.requests:>8,}  {why} at {place}{_head(point.actual_text, 24)}")
    return "\n".join(lines)


def _head(text: str, width: int = 48) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def _tail(text: str, width: int = 24) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= width else f"…{shown[1 - width :]}"


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\033[1;{code}m{text}\033[0m" if colour else text
