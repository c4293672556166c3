"""Conversations of one model: messages become a prompt, and what is generated becomes a message again."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.core.message import AssistantMessage, ToolCall
from foreword.core.sampling import SamplingParams
from foreword.core.structured import StructuredParams
from foreword.core.validation import reject
from foreword.text.assistant import AssistantParser
from foreword.text.cache_points import CachePoint, points_in_messages, split_tools
from foreword.text.chat import ChatTemplate, Message, check_messages, render_chat
from foreword.text.reasoning import END, START, Reasoning, recognise
from foreword.text.tokenizer import Tokenizer
from foreword.text.tools.formats import ToolFormat
from foreword.text.turns import Turn, TurnTable


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a conversation is rendered and read with.

    Args:
        tools: OpenAI-style function definitions.
        tool_choice: "auto", "none", "any" or "required", or a tool's name.
        parallel_tool_calls: allow more than one call in an answer.
        canonical_tools: sort tools by name and their keys, so that a shuffled list is the same prompt.
        schema_in_prompt: show the schema of ``structured.json_schema`` to the model, at the end of the system prompt. A
            grammar decides how an answer is written; what its fields mean the model can only read.
        replay_turns: put the model's own answers back in the tokens in which it wrote them. Off, equal messages are
            equal tokens, whatever was generated before.
        template_options: further variables of the chat template, e.g. ``{"enable_thinking": False}``.

    Attributes:
        points: cache points that ``tools`` were given with.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    canonical_tools: bool = True
    schema_in_prompt: bool = False
    replay_turns: bool = True
    template_options: Mapping[str, Any] | None = None
    points: tuple[CachePoint, ...] = dataclasses.field(default=(), init=False)

    def __post_init__(self) -> None:
        if isinstance(self.tools, (list, tuple)):
            tools, points = split_tools(self.tools)
            object.__setattr__(self, "tools", tools)
            object.__setattr__(self, "points", points)
        for field in ("canonical_tools", "schema_in_prompt", "replay_turns"):
            if not isinstance(getattr(self, field), bool):
                reject(field, getattr(self, field), "give True or False")

    @classmethod
    def split(cls, options: dict[str, Any]) -> tuple[ChatOptions, dict[str, Any]]:
        """``options`` by name: those of the conversation, and the rest."""
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        own = {name: value for name, value in options.items() if name in names}
        return cls(**own), {name: value for name, value in options.items() if name not in names}

    def shown_schema(self, params: SamplingParams) -> dict[str, Any] | None:
        """The JSON schema that the prompt is to show; none that says nothing but "any object"."""
        if not self.schema_in_prompt or params.structured is None:
            return None
        schema: dict[str, Any] = json.loads(str(params.structured.json_schema or "{}"))
        return schema if schema.keys() - {"type"} else None

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """``params`` with these tools in ``structured``.

        Raises:
            ValueError: tools are malformed, or contradict ``params.structured``.
        """
        structured = params.structured
        if not self.tools:
            if self.tool_choice not in ("auto", "none"):
                reject("tool_choice", self.tool_choice, "there are no tools to choose from; give tools")
            return params
        if structured is not None and structured.tools:
            raise ValueError("structured.tools and tools= cannot be combined: give tools= alone")
        tools: dict[str, Any] = {
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        both = StructuredParams(**tools) if structured is None else dataclasses.replace(structured, **tools)
        return dataclasses.replace(params, structured=both)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model reads it.

    Attributes:
        messages: with their content as text.
        given: the messages as the caller gave them.
        tool_format: how calls are written; None if calls are not to be looked for.
        shown: special tokens that are markup of calls or thoughts and must reach the parser.
        points: where the caller marked it to be kept.
    """

    conversations: Conversations
    messages: list[dict[str, Any]]
    options: ChatOptions
    params: SamplingParams
    text: str
    token_ids: list[int]
    reasoning: Reasoning | None
    tool_format: ToolFormat | None
    shown: frozenset[int]
    given: tuple[Message, ...] = ()
    points: tuple[CachePoint, ...] = ()

    def parser(self) -> AssistantParser:
        """A fresh parser for one answer."""
        tools = self.tool_format.parser() if self.tool_format else None
        return AssistantParser(self.reasoning, tools, calls_only=self.options.tool_choice not in ("auto", "none"))

    def remember(self, message: AssistantMessage, text: str, token_ids: list[int]) -> None:
        """Keep the tokens of a finished answer for the next turn, if they say exactly what its ``text`` says."""
        tokenizer = self.conversations.tokenizer
        ended = token_ids[-1:] and token_ids[-1] in tokenizer.eos_token_ids
        body = token_ids[:-1] if ended else token_ids
        said = b"".join(tokenizer.token_bytes(token, token not in self.shown) for token in body)
        hidden = any(token in tokenizer.special_token_ids and token not in self.shown for token in body)
        spelled = any(end in text for end in self.conversations.end_texts)  # it would be taken for the turn's end
        whole = all(_is_whole(call) for call in message.tool_calls)
        if body and whole and not hidden and not spelled and said == text.encode():
            turn = Turn(self.text, array("I", self.token_ids + body), message.reasoning)
            self.conversations.turns.remember(self.params.cache_salt, len(self.messages), message, turn)

    def owner(self, offset: int) -> int | None:
        """Which message holds the character at ``offset`` of the text; None if none does, or it cannot be told."""
        for count in range(1, len(self.messages) + 1):
            begin = self.conversations.text_of(self.messages[:count], self.options, self.params, speaks_next=False)
            if offset < len(begin) and self.text.startswith(begin):
                return count - 1
        return None


