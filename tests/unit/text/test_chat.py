"""Chat templates of several families, and fitting messages to each. The templates are written here, in our words."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from foreword.text.chat import ChatTemplate, fit_messages

CHATML = """{%- for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- set name = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' ~ name ~ '\n' ~ m.content | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set intro = messages[0].content ~ '\n\n' %}{% set turns = messages[1:] %}
{%- else %}
    {%- set intro = '' %}{% set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' and loop.index0 % 2 == 0 %}
        {{- '[INST] ' ~ (intro if loop.first) ~ m.content ~ ' [/INST]' }}
    {%- elif m.role == 'assistant' and loop.index0 % 2 == 1 %}
        {{- ' ' ~ m.content ~ eos_token }}
    {%- else %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
{%- endfor %}"""

SILENT = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
TOOLS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}call {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "silent": SILENT, "parts": PARTS}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[name], SPECIAL)


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def fitted(name: str, *pairs: tuple[str, Any]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in fit_messages(turns(*pairs), template(name))]


def test_whitespace_is_trimmed_as_templates_expect() -> None:
    assert template("chatml").render(turns(("user", "Hi"))) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template("chatml").render(turns(("user", "Hi")), None, False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_special_tokens_are_variables() -> None:
    text = template("mistral").render(turns(("user", "a"), ("assistant", "b")))
    assert text == "<s>[INST] a [/INST] b</s>"


def test_abilities_are_found_out_by_rendering() -> None:
    found = {name: template(name).abilities for name in FAMILIES}
    assert {name for name, can in found.items() if can.system} == {"chatml", "llama3", "mistral", "parts"}
    assert {name for name, can in found.items() if can.late_system} == {"chatml", "llama3", "parts"}
    assert {name for name, can in found.items() if can.assistant_first} == {"chatml", "llama3", "silent", "parts"}
    assert {name for name, can in found.items() if not can.text_content} == {"parts"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "roles",
    [
        "user",
        "system",
        "assistant",
        "system system user user",
        "system assistant user",
        "assistant assistant system tool user",
        "user system user assistant system assistant",
        "user assistant tool tool",
        "tool user system",
        "developer user assistant user system",
    ],
)
def test_any_order_of_roles_is_expressed_without_loss(name: str, roles: str) -> None:
    messages = turns(*((role, f"word{index}") for index, role in enumerate(roles.split())))
    text = template(name).render(fit_messages(messages, template(name)))
    positions = [text.find(f"word{index}") for index in range(len(messages))]
    assert positions == sorted(positions)
    assert -1 not in positions


def test_consecutive_messages_of_one_role_are_merged() -> None:
    merged = fitted("mistral", ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"))
    assert merged == [("user", "a\n\nb"), ("assistant", "c\n\nd")]


@pytest.mark.parametrize("name", ["gemma", "silent"])
def test_a_system_message_moves_into_the_first_user_message(name: str) -> None:
    assert fitted(name, ("system", "Be brief."), ("user", "Hi")) == [("user", "Be brief.\n\nHi")]
    assert fitted(name, ("system", "Be brief.")) == [("user", "Be brief.")]


def test_a_late_system_message_leaves_earlier_turns_as_they_were() -> None:
    before = turns(("system", "s"), ("user", "a"), ("assistant", "b"))
    after = [*before, *turns(("system", "late"), ("user", "c"))]
    fit = [fit_messages(messages, template("mistral")) for messages in (before, after)]
    assert fit[1][:3] == fit[0]
    assert fit[1][3:] == turns(("user", "late\n\nc"))


def test_a_conversation_that_the_assistant_opens() -> None:
    assert fitted("chatml", ("assistant", "Hello!"), ("user", "Hi"))[0] == ("assistant", "Hello!")
    assert fitted("gemma", ("assistant", "Hello!"), ("user", "Hi"))[:2] == [("user", ""), ("assistant", "Hello!")]


def test_tool_messages_and_calls_become_text_where_they_are_unknown() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    plain = fit_messages(messages, template("mistral"))
    assert [message["role"] for message in plain] == ["user", "assistant", "user"]
    assert plain[1]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[2]["content"] == "<tool_response>\n2\n</tool_response>"
    assert fit_messages(messages, ChatTemplate(TOOLS)) == plain  # it has turns for calls, but in a form of its own


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert fitted("chatml", ("user", parts)) == [("user", "abc")]
    assert fitted("parts", ("user", parts)) == [("user", [{"type": "text", "text": "abc"}])]


def test_messages_are_left_unchanged() -> None:
    messages = turns(("system", "s"), ("user", "a"), ("user", "b"))
    fit_messages(messages, template("gemma"))
    assert messages == turns(("system", "s"), ("user", "a"), ("user", "b"))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"),
        ("Hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (["Hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        (turns(("user", "x"), ("robot", "y")), r"messages\[1\] has the unknown role 'robot'"),
        ([{"role": "user"}], r"messages\[0\] .*no content"),
        (turns(("user", 5)), r"messages\[0\].content is a int"),
        (turns(("user", [{"type": "image_url", "image_url": "x"}])), "part of type 'image_url'"),
        (turns(("user", [7])), "holds a int"),
        ([*turns(("user", "x")), {"role": "assistant", "tool_calls": ["a"]}], r"messages\[1\].tool_calls\[0\] is 'a'"),
        ([{"role": "assistant", "tool_calls": [{}, None]}], r"messages\[0\].tool_calls\[1\] is None"),
        ([{"role": "assistant", "tool_calls": [{"function": None}]}], r"messages\[0\].tool_calls\[0\] is {'func"),
    ],
)
def test_bad_messages_are_refused_with_the_reason(messages: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_messages(messages, template("chatml"))


def test_what_a_template_raises_is_a_value_error_with_its_words() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        template("mistral").render(turns(("assistant", "x")))


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(ValueError, match="no valid jinja2"):
        ChatTemplate("{% for m in %}")


def test_a_template_cannot_reach_into_the_process() -> None:
    with pytest.raises(ValueError, match="cannot express"):
        ChatTemplate("{{ messages.append(1) }}").render(turns(("user", "x")))
    with pytest.raises(ValueError, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(turns(("user", "x")))


def test_helpers_that_templates_use() -> None:
    source = (
        "{{ {'ü': '<&>'} | tojson }} {{ strftime_now('%Y') }}{% generation %} text{% endgeneration %}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    year = datetime.datetime.now().year
    assert ChatTemplate(source).render(turns(("user", "x"))) == f'{{"ü": "<&>"}} {year} text1'


def test_tools_go_to_the_template_made_for_them() -> None:
    both = ChatTemplate("plain", tool_source="tools: {{ tools[0].function.name }}")
    assert both.render(turns(("user", "x"))) == "plain"
    assert both.render(turns(("user", "x")), tools=[{"function": {"name": "add"}}]) == "tools: add"


def test_the_plain_stand_in() -> None:
    text = ChatTemplate.plain().render(turns(("system", "s"), ("user", "u")))
    assert text == "System: s\n\nUser: u\n\nAssistant:"
