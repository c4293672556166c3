"""Conversations with tools under chat templates of several families. The templates are written here, in our words."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest

from foreword.text.chat import ChatTemplate, render_chat
from foreword.text.tools.canonical import canonical_tools
from foreword.text.tools.hermes import GenericFormat, HermesFormat
from foreword.text.tools.llama3 import Llama3Format
from foreword.text.tools.mistral import MistralArgsFormat, MistralFormat

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}
    {{- '\n\n# Tools\n\nSignatures:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' ~ tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nAnswer <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- (call.arguments | tojson) ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' ~ system ~ '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{ raise_exception('Tools need a first user message!') }}{% endif %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with {"name": function name, "parameters": values}.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- first ~ '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' ~ m['content'] | trim ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('This model takes one tool-call at once!') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = none %}{%- set turns = messages %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
    {%- if not (m.role == 'tool' or (m.role == 'assistant' and m.tool_calls is defined)) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' ~ (tool.function | tojson) ~ '}' }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (system ~ '\n\n' if loop.last and system else '') ~ m.content ~ '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('Bad id!') }}{% endif %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- ', ' if not loop.last else ']' ~ eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' ~ m.content ~ eos_token }}
    {%- elif m.role == 'tool' %}
        {%- set id = m.tool_call_id | default('') %}
        {%- if id | length != 9 %}{{ raise_exception('Bad id!') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' ~ m.content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles') }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_ARGS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' ~ messages[0].content ~ '[/SYSTEM_PROMPT]' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ (given if given is string else given | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('Unknown role') }}{% endif %}
{%- endfor %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prefix = (messages[0].content if messages[0].content is string else messages[0].content[0].text) ~ '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}{%- set turns = messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (prefix if loop.first) }}
    {%- if m.content is string %}{{- m.content | trim }}
    {%- else %}{%- for part in m.content %}{{- part.text | trim }}{%- endfor %}{%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system
You are an assistant named Smol<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + m['role'] + '
' + m['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

SMOLLM3 = """{{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system') }}
{%- if tools %}
    {{- '\n### Tools\nCall <tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n' }}
    {%- for tool in tools %}{{- tool | string ~ '\n' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages if m.role in ('user', 'assistant') %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TEXT_ARGUMENTS = """{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}
    {{- '<' ~ m.role ~ '>' ~ m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments + '}\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}"""

PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"

FAMILIES = {
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "gemma3": GEMMA3,
    "smollm2": SMOLLM2,
    "smollm3": SMOLLM3,
    "text arguments": TEXT_ARGUMENTS,
    "parts": PARTS,
}
TEMPLATES = {name: ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}) for name, text in FAMILIES.items()}
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
        "smollm2": GenericFormat,
        "smollm3": HermesFormat,
        "text arguments": HermesFormat,
        "parts": GenericFormat,
    }
    assert {name for name, form in found.items() if not form.parallel} == {"llama3"}
    assert type(ChatTemplate.plain().tool_format) is GenericFormat


@pytest.mark.parametrize("name", ["qwen", "llama3", "mistral", "mistral-args", "smollm3", "gemma3", "text arguments"])
def test_a_call_in_the_history_reads_as_it_was_written(name: str) -> None:
    template = TEMPLATES[name]
    given = {"x": 1, "word": "Zürich"}
    written = template.tool_format.write_calls([("add", given)])
    if name == "mistral":
        written = written.replace("}]", ', "id": "abcdefghi"}]')
    for arguments in (given, json.dumps(given)):
        messages = [user("q"), assistant("", call("add", arguments, "abcdefghi")), result("3", "abcdefghi")]
        if name != "smollm3":  # shows no turns with calls: there they are text in the generic form
            assert written in render_chat(template, messages, TOOLS)


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
        "C": assistant("", call("word", {"x": 1}, "1")),
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
