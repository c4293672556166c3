"""What a tool-call format is, and the parts that their grammars share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foreword.core.structured import tool_name
from foreword.core.validation import reject
from foreword.text.tools.parser import ToolParser

Tool = Mapping[str, Any]
Call = tuple[str, Mapping[str, Any] | str]
Literal = Callable[[str], str]
Json = Callable[[Mapping[str, Any]], str]

_CLOSED = frozenset(
    ("type", "properties", "required", "title", "description", "$schema", "$defs", "additionalProperties")
)


@dataclass(frozen=True)
class GrammarRequest:
    """What a grammar of calls is made of; see :meth:`ToolFormat.grammar`."""

    tools: Sequence[Tool]
    parallel: bool
    literal: Literal
    json: Json


class ToolFormat(ABC):
    """How a family of models writes calls of tools.

    Args:
        parallel: whether the chat template can show several calls of one turn.

    Attributes:
        name: of the format.
        markers: strings that may be special tokens, and that the parser needs to see.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parallel: bool = True) -> None:
        self.parallel = parallel

    @abstractmethod
    def write_calls(self, calls: Sequence[Call]) -> str:
        """Calls (name and arguments, as an object or as JSON text) as the model writes them."""

    @abstractmethod
    def parser(self) -> ToolParser:
        """A parser for one answer."""

    @abstractmethod
    def _calls_rules(self, request: GrammarRequest) -> str:
        """Lark rules with ``tool_calls`` at the top: one call, or where several are allowed one or more."""

    @abstractmethod
    def _free_rules(self, request: GrammarRequest) -> str:
        """Lark rules with ``tool_free`` at the top: text in which well-formed calls may occur."""

    @abstractmethod
    def _text_rules(self, request: GrammarRequest) -> str:
        """Lark rules with ``tool_text`` at the top: text without a call."""

    def section(self, tools: Sequence[Tool]) -> str | None:  # noqa: ARG002 - of those that have one
        """The text that describes the tools to the model; None where the chat template does it."""
        return None

    def grammar(
        self, tools: Sequence[Tool], *, choice: str, parallel: bool, answer: str | None, literal: Literal, json: Json
    ) -> str:
        """Lark source (llguidance's dialect) whose top rule is ``answer``; its other names begin with ``tool_``.

        Args:
            tools: OpenAI-style definitions.
            choice: "auto", "none", "any" or "required", or the name of the tool to call, once.
            parallel: allow several calls; has no effect where the format cannot carry them.
            answer: a Lark expression for the answer that may stand in place of calls; None for free text.
            literal: gives the Lark source of a marker: a quoted string, or ``<[id]>`` for a special token.
            json: gives the Lark source of a JSON value of a schema.

        Raises:
            ValueError: ``choice`` is none of these, or there is no tool to call.
        """
        request = GrammarRequest(tools, parallel and self.parallel, literal, json)
        if choice == "none" or (choice == "auto" and not tools):
            return f"answer: {answer}\n" if answer else "answer: tool_text\n" + self._text_rules(request)
        if choice == "auto":
            if answer is None:
                return "answer: tool_free\n" + self._free_rules(request)
            return f"answer: tool_calls | ({answer})\n" + self._calls_rules(request)
        if choice not in ("any", "required"):
            named = [tool for index, tool in enumerate(tools) if tool_name(index, tool) == choice]
            request = GrammarRequest(named, False, literal, json)
        if not request.tools:
            reject("tool_choice", choice, "no tool of this name is given")
        return "answer: tool_calls\n" + self._calls_rules(request)


