"""Chat templates: what they can express, and conversations as the text that a model reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foreword.core.validation import reject
from foreword.text import reasoning
from foreword.text.fit import ROLES, Message, check_messages, fit_messages, has_tool_turns, text_parts
from foreword.text.narrow import walk
from foreword.text.tools.base import ToolFormat
from foreword.text.tools.canonical import canonical_tools
from foreword.text.tools.formats import recognise
from foreword.text.tools.probe import ToolTurns, tool_turns

__all__ = ["ROLES", "Abilities", "ChatTemplate", "Message", "check_messages", "fit_messages", "render_chat"]

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
_PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat template can express, found out by rendering tiny conversations.

    Attributes:
        system: a system message at the start that stays there as the conversation goes on.
        system_alone: a conversation that is nothing but a system message.
        late_system: a system message later in the conversation.
        assistant_first: a conversation that the assistant opens.
        text_content: content as a plain string; without it, content must be a list of parts.
    """

    system: bool
    system_alone: bool
    late_system: bool
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
        self._tool_turns: dict[bool, ToolTurns] = {}

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
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the text the model reads.

        Args:
            tools: JSON-schema function descriptions.
            options: further variables of the template, such as ``enable_thinking``.

        Raises:
            ValueError: the template refuses the messages, or cannot express them; with its own reason. Or an option
                has the name of another argument.
        """
        template = self._tool_template if tools else self._template
        variables: dict[str, Any] = {"documents": None} | _checked_options(options)
        variables |= {"messages": list(messages), "tools": list(tools) if tools else None}
        try:
            # A template is a program by someone else: whatever it raises is about these messages.
            text: str = template.render(self._variables | variables, add_generation_prompt=add_generation_prompt)
            return text
        except Exception as error:
            raise ValueError(f"the model's chat template cannot express these messages: {error}") from error

    @cached_property
    def abilities(self) -> Abilities:
        """What the template can express."""
        text_content = self._expresses(("user", "alpha")) or not self._expresses(("user", "alpha"), parts=True)
        return Abilities(
            # Some put it into the last message if that is the user's, and drop it otherwise.
            system=self._expresses(("system", "alpha"), ("user", "beta"), parts=not text_content)
            and self._expresses(("system", "alpha"), ("user", "beta"), ("assistant", "gamma"), parts=not text_content),
            system_alone=self._expresses(("system", "alpha"), parts=not text_content),
            late_system=self._expresses(
                ("user", "alpha"), ("assistant", "beta"), ("system", "gamma"), ("user", "delta"), parts=not text_content
            ),
            assistant_first=self._expresses(("assistant", "alpha"), ("user", "beta"), parts=not text_content),
            text_content=text_content,
        )

    @property
    def can_reason(self) -> bool:
        """Whether it knows ``<think>`` sections."""
        return reasoning.END in self.source

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls that the template speaks; a generic one if it speaks none."""
        return recognise(self)

    def tool_turns(self, with_tools: bool) -> ToolTurns:
        """How the template takes earlier calls and results, ``with_tools`` on offer or without."""
        if with_tools not in self._tool_turns:
            self._tool_turns[with_tools] = tool_turns(self, with_tools)
        return self._tool_turns[with_tools]

    def _expresses(self, *turns: tuple[str, str], parts: bool = False) -> bool:
        """Whether every turn's content is found in the rendered text."""
        messages: list[Message] = [
            {"role": role, "content": text_parts(text) if parts else text} for role, text in turns
        ]
        try:
            rendered = self.render(messages)
        except ValueError:
            return False
        # A list that is printed as such contains the words too, but as data, not as text.
        return all(text in rendered for _, text in turns) and "'type'" not in rendered


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    canonical: bool = True,
    schema: Mapping[str, Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, its messages fitted to ``template``.

    Where the template has no section for tools, they are described at the end of the system prompt.

    Args:
        tools: OpenAI-style function definitions.
        canonical: sort the tools by name and the keys of their definitions, so that equal tools give equal text.
        schema: the JSON schema of the answer, with which the system prompt then ends: many inputs with one schema
            share it, and so do the turns of a conversation and the steps of an agent.
        template_options: further variables of the template.

    Raises:
        ValueError: a message or tool is malformed, or the template refuses the messages; says which and why.
    """
    offered: list[Any] | None = (canonical_tools(tools) if canonical else list(tools)) if tools else None
    section = template.tool_format.section(offered) if offered else None
    if section is not None:
        messages, offered = _with_section(check_messages(messages), section), None
    if schema is not None:
        messages = _with_section(check_messages(messages), _schema_section(schema, beside_tools=bool(tools)))
    fitted = fit_messages(messages, template, with_tools=bool(offered))
    try:
        return template.render(fitted, offered, add_generation_prompt, template_options)
    except ValueError:
        if not has_tool_turns(fitted):
            raise
    # The template knows tool turns, but not in this order.
    fitted = fit_messages(messages, template, with_tools=bool(offered), as_text=True)
    return template.render(fitted, offered, add_generation_prompt, template_options)


def _schema_section(schema: Mapping[str, Any], *, beside_tools: bool) -> str:
    """What tells the model the shape of its answer, without titles: Pydantic makes them of the names they stand at."""
    shown = copy.deepcopy(dict(schema))
    for _, part in walk(shown):
        part.pop("title", None)
    when = "Once you need no more function calls, your" if beside_tools else "Your"
    return f"{when} answer is JSON of this schema, and nothing else:\n{json.dumps(shown, ensure_ascii=False)}"


def _with_section(messages: list[dict[str, Any]], section: str) -> list[Message]:
    """``messages`` with ``section`` at the end of their system prompt; both are merged when they are fitted."""
    start = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*messages[:start], {"role": "system", "content": section}, *messages[start:]]


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        reject("template_options", options, "give a mapping with the names of the chat template's variables")
    for name in options or ():
        if not isinstance(name, str) or name in _OWN_VARIABLES:
            reject("template_options", name, "this is no variable of a template's own; give only such names")
    return dict(options or {})


def _compile(source: str) -> Any:
    from jinja2 import TemplateError

    from foreword.text.jinja_env import environment

    try:
        return environment().from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template is no valid jinja2 template: {error}") from error
