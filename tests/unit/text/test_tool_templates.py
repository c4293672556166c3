"""Conversations with tools under chat templates of several families."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest

from foreword.text.chat import ChatTemplate, render_chat
from foreword.text.tools.canonical import canonical_tools
from foreword.text.tools.gemma import Gemma4Format, GemmaFormat
from foreword.text.tools.hermes import GenericFormat, HermesFormat
from foreword.text.tools.llama3 import Llama3Format
from foreword.text.tools.mistral import MistralArgsFormat, MistralFormat

from .tool_templates import FAMILIES, QWEN, SMOLLM2, TEMPLATES

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
    for name in ("multiply", "add")
]


def call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id} | made if call_id else made


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {}) | more


def result(content: str, call_id: str = "") -> dict[str, Any]:
    return {"role": "tool", "content": content} | ({"tool_call_id": call_id} if call_id else {})


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_formats_are_recognised_by_rendering() -> None:
    found = {name: template.tool_format for name, template in TEMPLATES.items()}
    kinds = {name: type(form) for name, form in found.items()}
    assert kinds == {
        "qwen": HermesFormat,
        "llama3": Llama3Format,
        "mistral": MistralFormat,
        "mistral-args": MistralArgsFormat,
        "gemma3": GenericFormat,
        "functiongemma": GemmaFormat,
        "gemma4": Gemma4Format,
        "smollm2": GenericFormat,
        "smollm3": HermesFormat,
        "text arguments": HermesFormat,
        "parts": GenericFormat,
    }
    assert {name for name, form in found.items() if not form.parallel} == {"llama3"}
    assert type(ChatTemplate.plain().tool_format) is GenericFormat


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "smollm3"])
def test_a_call_in_the_history_reads_as_it_was_written(name: str) -> None:
    template = TEMPLATES[name]
    given = {"x": 1, "word": "Zürich"}
    written = template.tool_format.write_calls([("add", given)])
    if name == "mistral":
        written = written.replace("}]", ', "id": "abcdefghi"}]')
    for arguments in (given, json.dumps(given)):
        messages = [user("q"), assistant("", call("add", arguments, "abcdefghi")), result("3", "abcdefghi")]
        assert written in render_chat(template, messages, TOOLS)


def test_results_carry_the_name_of_their_tool() -> None:
    messages = [user("q"), assistant("", call("add", {"x": 1}, "1")), result("3", "1")]
    assert "response:add{value:<escape>3<escape>}" in render_chat(TEMPLATES["functiongemma"], messages, TOOLS)


def test_qwen_with_several_calls_content_and_reasoning() -> None:
    messages = [
        user("q"),
        assistant("Hm.", call("add", '{"x": 1}', "1"), call("multiply", {"x": 2}, "2"), reasoning_content="Think."),
        result("one", "1"),
        result("two", "2"),
    ]
    text = render_chat(TEMPLATES["qwen"], messages, TOOLS, template_options={"enable_thinking": False})
    assert text.endswith(
        "<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nThink.\n</think>\n\nHm.\n"
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "multiply", "arguments": {"x": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_llama_gets_one_call_at_a_time_each_with_its_result() -> None:
    messages = [
        user("q"),
        assistant("Hm.", call("add", {"x": 1}, "a"), call("multiply", {"x": 2}, "b")),
        result("second", "b"),
        result("first", "a"),
    ]
    text = render_chat(TEMPLATES["llama3"], messages, TOOLS)
    parts = [
        "q<|eot_id|>",
        "assistant<|end_header_id|>\n\nHm.<|eot_id|>",
        '{"name": "add", "parameters": {"x": 1}}<|eot_id|>',
        'ipython<|end_header_id|>\n\n"first"<|eot_id|>',
        '{"name": "multiply", "parameters": {"x": 2}}<|eot_id|>',
        'ipython<|end_header_id|>\n\n"second"<|eot_id|>',
    ]
    positions = [text.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)


def test_llama_puts_its_tools_into_a_turn_of_the_user() -> None:
    for messages in ([assistant("Hi!"), user("q")], [{"role": "system", "content": "s"}]):
        text = render_chat(TEMPLATES["llama3"], messages, TOOLS)
        assert re.search(r"user<\|end_header_id\|>\n\nRespond(?s:.*)\}\n\n<\|eot_id\|>", text)
        assert "assistant<|end_header_id|>\n\nHi!" in text or len(messages) == 1


def test_mistral_gets_ids_of_nine_characters() -> None:
    messages = [
        user("q"),
        assistant(
            "", call("add", {"x": 1}, "call_0123456789"), call("add", {"x": 2}), call("add", {"x": 3}, "abcDEF123")
        ),
        result("1", "call_0123456789"),
        result("2"),
        result("3", "abcDEF123"),
    ]
    text = render_chat(TEMPLATES["mistral"], messages, TOOLS)
    made = re.findall(r'"id": "([a-zA-Z0-9]{9})"', text)
    assert made == re.findall(r'"call_id": "([a-zA-Z0-9]{9})"', text)
    assert len(set(made)) == 3
    assert made[2] == "abcDEF123"
    assert text == render_chat(TEMPLATES["mistral"], messages, TOOLS)
    longer = render_chat(TEMPLATES["mistral"], [*messages, assistant("6"), user("and?")], TOOLS)
    assert made == re.findall(r'"id": "([a-zA-Z0-9]{9})"', longer)


def test_mistral_takes_a_user_after_a_result() -> None:
    messages = [user("q"), assistant("", call("add", {"x": 1}, "abcDEF123")), result("1", "abcDEF123"), user("and?")]
    text = render_chat(TEMPLATES["mistral"], messages, TOOLS)
    assert '[TOOL_CALLS] [{"name": "add"' in text
    assert text.endswith("[/TOOL_RESULTS] </s>" + text[text.index("[AVAILABLE_TOOLS]") :])
    assert text.endswith("[INST] and?[/INST]")


@pytest.mark.parametrize("name", ["gemma3", "smollm2", "parts"])
def test_templates_without_tools_get_them_described(name: str) -> None:
    section = TEMPLATES[name].tool_format.section(canonical_tools(TOOLS))
    assert section is not None
    assert '{"type": "function", "function": {"name": "add", "description": "Does add", "parameters": {' in section
    own = {"role": "system", "content": "Be brief."}
    for before in ([], [own], [own, {"role": "developer", "content": "Be kind."}]):
        text = render_chat(TEMPLATES[name], [*before, user("q")], TOOLS)
        assert text.count(section) == 1
        assert "\n\n".join([*(message["content"] for message in before), section]) in text
        assert text.index(section) < text.index("q", text.index(section) + len(section))
    assert "Smol" not in render_chat(TEMPLATES["smollm2"], [user("q")], TOOLS)
    assert section not in render_chat(TEMPLATES[name], [user("q")])


def test_gemma_has_them_in_the_first_turn_of_the_user() -> None:
    section = GenericFormat().section(canonical_tools(TOOLS))
    text = render_chat(TEMPLATES["gemma3"], [{"role": "system", "content": "s"}, user("q")], TOOLS)
    assert text == f"<s><start_of_turn>user\ns\n\n{section}\n\nq<end_of_turn>\n<start_of_turn>model\n"


def test_earlier_calls_and_results_as_text() -> None:
    messages = [
        user("q"),
        assistant("Hm.", call("add", '{"x": 1}', "1"), call("multiply", {"x": 2}, "2"), reasoning_content="r"),
        result("one", "1"),
        result("two", "2"),
        user("and?"),
    ]
    assert render_chat(TEMPLATES["gemma3"], messages) == (
        "<s><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\nHm.\n"
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "multiply", "arguments": {"x": 2}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n\nand?"
        "<end_of_turn>\n<start_of_turn>model\n"
    )


def test_arguments_cut_short_in_the_history(family: str) -> None:
    messages = [user("q"), assistant("", call("add", '{"x": 1, "y', "1")), result("failed", "1"), user("again")]
    assert "failed" in render_chat(TEMPLATES[family], messages, TOOLS)


STRANGE = [
    [result("word0", "unknown")],
    [user("word0"), result("word1", "unknown")],
    [user("word0"), assistant("", call("add", {}, "1")), result("word1", "1"), result("word2", "other")],
    [user("word0"), assistant("word1"), result("word2"), user("word3")],
    [assistant("", call("add", {}, "1")), result("word0", "1")],
    [user("word0"), assistant("", call("add", {}, "1")), user("word1")],
    [user("word0"), assistant("", {"type": "function"}), result("word1", "1")],
    [
        user("word0"),
        assistant("", call("add", {}), call("add", {})),
        result("word1"),
        result("word2"),
        assistant("word3"),
    ],
    [user("word0"), assistant("word1"), assistant("", call("add", {}, "1")), result("word2", "1"), assistant("word3")],
    [user("word0"), assistant("", call("add", {}, "1")), assistant("", call("add", {}, "2")), result("word1", "1")],
    [
        user("word0"),
        {"role": "assistant", "content": None, "tool_calls": [call("add", None, "1")]},
        result("word1", "1"),
    ],
    [user("word0"), {"role": "assistant", "content": "word1", "tool_calls": []}, user("word2")],
    [user("word0"), {"role": "assistant", "content": "word1", "tool_calls": None}, user("word2")],
]


@pytest.mark.parametrize("messages", STRANGE)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without", "with tools"])
def test_strange_histories_are_rendered_without_loss(family: str, tools: Any, messages: list[dict[str, Any]]) -> None:
    for before in ([], [{"role": "system", "content": "s"}, {"role": "system", "content": "t"}]):
        text = render_chat(TEMPLATES[family], [*before, *messages], tools)
        for index in range(sum("word" in str(message["content"]) for message in messages)):
            assert f"word{index}" in text


def test_any_order_of_turns_is_rendered(family: str) -> None:
    made: dict[str, dict[str, Any]] = {
        "S": {"role": "system", "content": "word"},
        "H": user("word"),
        "A": assistant("word"),
        "T": result("word", "1"),
        "C": assistant("", call("f", {"x": "word"}, "1")),
    }
    for roles in itertools.product("SHATC", repeat=3):
        for tools in (None, TOOLS):
            text = render_chat(TEMPLATES[family], [made[role] for role in roles], tools)
            assert text.count("word") == 3, roles


def test_messages_and_tools_are_left_unchanged(family: str) -> None:
    messages = [user("q"), assistant("a", call("add", '{"x": 1}', "call_000001")), result("1", "call_000001")]
    before = json.dumps([messages, TOOLS])
    render_chat(TEMPLATES[family], messages, TOOLS)
    assert json.dumps([messages, TOOLS]) == before


def shuffled(value: Any, seed: random.Random) -> Any:
    """``value`` with the keys of its objects in another order, but for ``properties``."""
    if isinstance(value, list):
        return [shuffled(entry, seed) for entry in value]
    if not isinstance(value, dict):
        return value
    keys = list(value)
    seed.shuffle(keys)
    return {
        key: {name: shuffled(entry, seed) for name, entry in value[key].items()}
        if key == "properties"
        else shuffled(value[key], seed)
        for key in keys
    }


RICH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "z": {"$ref": "#/$defs/B", "description": "z"},
                "a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": {"q": 1, "p": 2}},
                "list": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}},
            },
            "required": ["z"],
            "$defs": {"B": {"type": "string", "enum": ["y", "x"]}, "A": {"type": "integer", "minimum": 0}},
        },
    },
}


def test_equal_tools_give_equal_text(family: str) -> None:
    tools = [*TOOLS, RICH]
    text = render_chat(TEMPLATES[family], [user("q")], tools)
    seed = random.Random(1)
    for _ in range(5):
        seed.shuffle(tools)
        other = [shuffled(tool, seed) for tool in tools]
        assert render_chat(TEMPLATES[family], [user("q")], other) == text
    assert render_chat(TEMPLATES[family], [user("q")], other, canonical=False) != text


def test_canonical_tools_are_equal_tools_in_order() -> None:
    tools = [*TOOLS, RICH]
    canonical = canonical_tools(tools)
    assert canonical == sorted(tools, key=lambda tool: str(tool["function"]["name"]))
    assert [list(tool) for tool in canonical] == [["type", "function"]] * 3
    assert list(canonical[1]["function"]) == ["name", "description", "parameters", "strict"]
    parameters = canonical[1]["function"]["parameters"]
    assert list(parameters) == ["type", "properties", "required", "$defs"]
    assert list(parameters["properties"]) == ["z", "a", "list"]
    assert list(parameters["$defs"]) == ["A", "B"]
    assert parameters["required"] == ["z"]
    assert canonical_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(ValueError, match=r"tools\[1\].function.name"):
        canonical_tools([*TOOLS[:1], {"type": "function", "function": {}}])


@pytest.mark.parametrize("options", [{"messages": []}, {"tools": None}, {"add_generation_prompt": False}, {1: 2}, "x"])
def test_template_options_must_be_variables_of_the_templates_own(options: Any) -> None:
    with pytest.raises(ValueError, match="template_options"):
        render_chat(TEMPLATES["qwen"], [user("q")], template_options=options)


def test_without_a_generation_prompt() -> None:
    text = render_chat(TEMPLATES["qwen"], [user("q")], add_generation_prompt=False)
    assert text == "<|im_start|>user\nq<|im_end|>\n"


def test_malformed_calls_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"messages\[0\].tool_calls is a str"):
        render_chat(TEMPLATES["qwen"], [{"role": "assistant", "content": "", "tool_calls": "add"}])


def test_a_template_made_for_tools_is_used_for_turns_with_calls_only_if_tools_are_given() -> None:
    both = ChatTemplate(SMOLLM2, tool_source=QWEN)
    assert type(both.tool_format) is HermesFormat
    messages = [user("q"), assistant("", call("add", {"x": 1}, "1")), result("1", "1")]
    assert "<|im_start|>user\n<tool_response>" in render_chat(both, messages)
    assert "# Tools" in render_chat(both, messages, TOOLS)
