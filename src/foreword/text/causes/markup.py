"""A prompt of which only the text is known, read with the markup of another one."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from foreword.core.explanation import PromptPiece
from foreword.text.passages import Span, passages
from foreword.text.pieces import Piece, PromptText, overlay


def read_like(text: str, other: PromptText) -> PromptText:
    """The pieces of ``text``, whose messages begin and end as those of ``other`` do.

    It is a guess, for contents may hold markup too, and roles that ``other`` lacks are not recognised. Tools count as
    part of the system prompt here.
    """
    openings, closing = _markup(other)
    found = (
        list(re.finditer("|".join(map(re.escape, sorted(openings, key=len, reverse=True))), text)) if openings else []
    )
    if not found:
        return PromptText(text, (Piece(PromptPiece("text"), 0, len(text)),))
    pieces = [Piece(PromptPiece("system", None, "system"), 0, found[0].start())]
    messages: list[dict[str, Any]] = []
    contents: dict[int, Span] = {}
    documents: list[Piece] = []
    is_leading = True
    for match, following in zip(found, [*found[1:], None], strict=True):
        start, end, role = match.end(), following.start() if following else len(text), openings[match[0]]
        if following is None and start == end:
            pieces.append(Piece(PromptPiece("generation"), match.start(), end))
            break
        index = len(messages)
        stop = end - len(closing) if text.endswith(closing, start, end) else end
        content = text[start:stop]
        is_leading = is_leading and role == "system"
        pieces.append(Piece(PromptPiece("system" if is_leading else "message", index, role), match.start(), end))
        messages.append({"role": role, "content": content})
        contents[index] = (start, stop)
        if role != "assistant":
            spans = passages(content, is_system=role == "system")
            documents += [Piece(PromptPiece("document", index, role), a + start, b + start) for a, b in spans]
    return PromptText(text, tuple(overlay(pieces, documents)), tuple(messages), contents=contents)


def _markup(prompt: PromptText) -> tuple[dict[str, str], str]:
    """What messages of each role begin with, and what most messages end with."""
    openings: dict[str, str] = {}
    endings: Counter[str] = Counter()
    for index, (start, end) in prompt.contents.items():
        own = [piece for piece in prompt.pieces if piece.piece.index == index and piece.piece.role is not None]
        opening = prompt.text[own[0].start : start] if own else ""  # no piece where one of a tool covers it all
        if opening.strip():
            openings.setdefault(opening, str(own[0].piece.role))
            endings[prompt.text[end : own[-1].end]] += 1
    last = prompt.pieces[-1]
    if last.piece.kind == "generation":
        openings.setdefault(prompt.text[last.start : last.end], "assistant")
    return openings, endings.most_common(1)[0][0] if endings else ""
