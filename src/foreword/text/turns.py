"""The model's own turns, remembered token by token.

What a model wrote comes back as text in the next request, and text has several spellings in tokens: encoded again it is
often another one than the model chose, and the prefix match ends there. So the tokens of each turn are kept with the
prompt they followed, and put back where that very turn stands behind that very prompt.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foreword.core.message import AssistantMessage
from foreword.text.chat import Message

_MAX_TOKENS = 2_000_000
"""Tokens kept in all, prompts included, at four bytes and some text each; the turn unused for longest goes first."""

Key = tuple[str | None, int, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote behind a prompt.

    Attributes:
        prompt: the rendered text, up to where the answer began.
        token_ids: of prompt and answer together.
        reasoning: the thought, which a template may leave out of later prompts.
    """

    prompt: str
    token_ids: array[int]
    reasoning: str


class TurnTable:
    """Turns by cache salt, place in the conversation and content. Thread-safe."""

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._turns: OrderedDict[tuple[Key, str], Turn] = OrderedDict()
        self._prompts: dict[Key, list[str]] = {}  # the prompts behind which this content was written
        self._tokens = 0

    def remember(self, salt: str | None, index: int, message: AssistantMessage, turn: Turn) -> None:
        """Keep a turn, which will be ``messages[index]`` of the next request."""
        key = (salt, index, _content_key(message.as_dict()))
        with self._lock:
            known = self._turns.pop((key, turn.prompt), None)
            if known is None:
                self._prompts.setdefault(key, []).append(turn.prompt)
            self._turns[key, turn.prompt] = turn
            self._tokens += len(turn.token_ids) - (len(known.token_ids) if known else 0)
            while self._tokens > self._max_tokens:
                self._forget_oldest()

    def candidates(self, salt: str | None, messages: Sequence[Message]) -> list[tuple[int, Turn]]:
        """Places in ``messages`` and turns that may stand there, the last place first."""
        found = []
        with self._lock:
            for index in range(len(messages) - 1, -1, -1):
                if messages[index].get("role") == "assistant":
                    key = (salt, index, _content_key(messages[index]))
                    found += [(index, self._turns[key, prompt]) for prompt in self._prompts.get(key, ())]
        return found

    def touch(self, salt: str | None, index: int, message: Message, turn: Turn) -> None:
        """It was put to use: others are forgotten first."""
        with self._lock:
            place = ((salt, index, _content_key(message)), turn.prompt)
            if place in self._turns:
                self._turns.move_to_end(place)

    def _forget_oldest(self) -> None:
        (key, prompt), turn = self._turns.popitem(last=False)
        self._tokens -= len(turn.token_ids)
        self._prompts[key].remove(prompt)
        if not self._prompts[key]:
            del self._prompts[key]


def _content_key(message: Message) -> str:
    """Content, thought and calls in one spelling, whether arguments come as JSON text or as a dict."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    named = [[call.get("name"), _arguments(call.get("arguments"))] for call in calls]
    return json.dumps([message.get("content") or "", message.get("reasoning_content") or "", named], default=str)


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
