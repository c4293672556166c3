"""The assistant's answer while it grows, and when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from llama_index.llms.foreword._blocks import ThinkingBlock, ToolCallBlock

if TYPE_CHECKING:
    from foreword import CompletionOutput, OutputChunk


class _Call:
    """A tool call so far; ``arguments`` is text while it streams and a dict when it is whole."""

    __slots__ = ("id", "name", "text", "arguments")

    def __init__(self, call_id: str = "", name: str = "", text: str = "") -> None:
        self.id, self.name, self.text = call_id, name, text
        self.arguments: dict[str, Any] | None = None


class Turn:
    """What an answer holds so far: text, reasoning and tool calls.

    A piece is appended in time that does not depend on how many came before, except for copying the text.

    Attributes:
        delta: the text that the last piece added.
        thinking_delta: the reasoning that it added.
    """

    def __init__(self) -> None:
        self.content = self.reasoning = self.delta = self.thinking_delta = ""
        self._calls: list[_Call] = []

    @classmethod
    def of(cls, completion: CompletionOutput) -> Turn:
        """The answer as a whole. Of a prompt that was plain text it is the text."""
        turn, message = cls(), completion.message
        if message is None:
            turn.content = completion.text
            return turn
        turn.content, turn.reasoning = message.content, message.reasoning
        for call in message.tool_calls:
            known = _Call(call.id, call.name, call.arguments)
            try:
                known.arguments = call.parse()
            except ValueError:  # cut short: it stays text, which no reader takes for a call's arguments
                known.arguments = None
            turn._calls.append(known)
        return turn

    def add(self, piece: OutputChunk) -> bool:
        """Take in a piece of a stream, and say whether there is something new to show."""
        if piece.delta is None:
            self.delta = piece.text
        else:
            self.delta, self.thinking_delta = piece.delta.content, piece.delta.reasoning
            self.reasoning += self.thinking_delta
            for call in piece.delta.tool_calls:
                while len(self._calls) <= call.index:
                    self._calls.append(_Call())
                known = self._calls[call.index]
                known.id, known.name = call.id or known.id, call.name or known.name
                known.text += call.arguments
        self.content += self.delta
        if piece.output is not None:
            whole = Turn.of(piece.output.outputs[0])
            self.content, self.reasoning, self._calls = whole.content, whole.reasoning, whole._calls
            return True
        return piece.logprobs is not None or bool(piece.text if piece.delta is None else piece.delta)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def message(self) -> ChatMessage:
        """The answer as LlamaIndex's message.

        Calls stand in its blocks, which agents read, and OpenAI-style in ``additional_kwargs``, which programs and
        memories read.
        """
        blocks: list[Any] = []
        extra: dict[str, Any] = {}
        if self.reasoning and ThinkingBlock is not None:
            blocks.append(ThinkingBlock(content=self.reasoning))
        elif self.reasoning:
            extra["reasoning_content"] = self.reasoning
        if self.content or not self._calls:
            blocks.append(TextBlock(text=self.content))
        if self._calls:
            extra["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in self._calls
            ]
        if self._calls and ToolCallBlock is not None:
            for call in self._calls:
                arguments = call.text if call.arguments is None else call.arguments
                blocks.append(ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=arguments))
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
