"""``foreword explain``: two files in, an explanation out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from explanations.pair import SYSTEM, TURNS, system, tool
from foreword.cli import main
from foreword.model.source import resolve

RULES = str(SYSTEM["content"])


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to(name: str, content: Any) -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return to


def test_it_says_where_and_why(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cached = write("a.json", [system(f"It is 12:05. {RULES}"), TURNS[0]])
    asked = write("b.json", {"model": "x", "messages": [system(f"It is 12:47. {RULES}"), TURNS[0]]})
    assert main(["explain", cached, asked]) == 0
    out = capsys.readouterr().out
    assert "in the system prompt (message 0)" in out
    assert "clock: a clock or a date" in out
    assert "tokens computed again" in out


def test_its_fields_as_json(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    a = write("a.json", [SYSTEM, TURNS[0]])
    b = write("b.json", [SYSTEM, *TURNS[:3]])
    assert main(["explain", b, a, "--json"]) == 0
    all_of_it = json.loads(capsys.readouterr().out)
    assert all_of_it["reason"] == "complete"
    assert all_of_it["matched_tokens"] == all_of_it["prompt_tokens"]
    assert main(["explain", a, b, "--json"]) == 0
    longer = json.loads(capsys.readouterr().out)
    assert longer["reason"] == "never_seen"
    assert longer["matched_tokens"] == longer["position"] == all_of_it["prompt_tokens"]
    assert longer["piece"] == {"kind": "message", "index": 2, "role": "assistant"}
    assert (longer["expected_text"], longer["cause"], longer["lost_tokens"]) == ("", None, 0)


def test_tools_are_sorted_unless_told_otherwise(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [tool("stock", "How many are left."), tool("price", "What it costs.")]
    a = write("a.json", {"messages": TURNS[:1], "tools": tools})
    b = write("b.json", {"messages": TURNS[:1], "tools": tools[::-1]})
    assert main(["explain", a, b]) == 0
    assert "all of it is cached" in capsys.readouterr().out
    assert main(["explain", a, b, "--tools-as-given"]) == 0
    assert "tool_order" in capsys.readouterr().out


def test_texts_and_a_tokenizer_without_weights(write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in resolve("smollm2-135m").directory.glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    a, b = write("a.txt", f"User: Alice\n{RULES}"), write("b.txt", f"User: Bob\n{RULES}")
    assert main(["explain", a, b, "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "in the text" in out
    assert "identifier" in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.json", "{", "b.json is no JSON"),
        ("b.json", "{}", "b.json holds no conversation"),
        ("b.json", "[]", "b.json holds no conversation"),
        ("b.json", '[{"role": "owner", "content": "x"}]', "b.json: messages[0] has the unknown role 'owner'"),
        ("b.json", '{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "x"}]}', "b.json: "),
        ("b.json", '{"messages": [{"role": "user", "content": "x"}], "tools": "all"}', "b.json: "),
        ("b.txt", "", "b.txt is empty"),
    ],
)
def test_files_that_are_no_prompts(
    write: Any, capsys: pytest.CaptureFixture[str], name: str, content: str, message: str
) -> None:
    assert main(["explain", write("a.json", TURNS[:1]), write(name, content)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_missing(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", write("a.json", TURNS[:1]), "nowhere.json"]) == 1
    assert "nowhere.json cannot be read" in capsys.readouterr().err
