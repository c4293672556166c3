"""What made a prompt differ from one that is cached: the cause, where evidence around the difference names one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.core.explanation import Cause, PromptPiece
from foreword.text.causes.align import shared, similarity
from foreword.text.causes.clock import clock
from foreword.text.causes.history import history, message_key
from foreword.text.causes.identifier import identifier, name
from foreword.text.causes.markup import read_like
from foreword.text.causes.order import document_order, is_whitespace, json_cause, tools_cause
from foreword.text.passages import Span, passages
from foreword.text.pieces import PromptText, common_prefix

_ALIKE = 0.5  # of what follows a clock or an id: else more than that has changed
_SHORT = 20  # characters that need not agree
_PATTERN = 40  # characters behind a slot that make a prompt of one pattern
_NOW = re.compile(
    r"\b(?:time|date|now|today|timestamp|clock|as of|it'?s|it is|datum|uhrzeit|zeit|heute|fecha|hora|hoy|heure"
    r"|aujourd'hui|oggi|ora|data|agora|hoje|datetime)\b|時|日付|时间|日期",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two prompts begin to differ, and why.

    Attributes:
        offset: the first character that differs; the end of the text if none does.
        piece: what holds it in the actual prompt; None if that ends there.
        cause: None where the evidence names none: another question, say, or another passage.
        lost_characters: characters of the actual prompt behind ``offset``, up to where the answer begins, that the
            expected one has behind it too: what the difference keeps from being reused.
        reusable_share: for "document_order", what part of the passages' characters both prompts have.
    """

    offset: int
    piece: PromptPiece | None = None
    cause: Cause | None = None
    lost_characters: int = 0
    reusable_share: float | None = None


def compare(
    expected: PromptText, actual: PromptText, offset: int | None = None, *, retokenized: bool = False
) -> Difference:
    """Where ``actual`` leaves ``expected``, the prompt that is cached, and why.

    Args:
        expected, actual: of the expected prompt, the text alone will do; see :func:`read_like`.
        offset: of the first token that differs, where more is known than the texts tell; the first character that
            differs lies there or behind it.
        retokenized: the texts agree at ``offset``, their tokens do not.
    """
    at = common_prefix(expected.text, actual.text)
    if retokenized:
        at = at if offset is None else offset
        return _difference(expected, actual, at, "retokenized")
    at = max(at, offset or 0)
    if at >= len(actual.text):
        return Difference(at)
    if at >= len(expected.text):
        return Difference(at, actual.owner(at))
    if actual.messages and expected.pieces[0].piece.kind == "text":
        expected = read_like(expected.text, actual)
    cause, share = _Comparison(expected, actual, at).cause()
    return _difference(expected, actual, at, cause, share)


def _difference(
    expected: PromptText, actual: PromptText, at: int, cause: Cause | None, share: float | None = None
) -> Difference:
    last = actual.pieces[-1]
    opening = actual.text[last.start :] if last.piece.kind == "generation" else ""
    lost = shared(expected.text[at:].removesuffix(opening), actual.text[at:].removesuffix(opening))
    return Difference(at, actual.owner(at) if at < len(actual.text) else None, cause, lost, share)


