"""What an assistant's answer is made of: text, reasoning and tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: unique among the calls of a process: 9 letters and digits, the strictest that a chat template asks for.
        name: "" if the answer ended before it.
        arguments: a JSON object as text, as generated; cut short if the answer ended inside it.
    """

    id: str
    name: str
    arguments: str

    def parse(self) -> dict[str, Any]:
        """The arguments by name.

        Raises:
            ValueError: they are no JSON object, or nested too deeply to be read; the message holds them.
        """
        name = self.name or "a call without a name"
        try:
            found = json.loads(self.arguments)
        except RecursionError:
            raise ValueError(f"the arguments of {name} are nested too deeply to be read: {self.arguments!r}") from None
        except ValueError as error:
            raise ValueError(f"the arguments of {name} are no JSON ({error}): {self.arguments!r}") from error
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {name} are no JSON object: {self.arguments!r}")
        return found


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call while it streams; ``id`` and ``name`` come with the first piece of each ``index`` only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What a chunk adds to an assistant's answer; parts that gain nothing are empty."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: MessageDelta) -> MessageDelta:
        return MessageDelta(
            self.content + other.content, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls
        )


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An assistant's answer, taken apart.

    Attributes:
        content: what the user is to read.
        reasoning: what a reasoning model thought before; "" without.
        tool_calls: in the order in which they were made.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The message for the next turn's ``messages``. Calls whose arguments are no JSON keep them as text."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_call_dict(call) for call in self.tool_calls]
        return message


def _call_dict(call: ToolCall) -> dict[str, Any]:
    try:
        arguments: Any = call.parse()
    except ValueError:
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
