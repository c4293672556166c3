"""Answers taken apart into content and tool calls, however the text is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.core.message import MessageDelta
from foreword.text.tools.base import ToolFormat
from foreword.text.tools.gemma import Gemma4Format, GemmaFormat
from foreword.text.tools.hermes import GenericFormat, HermesFormat
from foreword.text.tools.llama3 import Llama3Format
from foreword.text.tools.mistral import MistralArgsFormat, MistralFormat

FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "hermes on one line": HermesFormat(True, "", "", ""),
    "generic": GenericFormat(),
    "llama3": Llama3Format(),
    "mistral": MistralFormat(),
    "mistral-args": MistralArgsFormat(),
    "mistral-args with ids": MistralArgsFormat(with_id=True),
    "gemma": GemmaFormat(),
    "gemma4": Gemma4Format(),
}
MARKED = [name for name in FORMATS if name != "llama3"]
JSON = [name for name, form in FORMATS.items() if not isinstance(form, GemmaFormat)]
Read = tuple[str, list[tuple[str, str]]]


def collect(deltas: list[MessageDelta]) -> Read:
    """Content and calls of deltas added together, with the rules for their ids and indexes checked."""
    content = ""
    calls: list[list[str]] = []
    ids: set[str] = set()
    for delta in deltas:
        content += delta.content
        for call in delta.tool_calls:
            if call.id is not None:
                assert call.name is not None
                assert re.fullmatch("[A-Za-z0-9]+", call.id)  # 9 of ours; the text may bring others
                assert call.id not in ids
                ids.add(call.id)
                assert call.index == len(calls)
                calls.append([call.name, ""])
            assert (call.name is None) == (call.id is None)
            assert call.index == len(calls) - 1
            calls[-1][1] += call.arguments
    return content, [(name, arguments) for name, arguments in calls]


def read(form: ToolFormat, *pieces: str) -> Read:
    parser = form.parser()
    return collect([*(parser.append(piece) for piece in pieces), parser.finish()])


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> ToolFormat:
    return FORMATS[request.param]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["</tool_call>", "}", '"', "[ARGS]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex("[a-zA-Z0-9_.-]{1,20}", fullmatch=True)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(), VALUES, max_size=4)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
@pytest.mark.parametrize("name", JSON)
def test_calls_come_back_as_they_were_written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    content, found = read(FORMATS[name], FORMATS[name].write_calls(calls))
    assert content == ""
    assert [(called, arguments) for called, arguments in found] == [
        (called, json.dumps(arguments, ensure_ascii=False)) for called, arguments in calls
    ]


SHREDS = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "[CALL_ID]",
                "<|python_tag|>",
                "<tool_",
                "[TOOL",
            ),
            *(
                '{"name": "f", "arguments": {',
                '{"name": "f"',
                '"parameters": ',
                '"arguments": "{}"',
                '{"x": "a}"}',
                "null",
            ),
            *(
                "{",
                "}",
                "[",
                "]",
                ",",
                ", ",
                ":",
                ";",
                '"',
                "\\",
                "\n",
                " ",
                "f",
                "Hi ",
                "123456789",
                '"name": "g"',
                "ü",
            ),
        ]
    ),
    max_size=14,
).map("".join)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Calls of some format with a piece taken out and another put in."""
    form = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    text = "Hi\n" * draw(st.booleans()) + form.write_calls([("f", {"x": "}\\"}), ("g", {"y": [{}]})])
    start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 5))
    return text[:start] + draw(st.sampled_from(["", " ", "<", "{", '"', ",", "x"])) + text[start + length :]


@settings(max_examples=150, deadline=None)
@given(text=SHREDS | damaged(), data=st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_the_result_does_not_depend_on_the_cuts(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(FORMATS[name], text)
    assert read(FORMATS[name], *pieces) == whole
    assert read(FORMATS[name], *text) == whole


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.sampled_from(list("<[tool_cal{}]>|\n \"':,x")), max_size=40))
@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_comes_back_unchanged(name: str, text: str) -> None:
    assert read(FORMATS[name], *text) == (text, [])


