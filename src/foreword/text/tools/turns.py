"""Tool calls and results of earlier turns, brought into the form that a chat template takes."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.text.tools.base import arguments_text
from foreword.text.tools.hermes import GenericFormat, named
from foreword.text.tools.probe import ToolTurns

_ALPHABET = string.digits + string.ascii_letters
_Message = dict[str, Any]


def text_turns(messages: Sequence[_Message]) -> list[_Message]:
    """Calls as text of the assistant, results as a turn of the user; results in a row share one turn."""
    generic = GenericFormat()
    turns: list[_Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and after_result:
            turns[-1] = _user(turns[-1]["content"] + "\n" + generic.write_result(message["content"]))
        elif is_result:
            turns.append(_user(generic.write_result(message["content"])))
        elif message.get("tool_calls"):
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            turns.append(rest | {"content": generic.write_turn(message["content"], message["tool_calls"])})
        else:
            turns.append(message)
        after_result = is_result
    return turns


def native_turns(messages: Sequence[_Message], can: ToolTurns) -> list[_Message]:
    """Calls and results as the template's own turns.

    - arguments become an object, or JSON text, whichever the template takes;
    - ids that are missing or too long for the template are replaced, the same one by the same everywhere;
    - several calls of one message become messages of one call each, followed by its results, where the template
      takes one at a time;
    - text beside calls moves into a message of its own where the template would drop it; where there is no place for
      such a message either, the template drops it;
    - a result that answers no call before it becomes text of the user.
    """
    turns: list[_Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = [_call(call, f"{position}.{index}", can) for index, call in enumerate(message.get("tool_calls") or ())]
        if message["role"] == "tool":
            turns += text_turns([message])
        elif not calls:
            turns.append(message)
        elif not all(call["function"]["name"] for call in calls):
            turns += text_turns([message])
        else:
            end = position
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            turns += _group(message, calls, messages[position:end], can)
            position = end
    return turns if can.user_after_tool else _answered(turns)


def _group(message: _Message, calls: list[_Message], results: Sequence[_Message], can: ToolTurns) -> list[_Message]:
    """A message with calls and the results that follow it."""
    found: list[_Message] = []
    if message["content"] and can.content == "before":
        found.append({key: value for key, value in message.items() if key != "tool_calls"})
        message = {"role": "assistant", "content": ""}
    matched, orphans = _match(calls, results, can)
    if can.several or len(calls) == 1:
        found += [message | {"tool_calls": calls}, *(result for _, result in matched)]
    else:
        for index, call in enumerate(calls):
            found.append((message if index == 0 else {"role": "assistant", "content": ""}) | {"tool_calls": [call]})
            found += [result for owner, result in matched if owner == index]
    return found + text_turns(orphans)


def _match(
    calls: list[_Message], results: Sequence[_Message], can: ToolTurns
) -> tuple[list[tuple[int, _Message]], list[_Message]]:
    """Results with the index of the call that each answers, and those that answer none."""
    matched: list[tuple[int, _Message]] = []
    orphans: list[_Message] = []
    unanswered = list(range(len(calls)))
    for result in results:
        given = result.get("tool_call_id")
        wanted = _call_id(given, "", can) if given else None
        owner = next((index for index in unanswered if wanted in (None, calls[index]["id"])), None)
        if owner is None:
            orphans.append(result)
            continue
        unanswered.remove(owner)
        call = calls[owner]
        name = result.get("name") or call["function"]["name"]
        matched.append((owner, result | {"tool_call_id": call["id"], "name": name}))
    return matched, orphans


def _call(call: Any, place: str, can: ToolTurns) -> _Message:
    name, arguments = named(call)
    given = call.get("id") if isinstance(call, Mapping) else None
    function = {"name": name, "arguments": arguments_text(arguments) if can.arguments_as_text else arguments}
    return {"id": _call_id(given, place, can), "type": "function", "function": function}


def _call_id(given: Any, place: str, can: ToolTurns) -> str:
    """``given`` if the template takes it, else 9 letters and digits that depend on it (or on ``place``) alone."""
    if given and not can.short_ids:
        return str(given)
    text = str(given) if given else f"call at {place}"
    if len(text) == 9 and all(char in _ALPHABET for char in text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def _answered(turns: list[_Message]) -> list[_Message]:
    """``turns`` with an empty assistant's turn wherever a user's would follow a call or its result."""
    found: list[_Message] = []
    for turn in turns:
        if turn["role"] == "user" and found and (found[-1]["role"] == "tool" or found[-1].get("tool_calls")):
            found.append({"role": "assistant", "content": ""})
        found.append(turn)
    return found


def _user(content: str) -> _Message:
    return {"role": "user", "content": content}
