"""Which part of a rendered prompt is which message, tool or passage."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from foreword.core.common_prefix import common_prefix_length
from foreword.core.explanation import PieceKind, PromptPiece
from foreword.text.chat import Message
from foreword.text.conversation import Rendered
from foreword.text.passages import Span, part_spans, passages
from foreword.text.tools.canonical import canonical_tools

_FIRST_MARK = 0xF0000  # private characters
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_MOST_MARKS = 60_000
_ANCHOR = 32  # characters by which a place is found again in another rendering
_Tool = Mapping[str, Any]
_SPELLINGS: tuple[Callable[[_Tool], str], ...] = (
    lambda tool: json.dumps(tool, ensure_ascii=False),
    lambda tool: json.dumps(tool["function"], ensure_ascii=False),
    lambda tool: json.dumps(tool, ensure_ascii=False, indent=4),
    lambda tool: json.dumps(tool, ensure_ascii=False, indent=2),
    str,
    lambda tool: json.dumps(tool["function"], ensure_ascii=False, indent=4),
)
"""How templates print a definition."""


class Piece(NamedTuple):
    """A piece and the characters ``[start, end)`` of the prompt that it holds."""

    piece: PromptPiece
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt and what it is made of.

    Attributes:
        pieces: in the order of the text, which they cover without a gap.
        messages: of the conversation, as given, with content as text; empty for a text prompt.
        tools: the definitions, in the order given.
        contents: where the contents of messages stand, by their index.
    """

    text: str
    pieces: tuple[Piece, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[_Tool, ...] = ()
    contents: Mapping[int, Span] = field(default_factory=dict)

    def at(self, offset: int) -> Piece:
        """The piece that holds the character at ``offset``; behind the end, the last piece."""
        found = bisect_right(self.pieces, offset, key=lambda piece: piece.start) - 1
        return self.pieces[max(found, 0)]

    def owner(self, offset: int) -> PromptPiece:
        """What holds the character at ``offset``; behind the end, what holds the last."""
        return self.at(offset).piece

    def whole(self, offset: int) -> Span:
        """What belongs together around ``offset``: a message's content, or else its :meth:`block`."""
        content = self.contents.get(-1 if (index := self.owner(offset).index) is None else index)
        is_inside = content and self.owner(offset).role and content[0] <= offset <= content[1]
        return content if content and is_inside else self.block(offset)

    def block(self, offset: int) -> Span:
        """All of a message, with what the template puts around it; of what is no message, the piece."""
        here = self.at(offset)
        if here.piece.role is None or here.piece.index is None:
            return here.start, here.end
        own = [piece for piece in self.pieces if piece.piece.index == here.piece.index and piece.piece.role]
        return own[0].start, own[-1].end

    def with_answer(self, text: str) -> PromptText:
        """The prompt and what was answered to it, as the cache holds them; the answer belongs to the last piece."""
        piece, start, end = self.pieces[-1]
        if piece.kind in ("generation", "text"):
            added = Piece(piece, start, end + len(text))
            return replace(self, text=self.text + text, pieces=(*self.pieces[:-1], added))
        added = Piece(PromptPiece("generation"), end, end + len(text))
        return replace(self, text=self.text + text, pieces=(*self.pieces, added))


def plain(text: str) -> PromptText:
    """A prompt that is no conversation."""
    return PromptText(text, (Piece(PromptPiece("text"), 0, len(text)),))


def locate(rendered: Rendered, given: Sequence[Message] | None = None) -> PromptText:
    """The pieces of a conversation.

    One more rendering, with marks around each content, tells where contents stand, however the template orders, merges
    or folds them. Where between two contents a message ends and the next begins is where the conversation that ends
    with the first stops being a prefix of the text; that is rendered once for each pair of roles.

    Args:
        given: the messages as the caller gave them, if contents in several text parts are to be told apart.
    """
    text = rendered.text
    contents = _marked_contents(rendered) or _found_contents(rendered)
    end = _end_of(rendered, len(rendered.messages), max((last for _, last in contents.values()), default=0))
    pieces = _message_pieces(rendered, contents, end)
    pieces = [*pieces, Piece(PromptPiece("generation"), end, len(text))]
    pieces = overlay(pieces, _tool_pieces(rendered, contents, pieces))
    pieces = overlay(pieces, _documents(rendered, contents, given))
    return PromptText(text, tuple(pieces), tuple(rendered.messages), tuple(rendered.options.tools or ()), contents)


# -- messages ------------------------------------------------------------------------------------------------------


def _marked_contents(rendered: Rendered) -> dict[int, Span]:
    """Where the contents of messages stand, by their index; empty if marks change the text."""
    places = []
    for index, message in enumerate(rendered.messages):
        content = message["content"]
        if core := content.strip():
            start = content.index(core)
            places += [(index, start), (index, start + len(core))]
    found = marked(rendered, places)
    return {
        places[number][0]: (found[number], found[number + 1])
        for number in range(0, len(places), 2)
        if number in found and number + 1 in found
    }


def marked(rendered: Rendered, places: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Where places in the contents of messages stand in the text, by their number.

    Args:
        places: index of a message, and characters of its content before the place; in order.

    Returns:
        Without those that the template does not show; empty if marks change the text.
    """
    if not places or len(places) > _MOST_MARKS or _MARK.search(rendered.text):
        return {}
    messages = list(rendered.messages)
    for number in reversed(range(len(places))):
        index, offset = places[number]
        content = messages[index]["content"]
        content = f"{content[:offset]}{chr(_FIRST_MARK + number)}{content[offset:]}"
        messages[index] = messages[index] | {"content": content}
    try:
        text = rendered.conversations.text_of(messages, rendered.options, rendered.params)
    except ValueError:
        return {}
    if _MARK.sub("", text) != rendered.text:
        return {}
    found: dict[int, int] = {}
    for count, mark in enumerate(_MARK.finditer(text)):
        found.setdefault(ord(mark[0]) - _FIRST_MARK, mark.start() - count)
    return found


def _found_contents(rendered: Rendered) -> dict[int, Span]:
    """As :func:`_marked_contents`, by looking for the contents one after the other."""
    spans: dict[int, Span] = {}
    at = 0
    for index, message in enumerate(rendered.messages):
        core = message["content"].strip()
        place = rendered.text.find(core, at) if core else -1
        if place >= 0:
            at = place + len(core)
            spans[index] = (place, at)
    return spans


def _end_of(rendered: Rendered, count: int, low: int) -> int:
    """Where the first ``count`` messages end in the text, at or behind ``low``, where the last one's content ends.

    It is where their own rendering stops being a prefix of the text, or if it is none (tools that move to the last
    message, thoughts that are left out), where what it has behind the text around ``low`` does. Else it is ``low``.
    """
    text = rendered.text
    try:
        begin = rendered.conversations.text_of(
            rendered.messages[:count], rendered.options, rendered.params, speaks_next=False
        )
    except ValueError:
        return low
    same = common_prefix(begin, text)
    if same >= low:
        return same
    anchor = text[max(low - _ANCHOR, 0) : low]
    place = begin.rfind(anchor)
    return low + common_prefix(begin[place + len(anchor) :], text[low : low + len(begin)]) if place >= 0 else low


def _message_pieces(rendered: Rendered, contents: Mapping[int, Span], end: int) -> list[Piece]:
    text, messages = rendered.text, rendered.messages
    order = sorted(range(len(messages)), key=lambda index: (contents[index][0] if index in contents else -1, index))
    for index in [index for index in order if index not in contents]:  # behind the message before it
        order.remove(index)
        order.insert(order.index(index - 1) + 1 if index else 0, index)
    head = _head(rendered, contents)
    start, pieces = head, [Piece(PromptPiece("system", None, "system"), 0, head)]
    closings: dict[tuple[str, str], str] = {}
    openings: dict[tuple[str, str], str] = {}
    leading = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    for place, index in enumerate(order):
        following = order[place + 1] if place + 1 < len(order) else None
        border = end
        if following is not None:
            low = max(contents[index][1] if index in contents else start, start)
            high = next((contents[each][0] for each in order[place + 1 :] if each in contents), end)
            pair = (_kind(messages[index]), _kind(messages[following]))
            closes = index in contents and not messages[index].get("tool_calls")
            gap = text[low:high]
            if closes and pair in closings and gap.startswith(closings[pair]):
                border = low + len(closings[pair])
            elif following in contents and pair in openings and gap.endswith(openings[pair]):
                border = high - len(openings[pair])
            else:
                border = min(_end_of(rendered, following, low), high) if following == index + 1 else low
                if closes:
                    closings[pair] = text[low:border]
                if following in contents:
                    openings[pair] = text[border:high]
        kind: PieceKind = "system" if index < leading else "message"
        pieces.append(Piece(PromptPiece(kind, index, messages[index]["role"]), start, border))
        start = border
    return pieces


def _kind(message: Message) -> str:
    return f"{message['role']}{'+calls' if message.get('tool_calls') else ''}"


def _head(rendered: Rendered, contents: Mapping[int, Span]) -> int:
    """Where the template's own system prompt ends, if no message is one; else 0.

    What stands before the first message's content, and not before its content when it comes again later, is the head.
    """
    first = rendered.messages[0]
    if first["role"] not in ("user", "assistant") or 0 not in contents:
        return 0
    other = "assistant" if first["role"] == "user" else "user"
    probe = [{"role": role, "content": content} for role, content in ((first["role"], "alpha"), (other, "beta"))]
    try:
        text = rendered.conversations.text_of([*probe, probe[0]], rendered.options, rendered.params, speaks_next=False)
    except ValueError:
        return 0
    own, again = text.find("alpha"), text.rfind("alpha")
    bos = rendered.conversations.tokenizer.special_tokens.get("bos_token", "")
    begin = len(bos) if bos and text.startswith(bos) else 0
    head = own - common_prefix(text[begin:own][::-1], text[:again][::-1])
    says_something = any(char.isspace() for char in text[begin:head])  # not part of a token that begins every text
    return head if says_something and rendered.text.startswith(text[:head]) else 0


# -- tools ---------------------------------------------------------------------------------------------------------


def _tool_pieces(rendered: Rendered, contents: Mapping[int, Span], pieces: Iterable[Piece]) -> list[Piece]:
    """The definitions, and what the prompt says around them."""
    given = rendered.options.tools or ()
    if not given:
        return []
    order, tools = list(range(len(given))), list(given)
    if rendered.options.canonical_tools:
        order.sort(key=lambda index: str(given[index]["function"]["name"]))
        tools = [*canonical_tools(given)]
    section = rendered.conversations.template.tool_format.section(tools) or ""
    begin = max(rendered.text.find(section), 0) if section else 0
    spans = _definitions(rendered.text, tools, begin)
    if not spans:
        return []
    found = [Piece(PromptPiece("tools", index), *span) for index, span in zip(order, spans, strict=True)]
    if section and rendered.text.startswith(section, begin):
        around = (begin, begin + len(section))
    else:
        around = _around(spans, contents, pieces)
    return overlay([Piece(PromptPiece("tools"), *around)], found)


def _around(spans: list[Span], contents: Mapping[int, Span], pieces: Iterable[Piece]) -> Span:
    """From the content before the definitions to the content behind them, inside one message."""
    first, last = spans[0][0], spans[-1][1]
    block = next(piece for piece in pieces if piece.start <= first < piece.end)
    start, end = block.start, block.end
    if block.piece.index is not None and block.piece.index in contents:
        content = contents[block.piece.index]
        start, end = (content[1], end) if content[1] <= first else (start, content[0])
    return min(start, first), max(end, last)


def _definitions(text: str, tools: Sequence[_Tool], begin: int) -> list[Span]:
    """Where the definitions stand that ``text`` shows in this order; [] if it does not."""
    for spell in _SPELLINGS:
        spans, at = [], begin
        for tool in tools:
            spelled = spell(tool)
            place = text.find(spelled, at)
            if place < 0:
                break
            at = place + len(spelled)
            spans.append((place, at))
        if len(spans) == len(tools):
            return spans
    return _by_name(text, tools, begin)


def _by_name(text: str, tools: Sequence[_Tool], begin: int) -> list[Span]:
    """Definitions in a spelling of the template's own: from what introduces each name to the next, or the line's end"""
    names = []
    for tool in tools:
        place = re.compile(rf"(?<!\w){re.escape(tool['function']['name'])}(?!\w)").search(text, begin)
        if place is None:
            return []
        names.append(place.start())
        begin = place.end()
    intro = min((common_prefix(text[:a][::-1], text[:b][::-1]) for a, b in pairwise(names)), default=0)
    starts = [name - intro for name in names]
    end = text.find("\n", names[-1])
    return list(zip(starts, [*starts[1:], end if end >= 0 else len(text)], strict=True))


# -- passages ------------------------------------------------------------------------------------------------------


def _documents(rendered: Rendered, contents: Mapping[int, Span], given: Sequence[Message] | None) -> list[Piece]:
    found = []
    for index, (start, end) in contents.items():
        message = rendered.messages[index]
        if message["role"] == "assistant":
            continue
        shown = rendered.text[start:end]
        parts = _parts(given[index]["content"]) if given else []
        if len(parts) > 1 and "".join(parts).strip() == shown:
            shift = start - (len(message["content"]) - len(message["content"].lstrip()))
            spans = [(max(a + shift, start), min(b + shift, end)) for a, b in part_spans(parts)]
        else:
            spans = [(a + start, b + start) for a, b in passages(shown, is_system=message["role"] == "system")]
        found += [Piece(PromptPiece("document", index, message["role"]), *span) for span in spans]
    return sorted(found, key=lambda piece: piece.start)


def _parts(content: Any) -> list[str]:
    if not isinstance(content, (list, tuple)):
        return []
    return [part if isinstance(part, str) else str(part.get("text", "")) for part in content]


# -- spans ---------------------------------------------------------------------------------------------------------


def overlay(pieces: Sequence[Piece], upper: Sequence[Piece]) -> list[Piece]:
    """``pieces`` with ``upper`` on top of them; both in order, none overlapping its own kind. Empty ones go."""
    result: list[Piece] = []
    for piece, start, end in pieces:
        for top in upper:
            if start < top.end and top.start < end:
                result += [Piece(piece, start, top.start), Piece(top.piece, max(top.start, start), min(top.end, end))]
                start = max(start, top.end)
        result.append(Piece(piece, start, end))
    return [piece for piece in result if piece.start < piece.end]


def common_prefix(first: str, second: str) -> int:
    """How many characters both begin with."""
    return common_prefix_length(first, 0, second, 0, len(first))