class _Comparison:
    """The surroundings of the first difference in both prompts.

    Attributes:
        here, there: the pieces that hold it in the actual and in the expected prompt.
        own, other: the spans of the messages (or other wholes) that these belong to.
        is_same: whether it is the same message of both.
        past: what became of the earlier turns, if anything did.
    """

    def __init__(self, expected: PromptText, actual: PromptText, at: int) -> None:
        self.expected, self.actual, self.at = expected, actual, at
        self.here, self.there = actual.owner(at), expected.owner(at)
        self.own, self.other = actual.whole(at), expected.whole(at)
        if self.own[0] != self.other[0]:  # one of them has no content of its own
            self.own, self.other = actual.block(at), expected.block(at)
        whole = [
            (None if piece.kind == "document" else piece.kind, piece.index, piece.role)
            for piece in (self.here, self.there)
        ]
        self.is_same = self.own[0] == self.other[0] and whole[0][1:] == whole[1][1:] and self.there.kind != "generation"
        self.past = history(expected.messages, actual.messages) or self._of_answer()

    def cause(self) -> tuple[Cause | None, float | None]:
        """The cause and, for "document_order", the share that is reusable."""
        expected, actual, at = self.expected, self.actual, self.at
        if "tools" in (self.here.kind, self.there.kind):
            return self._of_tools(), None
        if self.past == "history_truncated":
            return self.past, None
        ends = (self.other[1], self.own[1]) if self.is_same else None
        if is_whitespace(expected.text, actual.text, at, ends):
            return "whitespace", None
        if self.is_same:
            if found_in_calls := self._of_calls():
                return found_in_calls, None
            if found := json_cause(expected.text, actual.text, at, self.own[0]):
                return found[0] or self.past, found[1]
            if (share := self._document_order()) is not None:
                return "document_order", share
            if local := self._of_values():
                return local, None
        return self.past, None

    def _of_tools(self) -> Cause | None:
        expected, actual, at = self.expected, self.actual, self.at
        if expected.tools and actual.tools and (found := tools_cause(_tools(expected), _tools(actual))):
            return found
        if is_whitespace(expected.text, actual.text, at):
            return "whitespace"
        if not expected.tools:  # of the expected prompt there may be the text alone
            begin = next(start for piece, start, _ in actual.pieces if piece.kind == "tools")
            return (json_cause(expected.text, actual.text, at, begin) or (None,))[0]
        same = self.here == self.there and expected.at(at).start == actual.at(at).start
        return self._of_values(actual.at(at)[1:], expected.at(at)[1:]) if same else None

    def _of_answer(self) -> Cause | None:
        """Whether the answer that stood behind the expected prompt came back as another text."""
        last = len(self.actual.messages) - 1
        came_back = self.here.role == "assistant" and self.here.index is not None and self.here.index < last
        if self.there.kind != "generation" or not came_back:
            return None
        wrote, shown = self.expected.text[self.other[0] :], self.actual.text[self.own[0] : self.own[1]]
        return "history_changed" if similarity(wrote, shown) >= _ALIKE else None

    def _of_calls(self) -> Cause | None:
        """What differs between calls whose names and arguments are the same values."""
        index = self.here.index
        if index is None or index >= min(len(self.expected.messages), len(self.actual.messages)):
            return None
        first, second = self.expected.messages[index], self.actual.messages[index]
        if not first.get("tool_calls") or message_key(first) != message_key(second):
            return None
        spelled = [[call.get("function", call) for call in message["tool_calls"]] for message in (first, second)]
        return "json_key_order" if str(spelled[0]) != str(spelled[1]) else "identifier"

    def _document_order(self) -> float | None:
        begin = self.own[0]
        texts = self.expected.text[slice(*self.other)], self.actual.text[slice(*self.own)]
        spans = _passages(self.expected, self.other), _passages(self.actual, self.own)
        return document_order(*texts, self.at - begin, spans)

    def _of_values(self, own: Span | None = None, other: Span | None = None) -> Cause | None:
        """A clock, an id or a name, if nearly nothing else changed in the spans that hold it."""
        if own is None or other is None:
            own, other = self.own, self.other
            if "document" in (self.here.kind, self.there.kind) or self.here.kind == "text":
                passage = _passage_at(self.actual, own, self.at), _passage_at(self.expected, other, self.at)
                if passage[0] and passage[1]:
                    own, other = passage[0], passage[1]
        texts = self.expected.text[: other[1]], self.actual.text[: own[1]]
        checks: list[tuple[Cause, Callable[[str, str, int], tuple[Span, Span] | None]]] = [
            ("clock", clock),
            ("identifier", identifier),
        ]
        for cause, check in checks:
            found = check(*texts, self.at)
            if found and self._is_slot(texts, found, cause):
                return cause
        if self.here.kind not in ("system", "text") or not (found := name(*texts, self.at)):
            return None
        rest = len(texts[1]) - found[1][1]
        at_head = self.here.kind == "system" or (rest >= _PATTERN and 3 * (self.at - own[0]) <= rest)
        return "identifier" if at_head else None

    def _is_slot(self, texts: tuple[str, str], found: tuple[Span, Span], cause: Cause) -> bool:
        """Whether what was found is the difference, and not just the first place where unlike texts differ.

        Turns of other conversations may hold other dates and numbers, too: there a good part that follows must be
        alike, or the turns around it, or it must be said that this is the time.
        """
        rest = texts[0][found[0][1] :], texts[1][found[1][1] :]
        alike = similarity(*rest) >= _ALIKE
        if self.here.kind not in ("message", "document"):
            return alike or max(map(len, rest)) < _SHORT
        line = texts[1][max(texts[1].rfind("\n", 0, found[1][0]), 0) : found[1][0]]
        says_so = cause == "clock" and self.here.kind == "message" and bool(_NOW.search(line))
        return says_so or (alike and (len(rest[1]) >= _PATTERN or self.past is not None))


def _tools(prompt: PromptText) -> list[Mapping[str, Any]]:
    """The definitions in the order in which the prompt shows them."""
    return [
        prompt.tools[piece.index] for piece, *_ in prompt.pieces if piece.kind == "tools" and piece.index is not None
    ]


def _passages(prompt: PromptText, span: Span) -> list[Span]:
    """The passages inside ``span``, counted from its start."""
    start, end = span
    if prompt.pieces[0].piece.kind == "text":
        return passages(prompt.text)
    return [(a - start, b - start) for piece, a, b in prompt.pieces if piece.kind == "document" and start <= a < end]


def _passage_at(prompt: PromptText, span: Span, at: int) -> Span | None:
    begin = span[0]
    return next(((a + begin, b + begin) for a, b in _passages(prompt, span) if a + begin <= at < b + begin), None)
