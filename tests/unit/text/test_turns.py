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


def test_a_turn_is_found_behind_its_prompt_only() -> None:
    table = TurnTable()
    table.remember(None, 1, ANSWER, turn("P"))
    messages: list[dict[str, Any]] = [USER, ANSWER.as_dict()]
    assert table.find(None, messages, "P yes") is not None
    assert table.find(None, messages, "Q yes") is None
    assert table.find("tenant", messages, "P yes") is None
    assert table.find(None, [USER, {"role": "assistant", "content": "no"}], "P no") is None
    assert table.find(None, [USER, USER, ANSWER.as_dict()], "P ... yes") is None, "it stands at another place"
    assert table.find(None, [USER, ANSWER.as_dict(), ANSWER.as_dict()], "P yes") is None, "two in a row are merged"


def test_the_last_known_turn_wins() -> None:
    table = TurnTable()
    table.remember(None, 1, ANSWER, turn("P"))
    table.remember(None, 3, ANSWER, turn("P yes Q"))
    messages = [USER, ANSWER.as_dict(), USER, ANSWER.as_dict(), USER]
    found = table.find(None, messages, "P yes Q yes R")
    assert found is not None
    assert found.prompt == "P yes Q"
    foreign = [*messages[:3], {"role": "assistant", "content": "edited"}]
    found = table.find(None, foreign, "P yes Q edited")
    assert found is not None
    assert found.prompt == "P"


def test_calls_are_compared_by_meaning() -> None:
    table = TurnTable()
    table.remember(None, 1, AssistantMessage("", "", (ToolCall("a", "f", '{"x": 1, "y": "ü"}'),)), turn("P"))
    for arguments, known in (({"y": "ü", "x": 1}, True), ('{"y":"\\u00fc","x":1}', True), ({"x": 2, "y": "ü"}, False)):
        call = {"id": "other", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert (table.find(None, [USER, message], "P") is not None) is known


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    table = TurnTable(max_tokens=100)
    for number in range(5):
        table.remember(None, 1, AssistantMessage(str(number)), turn(f"P{number}", 40))
    known = [
        table.find(None, [USER, {"role": "assistant", "content": str(number)}], f"P{number}") is not None
        for number in range(5)
    ]
    assert known == [False, False, False, True, True]
    table.remember(None, 1, AssistantMessage("4"), turn("P4", 41))  # once more: it replaces itself
    assert table.find(None, [USER, {"role": "assistant", "content": "3"}], "P3") is not None