class MarkedFormat(ToolFormat):
    """Formats whose calls begin with a marker that free text does not contain."""

    opener: ClassVar[str]
    separator: str = ""  # between one call's end and the next one's opener
    several_per_opener: ClassVar[bool] = False

    @abstractmethod
    def _body_rules(self, request: GrammarRequest) -> str:
        """Lark rules with ``tool_body`` at the top: what follows the opener."""

    def _repeats(self, parallel: bool) -> bool:
        return parallel and not self.several_per_opener

    def _calls_rules(self, request: GrammarRequest) -> str:
        between = quote(self.separator) if self.separator else ""
        more = f" ({between} tool_call)*" if self._repeats(request.parallel) else ""
        call = f"tool_call: {request.literal(self.opener)} tool_body\n"
        return f"tool_calls: tool_call{more}\n{call}" + self._body_rules(request)

    def _free_rules(self, request: GrammarRequest) -> str:
        # As ordinary tokens the opener's characters mean the same to the parser, so they trigger the call too.
        spelled = "tool_spelled[lazy]: TOOL_ANY " + quote(self.opener)
        marker = request.literal(self.opener)
        special = f"tool_open: tool_spelled | TOOL_TEXT {marker}" if is_token(marker) else "tool_open: tool_spelled"
        whole = "tool_started* TOOL_TEXT" if self._repeats(request.parallel) else "tool_started | TOOL_TEXT"
        rules = (
            f"tool_free: {whole}",
            "tool_started: tool_open tool_body",
            special,
            spelled,
            text_terminals(self.opener),
        )
        return "\n".join(rules) + self._body_rules(request)

    def _text_rules(self, request: GrammarRequest) -> str:  # noqa: ARG002 - of no tool in particular
        return "tool_text: TOOL_TEXT\n" + text_terminals(self.opener)


def quote(text: str) -> str:
    """``text`` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def is_token(marker: str) -> bool:
    """Whether the Lark source of a marker is a special token."""
    return marker.startswith("<")


def text_terminals(*openers: str) -> str:
    """Terminals ``TOOL_ANY``, any text, and ``TOOL_TEXT``, text in which no opener occurs (spelled out or not)."""
    without = "".join(f" & ~(TOOL_ANY {quote(opener)} TOOL_ANY)" for opener in openers)
    return f"TOOL_ANY: /(?s:.*)/\nTOOL_TEXT: TOOL_ANY{without}\n"


def parameters_source(tool: Tool, json_: Json) -> str:
    """Lark source of the arguments of ``tool``; a tool without parameters takes ``{}``."""
    parameters = parameters_of(tool)
    return quote("{}") if parameters is None else json_(parameters)


def parameters_of(tool: Tool) -> Mapping[str, Any] | None:
    """The schema of the arguments of ``tool``; None for a tool that takes none."""
    parameters = tool["function"].get("parameters")
    if not parameters:
        return None
    takes_none = parameters.get("properties") == {} and not parameters.get("additionalProperties")
    return None if takes_none and set(parameters) <= _CLOSED and not parameters.get("required") else parameters


def name_of(tool: Tool) -> str:
    """The tool's name as it stands inside a JSON string."""
    return json.dumps(tool["function"]["name"], ensure_ascii=False)[1:-1]


def arguments_text(arguments: Mapping[str, Any] | str) -> str:
    """Arguments as chat templates render them: JSON with a space after ``,`` and ``:``; text stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def call_json(name: str, arguments: Mapping[str, Any] | str, key: str = "arguments") -> str:
    """A call as a JSON object."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": {arguments_text(arguments)}}}'


def call_rules(tools: Sequence[Tool], json_: Json, end: str = "") -> str:
    """Lark rules with ``tool_object`` at the top: a call as :func:`call_json` writes it.

    Each tool's parameters stand alone as a schema, so that their references (``#/$defs/...``) keep their root.

    Args:
        end: Lark source of what may stand before the closing brace.
    """
    start, close = quote('{"name": "'), quote("}")
    lines = [f"tool_object: {start} ({alternatives('tool_one', tools)}) {end} {close}"]
    for index, tool in enumerate(tools):
        head = quote(f'{name_of(tool)}", "arguments": ')
        lines.append(f"tool_one_{index}: {head} {parameters_source(tool, json_)}")
    return "\n".join(lines) + "\n"


def alternatives(rule: str, tools: Sequence[Tool]) -> str:
    """``rule_0 | rule_1 | ...``, one for each tool."""
    return " | ".join(f"{rule}_{index}" for index in range(len(tools)))
