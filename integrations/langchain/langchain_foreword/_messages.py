"""LangChain messages as the role/content dicts that the engine reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

_TEXT = ("text", "text-plain")
_ELSEWHERE = (
    *("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta"),
    *("reasoning", "thinking", "redacted_thinking", "reasoning_content"),
)
"""Blocks of an assistant's message that are no text: calls are read from `tool_calls`, our own thoughts from
`reasoning_content`; those of other providers are left out."""


def to_dicts(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages for `foreword.Engine.chat`.

    Raises:
        ValueError: a content block that is no text, or a kind of message the engine does not know.
    """
    return [_to_dict(index, message) for index, message in enumerate(messages)]


def _to_dict(index: int, message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(index, message), "content": _content(index, message)}
    if isinstance(message, AIMessage):
        if reasoning := _reasoning(message):
            turn["reasoning_content"] = reasoning
        if calls := [_tool_call(call) for call in _calls(message)]:
            turn["tool_calls"] = calls
    elif isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
        if message.status == "error" and "error" not in message.text[:40].lower():  # templates have no place for it
            content = turn["content"]
            turn["content"] = ["Error: ", *content] if isinstance(content, list) else f"Error: {content}"
    if turn["role"] == "tool" and message.name:
        turn["name"] = message.name
    return turn


def _role(index: int, message: BaseMessage) -> str:
    match message:
        case SystemMessage():
            role = message.additional_kwargs.get("__openai_role__")
            return role if role == "developer" else "system"
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case ToolMessage() | FunctionMessage():
            return "tool"
        case ChatMessage():
            return message.role
        case RemoveMessage():
            raise ValueError(
                f"messages[{index}] is a RemoveMessage: it tells a graph's state to drop a message and is no part of "
                "a conversation; return it from a node instead"
            )
    raise ValueError(f"messages[{index}] is a {type(message).__name__}, which has no role in a conversation")


def _content(index: int, message: BaseMessage) -> str | list[str | dict[str, Any]]:
    """The text blocks of a message, joined as LangChain's own `message.text` joins them; apart from each other if one
    has a `cache_control`."""
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    marks: dict[int, Any] = {}
    for block in message.content:
        kind = "text" if isinstance(block, str) else block.get("type")
        if isinstance(block, str):
            texts.append(block)
        elif kind in _TEXT:
            if block.get("cache_control") is not None:
                marks[len(texts)] = block["cache_control"]
            texts.append(block.get("text") or "")
        elif isinstance(message, ToolMessage) and (kind is None or kind == "json"):
            texts.append(json.dumps(block.get("json", block), ensure_ascii=False, default=str))
        elif not (isinstance(message, AIMessage) and kind in _ELSEWHERE):
            raise ValueError(
                f"messages[{index}] ({message.type}) has a content block of type {kind!r}: this model reads text only"
            )
    if not marks:
        return "".join(texts)
    return [
        {"type": "text", "text": text, "cache_control": marks[number]} if number in marks else text
        for number, text in enumerate(texts)
    ]


def _reasoning(message: AIMessage) -> str:
    """What the model thought before this answer, as it was received; "" if nothing is known of it."""
    found = message.additional_kwargs.get("reasoning_content")
    if isinstance(found, str) or isinstance(message.content, str):
        return found if isinstance(found, str) else ""
    blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") == "reasoning"]
    if message.response_metadata.get("model_provider") != "foreword":
        return ""
    return "".join(block.get("reasoning") or "" for block in blocks)


def _calls(message: AIMessage) -> Iterable[Any]:
    return (*message.tool_calls, *message.invalid_tool_calls)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("args")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": call.get("name") or "", "arguments": {} if arguments is None else arguments},
    }