@pytest.mark.parametrize("name", MARKED)
def test_content_around_calls_is_kept_without_the_space_of_the_markup(name: str) -> None:
    form = FORMATS[name]
    one, two = form.write_calls([("f", {"x": 1})]), form.write_calls([("g", {})])
    assert read(form, f"Let me look.\n\n{one}") == ("Let me look.", [("f", '{"x": 1}')])
    assert read(form, f"\n{one}\n") == ("", [("f", '{"x": 1}')])
    assert read(form, f"a\n{one}\n{two} b ") == ("a b", [("f", '{"x": 1}'), ("g", "{}")])
    assert read(form, f"a{one}b") == ("a\nb", [("f", '{"x": 1}')])
    assert read(form, f"{one}\n\nb\n{two}") == ("b", [("f", '{"x": 1}'), ("g", "{}")])


@pytest.mark.parametrize("name", JSON)
def test_arguments_stream_as_they_come(name: str) -> None:
    form = FORMATS[name]
    text = form.write_calls([("f", {"city": "Rome", "days": [1, 2]})])
    arguments = '{"city": "Rome", "days": [1, 2]}'
    parser = form.parser()
    seen = []
    for char in text:
        delta = parser.append(char)
        seen += [call.arguments for call in delta.tool_calls]
    assert seen == list(arguments)


def test_content_streams_as_it_comes(form: ToolFormat) -> None:
    parser = form.parser()
    assert [parser.append(piece).content for piece in ("Hello", " wor", "ld <", "tool", "ed>")] == [
        "Hello",
        " wor",
        "ld" if form.markers[0].startswith("<") else "ld <",
        "" if form.markers[0] == "<tool_call>" else " <tool" if form.markers[0].startswith("<") else "tool",
        " <tooled>" if form.markers[0] == "<tool_call>" else "ed>",
    ]


@pytest.mark.parametrize(
    "written",
    [
        '{"arguments": {"x": "}"}, "name": "f"}',
        '{ "name" :"f" ,\n"parameters":{"x": "}"} }',
        '{"id": "abcdefghi", "name": "f", "arguments": {"x": "}"}}',
        '{"name": "f", "arguments": "{\\"x\\": \\"}\\"}"}',
        '{"type": "function", "function": {"name": "f", "arguments": {"x": "}"}}}',
        '{"function": "f", "arguments": {"x": "}"}, "note": [1, {"a": null}]}',
        '{"name": "f", "arguments": {"x": "}"}, "arguments": {"x": "other"}}',
    ],
)
def test_calls_written_in_other_ways(written: str) -> None:
    assert read(HermesFormat(), f"<tool_call>{written}</tool_call>") == ("", [("f", '{"x": "}"}')])
    assert read(MistralFormat(), f"[TOOL_CALLS][{written}]") == ("", [("f", '{"x": "}"}')])


def test_calls_without_arguments() -> None:
    for written in ('{"name": "f"}', '{"name": "f", "arguments": null}', '{"name": "f", "arguments": {}}'):
        assert read(HermesFormat(), f"<tool_call>{written}</tool_call>") == ("", [("f", "{}")])


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        "<tool_call>f(x=1)</tool_call>",
        "<tool_call>",
        "<tool_call></tool_call> x",
        '<tool_call>\n{"name": "get_w',
        "a </tool_call>",
        '[TOOL_CALLS] [{"nome": "f"}]',
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]two words[ARGS]{}",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]" + 300 * "f" + "[ARGS]{}",
        '{"name": "Bob"}',
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"',
        '{"city": {"name": "f", "parameters": {}}}',
        '<|python_tag|>print("x")',
    ],
)
def test_what_makes_no_call_is_content(written: str, form: ToolFormat) -> None:
    if form.name == "llama3" or not written.startswith("{"):
        assert read(form, written) == (written, [])


def test_a_call_inside_a_broken_one_is_found() -> None:
    good = HermesFormat().write_calls([("f", {})])
    assert read(HermesFormat(), '<tool_call>{"x' + good) == ('<tool_call>{"x', [("f", "{}")])
    assert read(HermesFormat(), "<tool_call>" + good) == ("<tool_call>", [("f", "{}")])


