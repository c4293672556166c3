"""The table of the model's own turns."""

from __future__ import annotations

from array import array
from typing import Any

from foreword.core.message import AssistantMessage, ToolCall
from foreword.text.turns import Turn, TurnTable

USER = {"role": "user", "content": "hi"}
ANSWER = AssistantMessage("yes")


def turn(prompt: str, length: int = 3) -> Turn:
    return Turn(prompt, array("I", range(length)), "")


def known(table: TurnTable, messages: list[dict[str, Any]], salt: str | None = None) -> list[tuple[int, str]]:
    return [(index, found.prompt) for index, found in table.candidates(salt, messages)]


def test_a_turn_belongs_to_its_place_content_and_salt() -> None:
    table = TurnTable()
    table.remember(None, 1, ANSWER, turn("P"))
    messages: list[dict[str, Any]] = [USER, ANSWER.as_dict()]
    assert known(table, messages) == [(1, "P")]
    assert known(table, messages, "tenant") == []
    assert known(table, [USER, {"role": "assistant", "content": "no"}]) == []
    assert known(table, [USER, USER, ANSWER.as_dict()]) == []
    assert known(table, [USER, {**ANSWER.as_dict(), "reasoning_content": "hm"}]) == []


def test_the_last_place_comes_first() -> None:
    table = TurnTable()
    table.remember(None, 1, ANSWER, turn("P"))
    table.remember(None, 1, ANSWER, turn("Q"))
    table.remember(None, 3, ANSWER, turn("P yes Q"))
    messages = [USER, ANSWER.as_dict(), USER, ANSWER.as_dict(), USER]
    assert known(table, messages) == [(3, "P yes Q"), (1, "P"), (1, "Q")]


def test_calls_are_compared_by_meaning() -> None:
    table = TurnTable()
    table.remember(None, 1, AssistantMessage("", "", (ToolCall("a", "f", '{"x": 1, "y": "ü"}'),)), turn("P"))
    for arguments, same in (({"x": 1, "y": "ü"}, True), ('{"x":1,"y":"\\u00fc"}', True), ({"y": "ü", "x": 1}, False)):
        call = {"id": "other", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert bool(known(table, [USER, message])) is same


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    table = TurnTable(max_tokens=100)
    for number in range(5):
        table.remember(None, 1, AssistantMessage(str(number)), turn(f"P{number}", 40))
    found = [bool(known(table, [USER, {"role": "assistant", "content": str(number)}])) for number in range(5)]
    assert found == [False, False, False, True, True]
    table.remember(None, 1, AssistantMessage("4"), turn("P4", 41))  # once more: it replaces itself
    assert known(table, [USER, {"role": "assistant", "content": "3"}])
