"""Calls as JSON between ``<tool_call>`` tags: Hermes, Qwen 2.5 and 3, SmolLM 3, and every model without a format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.text.tools.base import Call, GrammarRequest, MarkedFormat, Tool, call_json, call_rules, quote
from foreword.text.tools.parser import MarkedParser, ToolParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_RESPONSE = "<tool_response>\n{}\n</tool_response>"

_SECTION = """You have these functions, each described by a line of JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between these tags:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>
Repeat the block to make several calls at once. Results come back between <tool_response> tags."""


class HermesFormat(MarkedFormat):
    """``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``, ``</tool_call>``; calls follow each other.

    Args:
        before, after: white space around the object, as the template has it.
        between: white space between calls.
    """

    name = "hermes"
    markers = (_OPEN, _CLOSE)
    opener = _OPEN

    def __init__(self, parallel: bool = True, before: str = "\n", after: str = "\n", between: str = "\n") -> None:
        super().__init__(parallel)
        self._before, self._after, self.separator = before, after, between

    def write_calls(self, calls: Sequence[Call]) -> str:
        written = (f"{_OPEN}{self._before}{call_json(*call)}{self._after}{_CLOSE}" for call in calls)
        return self.separator.join(written)

    def parser(self) -> ToolParser:
        return MarkedParser(_OPEN, _CLOSE)

    def _body_rules(self, request: GrammarRequest) -> str:
        before, after = (quote(space) if space else "" for space in (self._before, self._after))
        body = f"tool_body: {before} tool_object {after} {request.literal(_CLOSE)}\n"
        return body + call_rules(request.tools, request.json)


class GenericFormat(HermesFormat):
    """The stand-in for chat templates that know nothing of tools: Hermes' tags, explained in the system prompt."""

    name = "generic"

    def section(self, tools: Sequence[Tool]) -> str | None:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return _SECTION.format(tools=lines) if tools else None

    @staticmethod
    def write_result(content: str) -> str:
        """A tool's result as the user's turn shows it."""
        return _RESPONSE.format(content)

    def write_turn(self, content: str, calls: Sequence[dict[str, Any]]) -> str:
        """An assistant's turn with ``calls`` (in OpenAI's form) as text."""
        return "\n".join(filter(None, (content, self.write_calls([named(call) for call in calls]))))


def named(call: Any) -> Call:
    """Name and arguments of a call in OpenAI's form; whatever is missing is empty.

    Arguments given as JSON text become an object, so that either form of the same arguments gives the same text.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(function.get("name") or ""), arguments  # cut short, or nested beyond reading
    return str(function.get("name") or ""), arguments if isinstance(arguments, Mapping) else {}
