"""Conversations whose earlier turns are no longer what they were."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from foreword.core.explanation import Cause
from foreword.text.causes.align import similarity
from foreword.text.chat import Message

_TELLING = 20  # characters of equal turns that are no coincidence
_EMPTY = 24  # characters of the key of a message without content
_SIMILAR = 0.5
_MOST = 2_000  # messages that are compared


def history(expected: Sequence[Message], actual: Sequence[Message]) -> Cause | None:
    """What happened to the turns of ``expected`` in ``actual``; None if nothing did but a new turn at the end.

    Turns that are equal behind the first that differs show that it is the same conversation. Dropped from its start,
    and nothing put there, it is truncated; anything else is a change. Without equal turns behind it, an earlier turn
    is a changed one only if it still resembles what it was: two conversations may begin alike.
    """
    first, second = _keys(expected[:_MOST]), _keys(actual[:_MOST])
    at = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    if at is None:
        return None
    start = _leading(actual)
    if at < start:  # another system prompt; were turns dropped as well?
        return _summarised(expected, actual, first, second) if at < _leading(expected) else None
    blocks = SequenceMatcher(None, first[at:], second[at:], autojunk=False).get_matching_blocks()[:-1]
    newest = len(second) - 1
    for block in blocks:
        gone, put = at + block.a, at + block.b
        if not _tells(first, gone, put, block.size, begins=at == start):
            continue
        if put == at and at == start:
            return "history_truncated"
        return "history_changed" if at < newest else None
    if at == start and _cut_inside(expected, actual, at):
        return "history_truncated"
    if at < newest and at < len(first) and _resembles(expected[at], actual[at]):
        return "history_changed"
    return None


def _keys(messages: Sequence[Message]) -> list[str]:
    return [message_key(message) for message in messages]


def message_key(message: Message) -> str:
    """Role, content, thought and calls in one spelling, arguments parsed."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append([function.get("name"), arguments])
    parts = [message["role"], message.get("content") or "", message.get("reasoning_content") or "", calls]
    return json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)


def _leading(messages: Sequence[Message]) -> int:
    """How many system messages come first."""
    return next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _tells(first: list[str], gone: int, put: int, size: int, *, begins: bool) -> bool:
    """Whether equal turns are no coincidence: they are long, or several, or in their place, or the last ones that were.

    Args:
        begins: no turn before them is equal, so that a word of thanks in the same place says nothing.
    """
    is_long = sum(map(len, first[gone : gone + size])) >= size * _EMPTY + _TELLING
    return is_long or size > 1 or (gone == put and not begins) or (gone != put and gone + size == len(first))


def _cut_inside(expected: Sequence[Message], actual: Sequence[Message], at: int) -> bool:
    """Whether ``actual[at]`` is the end of a longer turn, of which the start was cut off."""
    content = str(actual[at]["content"])
    return (
        len(content) >= _TELLING
        and any(
            len(str(message["content"])) > len(content)
            and str(message["content"]).endswith(content)
            and message["role"] == actual[at]["role"]
            for message in expected[at + 1 :]
        )
        and at < len(actual) - 1
    )


def _resembles(expected: Message, actual: Message) -> bool:
    first, second = str(expected["content"]), str(actual["content"])
    short, long = sorted((first.strip(), second.strip()), key=len)
    if expected["role"] != actual["role"] or not short:
        return False
    framed = re.search(
        rf"(?:^|\n|: ?|> ?){re.escape(short)}(?:$|\n| ?<)", long
    )  # with a context around it, or a thought
    return bool(framed) or (len(short) >= _TELLING and short in long) or similarity(first, second) >= _SIMILAR


def _summarised(
    expected: Sequence[Message], actual: Sequence[Message], first: list[str], second: list[str]
) -> Cause | None:
    """Turns that went from the conversation into its system prompt."""
    kept, now = str(expected[0]["content"]), str(actual[0]["content"])
    grew = len(now) > len(kept) and now.startswith(kept.rstrip())
    gone = first[_leading(expected) :]
    left = second[_leading(actual) :]
    if not grew or not gone or not left or gone[0] == left[0]:
        return None
    return "history_changed" if left[0] in gone[1:] else None
