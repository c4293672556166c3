"""Chat templates, and fitting messages to what a template can express."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]

_PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat template can express, found out by rendering tiny conversations.

    Attributes:
        system: a system message at the start.
        system_alone: a conversation that is nothing but a system message.
        late_system: a system message later in the conversation.
        tool: a message of role ``tool``.
        tool_calls: an assistant message with ``tool_calls``.
        assistant_first: a conversation that the assistant opens.
        text_content: content as a plain string; without it, content must be a list of parts.
    """

    system: bool
    system_alone: bool
    late_system: bool
    tool: bool
    tool_calls: bool
    assistant_first: bool
    text_content: bool


class ChatTemplate:
    """A chat template as Hugging Face checkpoints carry it.

    Args:
        source: the jinja2 text.
        special_tokens: variables such as ``bos_token`` and ``eos_token`` that the template may use.
        tool_source: another template, used when tools are given; None uses ``source``.

    Raises:
        ValueError: the text is no jinja2 template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, tool_source: str | None = None
    ) -> None:
        self.source = source
        self._variables = dict(special_tokens or {})
        self._template = _compile(source)
        self._tool_template = _compile(tool_source) if tool_source else self._template

    @classmethod
    def plain(cls) -> ChatTemplate:
        """The stand-in for checkpoints without a template: ``User: ...``, blank line, ``Assistant:``.

        It is plain text on purpose. Such checkpoints are base models: they know no turn tokens, and continue a
        transcript best when it looks like one.
        """
        return cls(_PLAIN)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as the text the model reads. ``tools`` are JSON-schema function descriptions.

        Raises:
            ValueError: the template refuses the messages, or cannot express them; with its own reason.
        """
        template = self._tool_template if tools else self._template
        variables = {"messages": list(messages), "tools": list(tools) if tools else None, "documents": None}
        try:
            # A template is a program by someone else: whatever it raises is about these messages.
            text: str = template.render(**self._variables, **variables, add_generation_prompt=add_generation_prompt)
            return text
        except Exception as error:
            raise ValueError(f"the model's chat template cannot express these messages: {error}") from error

    @cached_property
    def abilities(self) -> Abilities:
        """What the template can express."""
        text_content = self._expresses(("user", "alpha")) or not self._expresses(("user", "alpha"), parts=True)
        return Abilities(
            system=self._expresses(("system", "alpha"), ("user", "beta"), parts=not text_content),
            system_alone=self._expresses(("system", "alpha"), parts=not text_content),
            late_system=self._expresses(
                ("user", "alpha"), ("assistant", "beta"), ("system", "gamma"), ("user", "delta"), parts=not text_content
            ),
            tool=self._expresses_tools("beta result"),
            tool_calls=self._expresses_tools("beta_tool"),
            assistant_first=self._expresses(("assistant", "alpha"), ("user", "beta"), parts=not text_content),
            text_content=text_content,
        )

    def _expresses(self, *turns: tuple[str, str], parts: bool = False) -> bool:
        """Whether every turn's content is found in the rendered text."""
        messages: list[Message] = [{"role": role, "content": _parts(text) if parts else text} for role, text in turns]
        try:
            rendered = self.render(messages)
        except ValueError:
            return False
        # A list that is printed as such contains the words too, but as data, not as text.
        return all(text in rendered for _, text in turns) and "'type'" not in rendered

    def _expresses_tools(self, wanted: str) -> bool:
        """Whether ``wanted`` is found in a rendered conversation with one tool call and its result."""
        for arguments in ({"key": "value"}, '{"key": "value"}'):  # templates differ in which they take
            call = {"id": "call00001", "type": "function", "function": {"name": "beta_tool", "arguments": arguments}}
            messages: list[Message] = [
                {"role": "user", "content": "alpha"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "beta result", "name": "beta_tool", "tool_call_id": "call00001"},
            ]
            try:
                if wanted in self.render(messages):
                    return True
            except ValueError:
                continue
        return False


def fit_messages(messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """``messages`` brought into a form that ``template`` expresses without losing anything.

    - content given as text parts becomes one string; ``developer`` counts as ``system``;
    - a system message is folded into the user message that follows where the template has no place for it;
    - tool messages and tool calls become plain user and assistant text where the template does not know them;
    - consecutive messages of one role are merged, with a blank line between them;
    - a conversation that the assistant opens gets an empty user turn before it, if the template insists on one.

    Raises:
        ValueError: no messages, or one without role or content, with an unknown role or with a part that is no text.
    """
    can = template.abilities
    fitted = check_messages(messages)
    fitted = [_without_tools(message, can) for message in fitted]
    fitted = _merge(_fold_system(_merge(fitted), can))
    first = 1 if fitted[0]["role"] == "system" else 0
    if not can.assistant_first and len(fitted) > first and fitted[first]["role"] == "assistant":
        fitted.insert(first, {"role": "user", "content": ""})
    if not can.text_content:
        fitted = [message | {"content": _parts(message["content"])} for message in fitted]
    return fitted


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
    if content is None and message.get("tool_calls"):
        content = ""
    if content is None:
        raise ValueError(f"{where} (role {role!r}) has no content: give a string or a list of text parts")
    return dict(message) | {"role": "system" if role == "developer" else role, "content": _text(where, content)}


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


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _without_tools(message: dict[str, Any], can: Abilities) -> dict[str, Any]:
    """``message`` with tool results and calls as text, where the template does not know them."""
    if message["role"] == "tool" and not can.tool:
        return {"role": "user", "content": message["content"]}
    if message.get("tool_calls") and not can.tool_calls:
        calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message["tool_calls"]]
        return {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *calls]))}
    return message


def _merge(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive plain messages of one role become one. Tool results stay apart: each answers its own call."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last["role"] == message["role"] != "tool" and not (last.keys() | message.keys()) & {"tool_calls"}:
            merged[-1] = last | {"content": _join(last["content"], message["content"])}
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


def _compile(source: str) -> Any:
    from jinja2 import TemplateError

    from foreword.text.jinja_env import environment

    try:
        return environment().from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template is no valid jinja2 template: {error}") from error
