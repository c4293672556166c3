"""FunctionGemma and Gemma 4: ``call:name{key:value,...}`` between markers, strings between quotation tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreword.text.tools.base import (
    Call,
    GrammarRequest,
    MarkedFormat,
    alternatives,
    parameters_of,
    quote,
)
from foreword.text.tools.gemma_grammar import GemmaValues
from foreword.text.tools.parser import MarkedParser, ToolParser, held_back
from foreword.text.tools.scan import CallScanner, Scan

_HEAD = re.compile(r"\s*call:\s*([^\s{}<>]+)\s*")
_LONGEST_HEAD = 256
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class GemmaFormat(MarkedFormat):
    """FunctionGemma's format. Keys stand in alphabetical order, as its chat template sorts them.

    Strings hold anything but the quotation token, and have no escapes, so a grammar cannot bound or pattern them:
    a schema that asks for this raises.
    """

    name = "gemma"
    opener = "<start_function_call>"
    closer = "<end_function_call>"
    quotation = "<escape>"
    markers = (opener, closer, quotation)

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "".join(f"{self.opener}call:{name}{self._arguments(given)}{self.closer}" for name, given in calls)

    def parser(self) -> ToolParser:
        return _GemmaParser(self.opener, self.closer, self.quotation)

    def _body_rules(self, request: GrammarRequest) -> str:
        values = GemmaValues(self.quotation, request.literal, request.json)
        lines = [
            f"tool_body: {quote('call:')} ({alternatives('tool_one', request.tools)}) {request.literal(self.closer)}"
        ]
        for index, tool in enumerate(request.tools):
            name = tool["function"]["name"]
            arguments = values.arguments(name, parameters_of(tool))
            lines.append(f"tool_one_{index}: {quote(name)} {arguments}")
        return "\n".join([*lines, *values.rules]) + "\n"

    def _arguments(self, arguments: Mapping[str, Any] | str) -> str:
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return str(arguments)
        return self._value(arguments)

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quotation}{value}{self.quotation}"
        if isinstance(value, Mapping):
            keys = sorted(value, key=lambda key: str(key).lower())
            return "{" + ",".join(f"{key}:{self._value(value[key])}" for key in keys) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._value, value)) + "]"
        return json.dumps(value)


class Gemma4Format(GemmaFormat):
    """The same with the markers of Gemma 4."""

    name = "gemma4"
    opener = "<|tool_call>"
    closer = "<tool_call|>"
    quotation = '<|"|>'
    markers = (opener, closer, quotation)


class _GemmaParser(MarkedParser):
    def __init__(self, opener: str, closer: str, quotation: str) -> None:
        super().__init__(opener, closer)
        self._quotation = quotation

    def _begin(self) -> None:
        self._start_object(_GemmaScanner(self._quotation))


class _GemmaScanner(CallScanner):
    """Reads ``call:name{...}`` and gives its arguments as JSON."""

    def __init__(self, quotation: str) -> None:
        super().__init__()
        self._quotation = quotation
        self._step = self._head
        self._text = ""  # of the head, key, scalar or piece of a string that is being read
        self._json: list[str] = []

    def cut_short(self) -> None:
        if self._step == self._inside_string:
            self._write_string(self._text)
        elif self._step == self._in_scalar:
            self._write_scalar()

    def _head(self, char: str) -> Scan:
        if char != "{":
            self._text += char
            return Scan.MORE if len(self._text) < _LONGEST_HEAD else Scan.BAD
        head = _HEAD.fullmatch(self._text)
        if head is None:
            return Scan.BAD
        self.name, self._arguments = head[1], self._json
        return self._open(char)

    def _open(self, char: str) -> Scan:
        self._json.append(char)
        self._closers.append("}" if char == "{" else "]")
        return self._next(self._first_key if char == "{" else self._first_value)

    def _next(self, step: Callable[[str], Scan]) -> Scan:
        self._text = ""
        self._step = step
        return Scan.MORE

    def _first_key(self, char: str) -> Scan:
        if char == "}":
            return self._close(char)
        self._step = self._in_key
        return self._in_key(char)

    def _in_key(self, char: str) -> Scan:
        quotes = len(self._quotation)
        open_quotation = self._text.startswith(self._quotation) and (
            len(self._text) < 2 * quotes or not self._text.endswith(self._quotation)
        )
        if char != ":" or open_quotation:
            self._text += char
            return Scan.BAD if char in "{}[]\n" and not open_quotation else Scan.MORE
        key = self._text.strip()
        if key.startswith(self._quotation) and key.endswith(self._quotation) and len(key) >= 2 * quotes:
            key = key[quotes:-quotes]
        self._json.append(json.dumps(key, ensure_ascii=False) + ": ")
        return self._next(self._in_value)

    def _first_value(self, char: str) -> Scan:
        return self._close(char) if char == "]" else self._in_value(char)

    def _in_value(self, char: str) -> Scan:
        if not self._text:
            if char.isspace():
                return Scan.MORE
            if char in "{[":
                return self._open(char)
        self._text += char
        if self._text == self._quotation:
            self._json.append('"')
            return self._next(self._inside_string)
        if self._quotation.startswith(self._text):
            self._step = self._in_value
            return Scan.MORE
        self._text = self._text[:-1]
        self._step = self._in_scalar
        return self._in_scalar(char)

    def _in_scalar(self, char: str) -> Scan:
        if char in ",}]":
            self._write_scalar()
            return self._after_item(char)
        if char in "{[<>:\n":
            self._write_scalar()
            return Scan.BAD
        self._text += char
        return Scan.MORE

    def _write_scalar(self) -> None:
        text = self._text.strip()
        is_json = text in _WORDS or _NUMBER.fullmatch(text)
        self._json.append(_WORDS.get(text, text) if is_json else json.dumps(text, ensure_ascii=False))

    def _inside_string(self, char: str) -> Scan:
        self._text += char
        if self._text.endswith(self._quotation):
            self._write_string(self._text[: -len(self._quotation)])
            self._json.append('"')
            return self._next(self._after_item)
        safe = len(self._text) - held_back(self._text, 0, self._quotation)
        self._write_string(self._text[:safe])
        self._text = self._text[safe:]
        return Scan.MORE

    def _write_string(self, text: str) -> None:
        if text:
            self._json.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _after_item(self, char: str) -> Scan:
        if char == ",":
            self._json.append(", ")
            return self._next(self._in_key if self._closers[-1] == "}" else self._in_value)
        if char in "}]":
            return self._close(char)
        return Scan.MORE if char.isspace() else Scan.BAD

    def _close(self, char: str) -> Scan:
        if char != self._closers.pop():
            return Scan.BAD
        self._json.append(char)
        self._next(self._after_item)
        return Scan.MORE if self._closers else Scan.DONE
