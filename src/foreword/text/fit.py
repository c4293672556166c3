"""Fitting messages to what a chat template can express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foreword.text.tools.turns import native_turns, text_turns

if TYPE_CHECKING:
    from foreword.text.chat import Abilities, ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]


def fit_messages(
    messages: Sequence[Message], template: ChatTemplate, *, with_tools: bool = False, as_text: bool = False
) -> list[dict[str, Any]]:
    """``messages`` brought into a form that ``template`` expresses without losing anything.

    - content given as text parts becomes one string; ``developer`` counts as ``system``;
    - a system message is folded into the user message that follows where the template has no place for it;
    - tool calls and results take the form that the template asks for, see :mod:`foreword.text.tools.turns`; where it
      knows none, they become plain assistant and user text;
    - consecutive messages of one role are merged, with a blank line between them;
    - a conversation that the assistant opens gets an empty user turn before it, if the template insists on one.

    Args:
        with_tools: the template will be given tools.
        as_text: write calls and results as text whatever the template can do.

    Raises:
        ValueError: no messages, or one without role or content, with an unknown role or with a part that is no text.
    """
    can = template.abilities
    fitted = check_messages(messages)
    turns = template.tool_turns(with_tools) if with_tools or has_tool_turns(fitted) else None
    if turns is not None and has_tool_turns(fitted):
        native = turns.native and template.tool_format.name != "generic" and not as_text
        fitted = native_turns(fitted, turns) if native else text_turns(fitted)
    fitted = _merge(_fold_system(_merge(fitted), can))
    first = 1 if fitted[0]["role"] == "system" else 0
    opening = fitted[first]["role"] if len(fitted) > first else None
    needs_user = not can.assistant_first and opening in ("assistant", "tool")
    if needs_user or (with_tools and turns is not None and turns.user_first and opening != "user"):
        fitted.insert(first, {"role": "user", "content": ""})
    if not can.text_content:
        fitted = [message | {"content": text_parts(message["content"])} for message in fitted]
    return fitted


def has_tool_turns(messages: Sequence[Message]) -> bool:
    """Whether a tool was called, or answered, in ``messages``."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of ``messages`` with content as text.

    Raises:
        ValueError: as in :func:`fit_messages`.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise ValueError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    if not messages:
        raise ValueError("messages is empty: give at least one message with role and content")
    return [_check(index, message) for index, message in enumerate(messages)]


def _check(index: int, message: Message) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is a {type(message).__name__}: give a mapping with role and content")
    role = message.get("role")
    if role is None:
        raise ValueError(f"{where} has no role: give one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise ValueError(f"{where} has the unknown role {role!r}: give one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        content = ""
    calls = message.get("tool_calls")
    if calls is not None and (isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence)):
        raise ValueError(f"{where}.tool_calls is a {type(calls).__name__}: give a list of calls")
    for place, call in enumerate(calls or ()):
        if not isinstance(call, Mapping) or not isinstance(call.get("function", {}), Mapping):
            raise ValueError(
                f"{where}.tool_calls[{place}] is {call!r}: "
                'give {"id": ..., "function": {"name": ..., "arguments": ...}}'
            )
    if content is None:
        raise ValueError(f"{where} (role {role!r}) has no content: give a string or a list of text parts")
    kept = {key: value for key, value in message.items() if key != "tool_calls" or value}
    return kept | {"role": "system" if role == "developer" else role, "content": _text(where, content)}


def _text(where: str, content: Any) -> str:
    """The text of ``content``: a string or a list of strings and text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise ValueError(f"{where}.content is a {type(content).__name__}: give a string or a list of text parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, Mapping):
            raise ValueError(f"{where}.content holds a {type(part).__name__}: give strings or text parts")
        elif part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise ValueError(
                f'{where}.content has a part of type {kind!r}: only {{"type": "text", "text": ...}} is read'
            )
        else:
            texts.append(part["text"])
    return "".join(texts)


def text_parts(text: str) -> list[dict[str, str]]:
    """``text`` as a list of content parts."""
    return [{"type": "text", "text": text}]


def _merge(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive plain messages of one role become one. Tool results stay apart: each answers its own call."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last["role"] == message["role"] != "tool" and not (last.keys() | message.keys()) & {"tool_calls"}:
            merged[-1] = last | {
                key: _join(last.get(key) or "", message.get(key) or "")
                for key in ("content", "reasoning_content")
                if key in last or key in message
            }
        else:
            merged.append(message)
    return merged


def _fold_system(messages: list[dict[str, Any]], can: Abilities) -> list[dict[str, Any]]:
    """System messages without a place of their own move into the user message that follows, or become one.

    Each is folded forwards, never back to the start, so that the text of earlier turns (and what is cached of it)
    stays as it was.
    """
    folded: list[dict[str, Any]] = []
    pending = ""
    can_open = can.system and (len(messages) > 1 or can.system_alone)
    for index, message in enumerate(messages):
        if message["role"] == "system" and not (can.late_system if index else can_open):
            pending = _join(pending, message["content"])
        elif pending and message["role"] == "user":
            folded.append(message | {"content": _join(pending, message["content"])})
            pending = ""
        elif pending and message["role"] == "assistant":
            folded += [{"role": "user", "content": pending}, message]
            pending = ""
        else:
            folded.append(message)
    if pending:
        folded.append({"role": "user", "content": pending})
    return folded


def _join(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second
