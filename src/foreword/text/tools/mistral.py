"""Mistral's two formats, a list of calls and names with arguments; both begin with ``[TOOL_CALLS]``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foreword.text.tools.base import (
    Call,
    GrammarRequest,
    MarkedFormat,
    alternatives,
    arguments_text,
    call_json,
    call_rules,
    parameters_source,
    quote,
)
from foreword.text.tools.parser import MarkedParser, ToolParser, new_call_id
from foreword.text.tools.scan import ArgumentsScanner, CallScanner

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_SOURCE = "/[a-zA-Z0-9]{9}/"
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]+)\s*)?")
_LONGEST_HEAD = 256


class MistralFormat(MarkedFormat):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``: all calls in one list, up to version 7.

    Args:
        gap: what the template has between the marker and the list.
    """

    name = "mistral"
    markers = (_OPEN,)
    opener = _OPEN
    several_per_opener = True

    def __init__(self, parallel: bool = True, gap: str = " ") -> None:
        super().__init__(parallel)
        self._gap = gap

    def write_calls(self, calls: Sequence[Call]) -> str:
        return f"{_OPEN}{self._gap}[{', '.join(call_json(*call) for call in calls)}]" if calls else ""

    def parser(self) -> ToolParser:
        return _MistralParser()

    def _body_rules(self, request: GrammarRequest) -> str:
        more = f" ({quote(', ')} tool_object)*" if request.parallel else ""
        body = f"tool_body: {quote(self._gap + '[')} tool_object{more} {quote(']')}\n"
        # Some were taught to give their calls ids; the rest do not care for them.
        before, after = quote(', "id": "'), quote('"')
        return body + call_rules(request.tools, request.json, f"({before} {_ID_SOURCE} {after})?")


class MistralArgsFormat(MarkedFormat):
    """``[TOOL_CALLS]name[ARGS]{...}``, once for each call, from version 11 on.

    Args:
        with_id: the template has ``[CALL_ID]`` and an id between the name and the arguments.
    """

    name = "mistral-args"
    markers = (_OPEN, _ARGS, _ID)
    opener = _OPEN

    def __init__(self, parallel: bool = True, with_id: bool = False) -> None:
        super().__init__(parallel)
        self._with_id = with_id

    def write_calls(self, calls: Sequence[Call]) -> str:
        return "".join(
            f"{_OPEN}{name}{_ID + new_call_id() if self._with_id else ''}{_ARGS}{arguments_text(arguments)}"
            for name, arguments in calls
        )

    def parser(self) -> ToolParser:
        return _MistralParser()

    def _body_rules(self, request: GrammarRequest) -> str:
        call_id = f"{request.literal(_ID)} {_ID_SOURCE}" if self._with_id else ""
        lines = [f"tool_body: {alternatives('tool_one', request.tools)}"]
        for index, tool in enumerate(request.tools):
            arguments = parameters_source(tool, request.json)
            head = f"{quote(tool['function']['name'])} {call_id} {request.literal(_ARGS)}"
            lines.append(f"tool_one_{index}: {head} {arguments}")
        return "\n".join(lines) + "\n"


class _MistralParser(MarkedParser):
    """Reads either format: which one it is shows after the marker."""

    def __init__(self) -> None:
        super().__init__(_OPEN)
        self._in_list = False

    def _begin(self) -> None:
        self._mode = self._head

    def _head(self, final: bool) -> bool:
        rest = self._buffer[self._at : self._at + _LONGEST_HEAD]
        bare = rest.lstrip()
        self._in_list = bare.startswith("[")
        if self._in_list:
            self._at += len(rest) - len(bare) + 1
            self._start_object(CallScanner())
            return True
        ends = [end for end in (rest.find(_ARGS), rest.find("{")) if end >= 0]
        if not ends and len(rest) < _LONGEST_HEAD and not final:
            return False
        head = _HEAD.fullmatch(rest[: min(ends)]) if ends else None
        if head is None:
            self._give_up()
            return True
        self._at += min(ends) + (len(_ARGS) if rest.startswith(_ARGS, min(ends)) else 0)
        self._start_object(ArgumentsScanner(head[1], head[2]))
        return True

    def _after(self, final: bool) -> bool:
        rest = self._buffer[self._at :]
        bare = rest.lstrip()
        if not bare and not final:
            return False
        self._mode = self._text
        if self._in_list and bare.startswith((",", "]")):
            self._at += len(rest) - len(bare)
            self._mark, self._marker = self._at, ""  # if no call follows the comma, it is content
            self._at += 1
            if bare.startswith(","):
                self._start_object(CallScanner())
        return True
