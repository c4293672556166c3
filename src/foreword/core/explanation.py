"""Why the cached part of a prompt ends where it ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Reason = Literal["complete", "diverged", "evicted", "never_seen", "other_namespace"]
PieceKind = Literal["system", "tools", "document", "message", "generation", "text"]
Cause = Literal[
    "clock",
    "identifier",
    "tool_order",
    "json_key_order",
    "document_order",
    "whitespace",
    "history_changed",
    "history_truncated",
    "retokenized",
    "namespace",
]


class PromptPiece(NamedTuple):
    """A part of a prompt that a program wrote.

    Attributes:
        kind: "system": a leading system message; "tools": a tool's definition; "document": a retrieved passage inside
            a message; "message": any other message; "generation": what the template puts before the answer;
            "text": a prompt that is no conversation.
        index: in the list of tools for "tools", else in the list of messages, both as given and from 0; None for
            "text", "generation", for the template's own words around the tools, and for a system prompt of its own.
        role: of the message; None where there is none.
    """

    kind: PieceKind
    index: int | None = None  # type: ignore[assignment]  # it hides tuple.index, which nobody asks a piece for
    role: str | None = None

    def __str__(self) -> str:
        where = "" if self.index is None else f" {self.index}"
        return {
            "system": f"the system prompt (message{where})" if where else "the template's own system prompt",
            "tools": f"tool{where}" if where else "the tools",
            "document": f"a document in message{where}",
            "message": f"message{where} ({self.role})",
            "generation": "the start of the answer",
            "text": "the text",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """How much of a prompt is cached, where and why the match stopped, and what that costs.

    Attributes:
        prompt_tokens: tokens of the prompt.
        matched_tokens: leading tokens whose KV is cached; at least one is computed all the same.
        reason: "complete": all is cached. "diverged": another prompt went on differently from here. "evicted": it was
            cached, and gave way to others. "never_seen": nothing cached goes on from here. "other_namespace": it is
            cached for another model, adapter or salt.
        position: index of the first token that is not matched; None when all is.
        piece: what holds that token; None when all is matched.
        expected_text: what is cached from there on, its beginning; "" if nothing is.
        actual_text: the prompt's own text from there on, its beginning.
        before_text: the end of what both share.
        cause: what made the prompts differ, where it can be named.
        lost_tokens: tokens behind the stop that are computed though the nearest prompt held the same text.
        lost_seconds: the time that takes at the prefill speed measured so far; None before any was.
        reusable_share: for "document_order", the share of the documents' tokens, in [0, 1], that a stable order would
            have found cached.
        nearest: id of the request whose prompt is the nearest; None without one.
    """

    prompt_tokens: int
    matched_tokens: int
    reason: Reason
    position: int | None = None
    piece: PromptPiece | None = None
    expected_text: str = ""
    actual_text: str = ""
    before_text: str = ""
    cause: Cause | None = None
    lost_tokens: int = 0
    lost_seconds: float | None = None
    reusable_share: float | None = None
    nearest: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON takes them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"piece": self.piece._asdict() if self.piece else None}

    def __str__(self) -> str:
        from foreword.core.explanation_text import render

        return render(self)
