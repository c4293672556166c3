"""Llama 3.1, 3.2 and 3.3: the whole answer is a call, ``{"name": ..., "parameters": {...}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.text.tools.base import (
    Call,
    GrammarRequest,
    Tool,
    ToolFormat,
    call_json,
    parameters_of,
    quote,
)
from foreword.text.tools.parser import MarkedParser, ToolParser
from foreword.text.tools.scan import CallScanner

_TAG = "<|python_tag|>"
_DATA = ("enum", "const", "default", "examples")
_SEPARATOR = re.compile(r"\s*;\s*(?=\{)")


class Llama3Format(ToolFormat):
    """A call is an answer that begins with ``{`` or with ``<|python_tag|>``; an answer in words may begin with neither.

    Several calls in one answer, which Llama separates by ``;``, are read, but no chat template of theirs can show
    them, so the grammar allows one.
    """

    name = "llama3"
    markers = (_TAG,)

    def __init__(self, parallel: bool = False) -> None:
        super().__init__(parallel)

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "; ".join(call_json(*call, key="parameters") for call in calls)

    def parser(self) -> ToolParser:
        return _Llama3Parser()

    def _calls_rules(self, request: GrammarRequest) -> str:
        # Each call is one schema, because a JSON answer may begin with the same characters: the grammar library
        # weighs schemas against each other, but not a schema against literal text.
        ones = " | ".join(request.json(_call_schema(tool)) for tool in request.tools)
        more = f" ({quote('; ')} tool_object)*" if request.parallel else ""
        return f"tool_calls: {request.literal(_TAG)}? tool_object{more}\ntool_object: {ones}\n"

    def _free_rules(self, request: GrammarRequest) -> str:
        text = _text_terminals(r"/\s*([^\s{](?s:.*))?/")
        return f"tool_free: TOOL_TEXT | tool_calls\n{text}{self._calls_rules(request)}"

    def _text_rules(self, request: GrammarRequest) -> str:
        names = "|".join(re.escape(str(tool["function"]["name"])).replace("/", r"\/") for tool in request.tools)
        call = rf' & ~/\s*\{{\s*"name"\s*:\s*"({names})"(?s:.*)/' if names else ""
        return "tool_text: TOOL_TEXT\n" + _text_terminals(f"TOOL_ANY{call}")


class _Llama3Parser(MarkedParser):
    def __init__(self) -> None:
        super().__init__(_TAG)
        self._mode = self._start

    def _keep_from(self) -> int:
        return self._at if self._mode == self._start else super()._keep_from()

    def _start(self, final: bool) -> bool:
        """Where a call may begin without a marker."""
        rest = self._buffer[self._at :]
        bare = rest.lstrip()
        if not bare and not final:
            return False
        self._mode = self._text
        if bare.startswith("{"):
            self._emit_text(rest[: len(rest) - len(bare)])
            self._at += len(rest) - len(bare)
            self._mark, self._marker = self._at, "{"
            self._start_object(CallScanner(exact=True))
        return True

    def _after(self, final: bool) -> bool:
        rest = self._buffer[self._at :]
        if rest.strip() in ("", ";") and not final:
            return False
        if separator := _SEPARATOR.match(rest):
            self._at += separator.end()
        self._mode = self._start
        return True


def _text_terminals(text: str) -> str:
    return f"TOOL_ANY: /(?s:.*)/\nTOOL_TEXT: {text} & ~(TOOL_ANY {quote(_TAG)} TOOL_ANY)\n"


def _call_schema(tool: Tool) -> Mapping[str, Any]:
    parameters = parameters_of(tool)
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool["function"]["name"]},
            "parameters": _moved(parameters, "#/properties/parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """``schema`` with its references to its own root pointing to ``root``."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else value
            if key in _DATA
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(entry, root) for entry in schema] if isinstance(schema, (list, tuple)) else schema