def _is_whole(call: ToolCall) -> bool:
    try:
        return bool(call.name) and call.parse() is not None
    except ValueError:
        return False


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The token ids of one conversation, up to where the assistant speaks next; see :meth:`Conversations.render`."""
    return Conversations(tokenizer).render(messages, ChatOptions()).token_ids


class Conversations:
    """Renders conversations and remembers the model's turns. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._has_template = tokenizer.chat_template is not None
        self.template = tokenizer.chat_template or ChatTemplate.plain()
        ends = tokenizer.eos_token_ids & tokenizer.special_token_ids
        self.end_texts = [tokenizer.token_bytes(token, skip_special_tokens=False).decode() for token in sorted(ends)]
        self.turns = TurnTable()

    def render(
        self, messages: Sequence[Message], options: ChatOptions, params: SamplingParams | None = None
    ) -> Rendered:
        """The prompt of a conversation; of ``params`` it reads the cache salt and, if asked to, the schema.

        The whole text is tokenized at once, because token borders at the seams of pieces need not be those of the
        whole; except behind the model's own last turn, whose tokens are known: there an end token makes the seam.

        Raises:
            ValueError: no messages, a malformed one, or ones that the template refuses; says which and why.
        """
        params = params or SamplingParams()
        checked = check_messages(messages)
        text = self.text_of(checked, options, params)
        reads_calls = bool(options.tools) and options.tool_choice != "none"
        tool_format = self.template.tool_format if reads_calls else None
        reasoning = recognise(self.template.source, text)
        markers = (*(tool_format.markers if tool_format else ()), *((START, END) if reasoning else ()))
        token_ids = self._replayed(checked, options, params, text) if options.replay_turns else None
        if token_ids is None:
            token_ids = self.tokenizer.encode(text, add_special_tokens=not self._has_template)
        points = (*options.points, *points_in_messages(messages))
        return Rendered(
            self,
            checked,
            options,
            params,
            text,
            token_ids,
            reasoning,
            tool_format,
            self._special(*markers),
            tuple(messages),
            points,
        )

    def text_of(
        self, messages: list[dict[str, Any]], options: ChatOptions, params: SamplingParams, *, speaks_next: bool = True
    ) -> str:
        """The text of a conversation, up to where the assistant ``speaks_next``."""
        return render_chat(
            self.template,
            messages,
            options.tools,
            add_generation_prompt=speaks_next,
            canonical=options.canonical_tools,
            schema=options.shown_schema(params),
            template_options=options.template_options,
        )

    def _replayed(
        self, messages: list[dict[str, Any]], options: ChatOptions, params: SamplingParams, text: str
    ) -> list[int] | None:
        """The prompt with the model's last known turn in its own tokens; None if none is known.

        A turn stands there only if the messages before it render to the very prompt it was written behind, and those
        up to it to a beginning of ``text``: text alone would not do, for users can write what looks like turns.
        """
        for index, turn in self.turns.candidates(params.cache_salt, messages):
            if not text.startswith(turn.prompt) or self._text_or_none(messages[:index], options, params) != turn.prompt:
                continue
            whole = self._text_or_none(messages[: index + 1], options, params, speaks_next=False)
            end = self._end_of(turn, whole) if whole and text.startswith(whole) else None
            if end is not None:
                self.turns.touch(params.cache_salt, index, messages[index], turn)
                return turn.token_ids.tolist() + self.tokenizer.encode(text[end:], add_special_tokens=False)
        return None

    def _text_or_none(
        self, messages: list[dict[str, Any]], options: ChatOptions, params: SamplingParams, *, speaks_next: bool = True
    ) -> str | None:
        try:
            return self.text_of(messages, options, params, speaks_next=speaks_next)
        except ValueError:  # the template takes the whole conversation, but not this part of it
            return None

    def _end_of(self, turn: Turn, whole: str) -> int | None:
        """Where the turn's end token stands in ``whole``, which ends with the turn; None if it is shown otherwise."""
        begin = len(turn.prompt)
        ends = [place for place in (whole.find(end, begin) for end in self.end_texts) if place >= 0]
        if not ends:
            return None
        shown = whole[begin : min(ends)]
        if turn.reasoning and not (turn.reasoning in shown and END in shown):  # the template leaves out old thoughts
            return None
        return min(ends)

    def _special(self, *markers: str) -> frozenset[int]:
        """The ids of those markers that are special tokens."""
        found = set()
        for marker in markers:
            ids = self.tokenizer.encode(marker, add_special_tokens=False)
            if len(ids) == 1 and ids[0] in self.tokenizer.special_token_ids:
                found.add(ids[0])
        return frozenset(found)
