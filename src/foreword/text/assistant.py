"""An assistant's answer taken apart while it streams: thought, content, tool calls."""

from __future__ import annotations

from foreword.core.message import AssistantMessage, MessageDelta, ToolCall, ToolCallDelta
from foreword.text.reasoning import Reasoning, ReasoningParser
from foreword.text.tools.parser import ToolParser, new_call_id


class AssistantParser:
    """Takes the text of an answer piece by piece; the parts do not depend on how it is cut.

    Args:
        reasoning: that the answer may begin with a thought.
        tools: the parser of the model's tool-call format; None leaves calls in the content.
        calls_only: the grammar allows nothing but calls, so what is left at the end is one that was cut short.
    """

    def __init__(self, reasoning: Reasoning | None, tools: ToolParser | None, *, calls_only: bool = False) -> None:
        self._reasoning = ReasoningParser(reasoning) if reasoning else None
        self._tools = tools
        self._calls_only = calls_only
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments

    def append(self, text: str) -> MessageDelta:
        """What ``text`` adds; parts that may still turn out to be markup are held back."""
        if not text:
            return MessageDelta()
        split = self._reasoning.append(text) if self._reasoning else MessageDelta(content=text)
        return self._take(split)

    def finish(self) -> MessageDelta:
        """What was held back; the answer has ended."""
        split = self._reasoning.finish() if self._reasoning else MessageDelta()
        first = self._take(split)
        last = self._tools.finish() if self._tools else MessageDelta()
        if self._calls_only and last.content:  # it ended before its name: it has none, and no arguments
            index = len(self._calls) + sum(call.name is not None for call in last.tool_calls)
            cut = ToolCallDelta(index, new_call_id(), "")
            last = MessageDelta(reasoning=last.reasoning, tool_calls=(*last.tool_calls, cut))
        return first + self._keep(last)

    def message(self) -> AssistantMessage:
        """The answer as far as it has been taken apart."""
        calls = tuple(ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls)
        return AssistantMessage("".join(self._content), "".join(self._thoughts), calls)

    def _take(self, split: MessageDelta) -> MessageDelta:
        if self._tools is None or not split.content:
            return self._keep(split)
        found = self._tools.append(split.content)
        return self._keep(MessageDelta(found.content, split.reasoning, found.tool_calls))

    def _keep(self, delta: MessageDelta) -> MessageDelta:
        if delta.content:
            self._content.append(delta.content)
        if delta.reasoning:
            self._thoughts.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.name is not None:
                self._calls.append((call.id or "", call.name, []))
            self._calls[call.index][2].append(call.arguments)
        return delta