def test_calls_cut_short_keep_what_there_is() -> None:
    assert read(HermesFormat(), '<tool_call>\n{"name": "f", "arguments": {"x": "a b') == ("", [("f", '{"x": "a b')])
    assert read(HermesFormat(), '<tool_call>\n{"name": "f", "argu') == ("", [("f", "")])
    assert read(HermesFormat(), '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"a\\') == ("", [("f", '{"x": "a')])
    assert read(HermesFormat(), '<tool_call>{"name": "f", "arguments": {"x": 1\n</tool_call>') == (
        "",
        [("f", '{"x": 1\n')],
    )
    whole = HermesFormat().write_calls([("f", {})])
    assert all(read(HermesFormat(), whole[:-cut]) == ("", [("f", "{}")]) for cut in range(1, len("}\n</tool_call>")))
    assert read(MistralArgsFormat(), "[TOOL_CALLS]f[ARGS]") == ("", [("f", "")])
    assert read(MistralFormat(), '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"na') == (', {"na', [("f", "{}")])
    assert read(Llama3Format(), '{"name": "f", "parameters": {"x') == ("", [("f", '{"x')])


def test_garbage_after_the_arguments_is_content() -> None:
    assert read(HermesFormat(), '<tool_call>{"name": "f", "arguments": {}} and so on') == (
        " and so on".lstrip(),
        [("f", "{}")],
    )
    assert read(HermesFormat(), 'a<tool_call>{"name": "f", "arguments": {} x}') == ("a\nx}", [("f", "{}")])


def test_several_calls_of_llama() -> None:
    text = '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}'
    assert read(Llama3Format(), text) == ("", [("f", '{"x": 1}'), ("g", "{}")])
    assert read(Llama3Format(), "<|python_tag|>" + text) == ("", [("f", '{"x": 1}'), ("g", "{}")])


def test_an_id_that_mistral_gives_is_kept() -> None:
    parser = MistralArgsFormat().parser()
    (call,) = parser.append("[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}").tool_calls
    assert (call.id, call.name, call.arguments) == ("abcDEF123", "f", "{}")


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(NAMES, PLAIN_VALUES, max_size=4), data=st.data())
@pytest.mark.parametrize("name", ["gemma", "gemma4"])
def test_gemmas_notation_becomes_json(name: str, arguments: dict[str, Any], data: st.DataObject) -> None:
    text = FORMATS[name].write_calls([("f", arguments), ("g", json.dumps(arguments))])
    cut = data.draw(st.integers(0, len(text)))
    content, found = read(FORMATS[name], text[:cut], text[cut:])
    assert content == ""
    assert [(called, json.loads(given)) for called, given in found] == [("f", arguments), ("g", arguments)]


def test_gemmas_strings_stream() -> None:
    parser = GemmaFormat().parser()
    pieces = ["<start_function_call>call:f{city:", "<escape>", "Ro", "me <", "b>", "<esc", "ape>}<end_function_call>"]
    seen = ["".join(call.arguments for call in parser.append(piece).tool_calls) for piece in pieces]
    assert seen == ['{"city": ', '"', "Ro", "me ", "<b>", "", '"}']


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{a:True,b:None,c:-1.5e3}", '{"a": true, "b": null, "c": -1.5e3}'),
        ("{ a : 1 , b : <escape>x<escape> }", '{"a": 1, "b": "x"}'),
        ("{<escape>a<escape>:1}", '{"a": 1}'),
        ("{city:Rome,list:[a,{}]}", '{"city": "Rome", "list": ["a", {}]}'),
        ('{q:<escape>"\\\n}<escape>}', '{"q": "\\"\\\\\\n}"}'),
        ("{}", "{}"),
    ],
)
def test_gemmas_values(written: str, arguments: str) -> None:
    json.loads(arguments)
    text = f"Hm.\n<start_function_call>call:f{written}<end_function_call>"
    assert read(GemmaFormat(), *text) == ("Hm.", [("f", arguments)])


def test_gemmas_calls_that_are_broken() -> None:
    opener = "<start_function_call>"
    assert read(GemmaFormat(), opener + "f{}") == (opener + "f{}", [])
    assert read(GemmaFormat(), opener + "call:f") == (opener + "call:f", [])
    assert read(GemmaFormat(), opener + "call:f{x:<escape>a b<es") == ("", [("f", '{"x": "a b<es')])
    assert read(GemmaFormat(), opener + "call:f{x:12") == ("", [("f", '{"x": 12')])
    assert read(GemmaFormat(), opener + "call:f{x:12<end_function_call>") == ("", [("f", '{"x": 12')])
