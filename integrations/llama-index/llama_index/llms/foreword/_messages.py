"""LlamaIndex messages as the role/content dicts that the engine reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import CachePoint, ChatMessage, MessageRole, TextBlock

from llama_index.llms.foreword._blocks import is_thinking, is_tool_call

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for :meth:`foreword.Engine.chat`.

    What the model said itself goes back unchanged, so that the engine recognises its own tokens in it.

    Raises:
        ValueError: a message that is no ``ChatMessage``, or a content block that is no text.
    """
    return [_to_dict(index, message) for index, message in enumerate(messages)]


def _to_dict(index: int, message: ChatMessage) -> dict[str, Any]:
    if not isinstance(message, ChatMessage):
        raise ValueError(f"messages[{index}] is a {type(message).__name__}: give ChatMessage(role=..., content=...)")
    texts, thoughts = list[str](), []
    marks: dict[int, Any] = {}  # by the number of texts before them
    block: Any
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, CachePoint):
            marks[len(texts)] = block.cache_control.model_dump(exclude_none=True)
        elif is_thinking(block):
            thoughts.append(block.content or "")
        elif not is_tool_call(block):
            raise ValueError(
                f"messages[{index}] ({message.role.value}) has a content block of type {block.block_type!r}: "
                "this model reads text only"
            )
    turn: dict[str, Any] = {"role": _ROLES.get(message.role, message.role.value), "content": _content(texts, marks)}
    if turn["role"] == "assistant":
        reasoning = "\n".join(thoughts) or message.additional_kwargs.get("reasoning_content")
        calls = list(tool_calls(message))
        turn |= {"reasoning_content": reasoning} if reasoning else {}
        turn |= {"tool_calls": calls} if calls else {}
    elif turn["role"] == "tool":
        turn |= _origin(message)
    return turn


def _content(texts: list[str], marks: Mapping[int, Any]) -> str | list[dict[str, Any]]:
    """The texts as one; in parts where cache points stand between them, each mark on the part before it."""
    if not marks:
        return "\n".join(texts)
    parts: list[dict[str, Any]] = [{"type": "text", "text": ""}] if 0 in marks else []
    parts += [{"type": "text", "text": f"\n{text}" if number else text} for number, text in enumerate(texts)]
    for number, mark in marks.items():
        parts[number if 0 in marks else number - 1]["cache_control"] = mark
    return parts


def tool_calls(message: ChatMessage) -> Iterator[dict[str, Any]]:
    """The calls that a message makes, OpenAI-style: from its blocks, or else from ``additional_kwargs``.

    ``arguments`` are a dict, or text as it was generated.
    """
    blocks: list[Any] = [block for block in message.blocks if is_tool_call(block)]
    for block in blocks:
        yield _call(block.tool_call_id, block.tool_name, block.tool_kwargs)
    if not blocks:
        for call in message.additional_kwargs.get("tool_calls") or ():
            yield _legacy_call(call)


def _origin(message: ChatMessage) -> dict[str, Any]:
    """Which call a tool's result answers."""
    extra = message.additional_kwargs
    found = {key: extra[key] for key in ("tool_call_id", "name") if extra.get(key)}
    block: Any
    for block in message.blocks:
        if is_tool_call(block):
            found = {"tool_call_id": block.tool_call_id, "name": block.tool_name} | found
    return {key: value for key, value in found.items() if value}


def _call(call_id: str | None, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _legacy_call(call: Any) -> dict[str, Any]:
    """A call in ``additional_kwargs``, where OpenAI-style adapters keep it: a dict or an object of their client."""
    data = call if isinstance(call, Mapping) else call.model_dump()
    function = data.get("function", data)
    return _call(data.get("id"), function.get("name"), function.get("arguments"))
