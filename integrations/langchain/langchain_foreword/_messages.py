"""LangChain messages as the role/content dicts that the engine reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

_TEXT = ("text", "text-plain")
_NOT_REPLAYED = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking")
"""Blocks of an assistant's message that are no text: calls are read from `tool_calls`, old thoughts are left out."""


def to_dicts(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages for `foreword.Engine.chat`.

    Raises:
        ValueError: a content block that is no text, or a kind of message the engine does not know.
    """
    return [_to_dict(index, message) for index, message in enumerate(messages)]


def _to_dict(index: int, message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(index, message), "content": _text(index, message)}
    if isinstance(message, AIMessage):
        calls = [_tool_call(call) for call in (*message.tool_calls, *message.invalid_tool_calls)]
        return turn | {"tool_calls": calls} if calls else turn
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if turn["role"] == "tool" and message.name:
        turn["name"] = message.name
    return turn


def _role(index: int, message: BaseMessage) -> str:
    match message:
        case SystemMessage():
            return "system"
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ToolMessage() | FunctionMessage():
            return "tool"
        case ChatMessage():
            return message.role
    raise ValueError(f"messages[{index}] is a {type(message).__name__}, which has no role in a conversation")


def _text(index: int, message: BaseMessage) -> str:
    """The text blocks of a message, joined as LangChain's own `message.text` joins them."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for block in message.content:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind in _TEXT:
            texts.append(block if isinstance(block, str) else block.get("text", ""))
        elif not (isinstance(message, AIMessage) and kind in _NOT_REPLAYED):
            raise ValueError(
                f"messages[{index}] ({message.type}) has a content block of type {kind!r}: this model reads text only"
            )
    return "".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": call.get("name"), "arguments": call.get("args")},
    }
