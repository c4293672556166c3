"""A pair of prompts, and what is to be said about where the second leaves the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARK = "‸"
"""Stands in the second prompt before the first character that differs; it is taken out before anything is rendered."""

Messages = list[dict[str, Any]]
Owner = tuple[str, int | None, str | None]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two prompts: one that is cached, and one that is asked next.

    Attributes:
        cached, asked: messages, or a text.
        piece: kind, index and role of the piece that holds the first difference; None where the second prompt ends.
        cached_tools, tools: of the first and of the second prompt.
        at: the text at the first difference, where no mark can stand; "" where the second prompt ends.
        share: what part of the documents a stable order would find cached, for "document_order".
        template: of those in ``tool_templates``, or the default model's.
    """

    name: str
    cached: Messages | str
    asked: Messages | str
    piece: Owner | None
    cause: str | None
    cached_tools: Messages | None = None
    tools: Messages | None = None
    at: str | None = None
    share: float | None = None
    template: str = "default"


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, *calls: tuple[str, str]) -> dict[str, Any]:
    """An answer; ``calls`` are ids and arguments (JSON text) of calls of ``look_up``."""
    made = [
        {"id": id_, "type": "function", "function": {"name": "look_up", "arguments": arguments}}
        for id_, arguments in calls
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def result(content: str, call: str = "call00001") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call, "name": "look_up"}


def tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """A definition with arguments by name and description."""
    properties = {each: {"type": "string", "description": text} for each, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


RULES = (
    "You answer customers of a bicycle shop. Be polite and brief, name the page of the manual you quote, and never "
    "promise a date of delivery. If you do not know, say so and offer to ask a mechanic."
)
SYSTEM = system(RULES)
SYSTEM_OWNER: Owner = ("system", 0, "system")
TURNS = [
    user("Which oil should I use for a chain in winter?"),
    assistant("A wet lubricant: it stays on the chain in rain and snow."),
    user("And how often should I apply it?"),
    assistant("After every ride in the rain, else every two hundred kilometres."),
    user("Do I have to clean the chain before that?"),
]
