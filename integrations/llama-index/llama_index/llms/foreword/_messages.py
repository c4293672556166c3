"""LlamaIndex messages as the role/content dicts that the engine reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for :meth:`foreword.Engine.chat`.

    Raises:
        ValueError: a content block that is no text.
    """
    return [_to_dict(index, message) for index, message in enumerate(messages)]


def _to_dict(index: int, message: ChatMessage) -> dict[str, Any]:
    texts, calls = [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(_tool_call(block.tool_call_id, block.tool_name, block.tool_kwargs))
        elif not isinstance(block, (CachePoint, ThinkingBlock)):  # all is cached anyway; old thoughts are left out
            raise ValueError(
                f"messages[{index}] ({message.role.value}) has a content block of type {block.block_type!r}: "
                "this model reads text only"
            )
    turn: dict[str, Any] = {"role": _ROLES.get(message.role, message.role.value), "content": "\n".join(texts)}
    extra = message.additional_kwargs
    if turn["role"] == "assistant" and (calls or extra.get("tool_calls")):
        turn["tool_calls"] = calls or [_legacy_call(call) for call in extra["tool_calls"]]
    if turn["role"] == "tool":
        turn |= {key: extra[key] for key in ("tool_call_id", "name") if extra.get(key)}
    return turn


def _tool_call(call_id: str | None, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _legacy_call(call: Any) -> dict[str, Any]:
    """A call in ``additional_kwargs``, where OpenAI-style adapters keep it: a dict or an object of their client."""
    data = call if isinstance(call, Mapping) else call.model_dump()
    function = data.get("function", data)
    return _tool_call(data.get("id"), function.get("name"), function.get("arguments"))
