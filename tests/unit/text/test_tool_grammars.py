"""Grammars of tool calls, walked with llguidance over a tokenizer of bytes, with and without special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from foreword.text.tools.base import ToolFormat, quote
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
    "mistral without a gap": MistralFormat(gap=""),
    "mistral-args": MistralArgsFormat(),
    "mistral-args with ids": MistralArgsFormat(with_id=True),
    "gemma": GemmaFormat(),
    "gemma4": Gemma4Format(),
}
MARKERS = sorted({marker for form in FORMATS.values() for marker in form.markers})
QUOTATIONS = [form.quotation for form in FORMATS.values() if isinstance(form, GemmaFormat)]
EOS = 256
SPECIAL = {marker: EOS + 1 + index for index, marker in enumerate(MARKERS)}
CITY = {"type": "object", "properties": {"name": {"type": "string"}, "zip": {"type": "integer"}}, "required": ["name"]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["C", "F"]}},
                "required": ["city"],
                "$defs": {"City": CITY},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_wind",
            "parameters": {
                "type": "object",
                "properties": {"speed": {"type": "number"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
    {"type": "function", "function": {"name": "empty", "parameters": {"type": "object", "properties": {}}}},
]
ONE = [("get_weather", {"city": {"name": "Zürich <tool_call> [TOOL_CALLS] }", "zip": 8001}, "unit": "C"})]
SEVERAL: list[tuple[str, dict[str, Any]]] = [*ONE, ("ping", {}), ("get_wind", {"next": {"speed": 1.5}}), ("empty", {})]


class _Bytes:
    """A tokenizer whose tokens are the bytes, an end and the markers."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *(marker.encode() for marker in MARKERS))
    special_token_ids = (EOS, *SPECIAL.values())

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def json_source(schema: Mapping[str, Any]) -> str:
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return f"%json {json.dumps(dict(schema) | {'x-guidance': layout})}"


def ids(text: str, special: bool) -> list[int]:
    """``text`` in tokens; markers that stand outside of JSON strings as special tokens, if ``special``."""
    found: list[int] = []
    quotation = ""  # what ends the string that we are in
    while text:
        marker = next((marker for marker in MARKERS if text.startswith(marker)), None)
        if special and marker is not None and quotation in ("", marker):
            found.append(SPECIAL[marker])
            if marker in QUOTATIONS:
                quotation = "" if quotation else marker
            text = text[len(marker) :]
            continue
        if text[0] == '"' and quotation in ("", '"'):
            quotation = "" if quotation else '"'
        found += text[0].encode()
        text = text[1:]
    return found


def read(form: ToolFormat, text: str, *, special: bool = False, answer: str | None = None, **options: Any) -> str:
    """What the grammar makes of ``text``: "whole", "begun" (there must be more), or the rest that it refused."""
    options = dict[str, Any](choice="auto", parallel=True) | options

    def literal(marker: str) -> str:
        return f"<[{SPECIAL[marker]}]>" if special else quote(marker)

    source = form.grammar(TOOLS, answer=answer, literal=literal, json=json_source, **options)
    matcher = LLMatcher(TOKENIZER, "start: answer\n" + source)
    assert not matcher.is_error(), matcher.get_error()
    tokens = ids(text, special)
    taken = matcher.try_consume_tokens(tokens)
    if taken == len(tokens):
        return "whole" if matcher.is_accepting() else "begun"
    rest = tokens[taken:]
    return b"".join(_Bytes.tokens[token] for token in rest).decode(errors="replace")


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> ToolFormat:
    return FORMATS[request.param]


@pytest.fixture(params=[False, True], ids=["spelled", "special"])
def special(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_every_call_that_is_written_is_accepted(form: ToolFormat, special: bool) -> None:
    for calls in ([call] for call in SEVERAL):
        text = form.write_calls(calls)
        for choice in ("any", "required", "auto", calls[0][0]):
            assert read(form, text, special=special, choice=choice) == "whole"
        assert read(form, text, special=special, answer=json_source(CITY)) == "whole"


def test_several_calls_are_accepted_where_they_may_be(form: ToolFormat, special: bool) -> None:
    text = form.write_calls(SEVERAL)
    accepted = {
        (choice, parallel): read(form, text, special=special, choice=choice, parallel=parallel) == "whole"
        for choice in ("any", "auto")
        for parallel in (True, False)
    }
    assert accepted == {(choice, parallel): parallel and form.parallel for choice, parallel in accepted}


def test_a_named_choice_takes_one_call_of_that_tool(form: ToolFormat, special: bool) -> None:
    assert read(form, form.write_calls(ONE), special=special, choice="ping") != "whole"
    assert read(form, form.write_calls([("ping", {})] * 2), special=special, choice="ping") != "whole"


def test_a_choice_without_a_tool_is_refused(form: ToolFormat) -> None:
    with pytest.raises(ValueError, match="tool_choice='other' is not valid"):
        form.grammar(TOOLS, choice="other", parallel=True, answer=None, literal=quote, json=json_source)


def test_free_text_is_accepted_until_a_call_begins(form: ToolFormat, special: bool) -> None:
    for text in ("", "Hello.", "  \n< [ tool_call TOOL_CALLS ünï {", "a <tool_cal", "2 [TOOL_CALL\n"):
        assert read(form, text, special=special) == "whole"
        assert read(form, text, special=special, choice="none") == "whole"
        assert read(form, f"x{text}", special=special, choice="any") != "whole"


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_has_begun_is_enforced(form: ToolFormat, special: bool, parallel: bool) -> None:
    good = form.write_calls([("get_weather", {"city": {"name": "Rome", "zip": 1}})])
    before = "" if isinstance(form, Llama3Format) else "Let me see.\n"
    assert read(form, before + good, special=special, parallel=parallel) == "whole"
    wrongs = [("get_weather", "get_wheather"), ('"zip": 1', '"zip": "1"'), ('"name": "Rome"', '"nome": 1')]
    if isinstance(form, GemmaFormat):
        wrongs = [("get_weather", "get_wheather"), ("zip:1", "zip:a"), ("name:", "nome:")]
    for wrong, instead in wrongs:
        assert wrong in good
        rest = read(form, before + good.replace(wrong, instead), special=special, parallel=parallel)
        assert rest not in ("whole", "begun")
        assert len(rest) < len(good)


def test_an_opener_spelled_with_ordinary_tokens_begins_a_call_too() -> None:
    for form in (HermesFormat(), MistralFormat(), MistralArgsFormat(), GemmaFormat()):
        opener = form.opener
        source = form.grammar(
            TOOLS, choice="auto", parallel=True, answer=None, literal=lambda m: f"<[{SPECIAL[m]}]>", json=json_source
        )
        matcher = LLMatcher(TOKENIZER, "start: answer\n" + source)
        assert matcher.try_consume_tokens(list(opener.encode())) == len(opener)
        assert not matcher.is_accepting()


def test_none_keeps_calls_out(form: ToolFormat, special: bool) -> None:
    text = form.write_calls(ONE)
    assert read(form, text, special=special, choice="none") not in ("whole", "begun")
    assert read(form, text, choice="none") not in ("whole", "begun")
    if not isinstance(form, Llama3Format):
        assert read(form, "Well. " + text, choice="none") not in ("whole", "begun")


def test_a_json_answer_may_stand_in_place_of_calls(form: ToolFormat, special: bool) -> None:
    lists = json_source({"type": "array", "items": {"type": "string"}})
    for answer, text in (
        (json_source(CITY | {"additionalProperties": False}), '{"name": "ping", "zip": 3}'),
        (lists, '["a", "b"]'),
    ):
        for choice in ("auto", "none"):
            assert read(form, text, special=special, answer=answer, choice=choice) == "whole"
            assert read(form, "Hello", special=special, answer=answer, choice=choice) == "Hello"
        assert read(form, text, special=special, answer=answer, choice="any") != "whole"
        assert read(form, form.write_calls(ONE), special=special, answer=answer, choice="none") != "whole"


def test_llama_may_begin_with_its_tag() -> None:
    text = "<|python_tag|>" + Llama3Format().write_calls(ONE)
    for special in (True, False):
        assert read(Llama3Format(), text, special=special, choice="any") == "whole"
        assert read(Llama3Format(), text, special=special) == "whole"
        assert read(Llama3Format(), "Now " + text, special=special) not in ("whole", "begun")


def test_llama_answers_in_json_when_calls_are_off() -> None:
    assert read(Llama3Format(), '{"name": "Bob", "age": 3}', choice="none") == "whole"
    assert read(Llama3Format(), '{"name": "ping", "parameters": {}}', choice="none") not in ("whole", "begun")


def test_mistral_may_give_an_id() -> None:
    text = '[TOOL_CALLS] [{"name": "ping", "arguments": {}, "id": "abcDEF123"}]'
    assert read(MistralFormat(), text, choice="any") == "whole"


def gemma_reads(text: str, schema: Mapping[str, Any], special: bool = True) -> bool:
    """Whether the arguments ``text`` of a tool with one parameter of ``schema`` are accepted."""
    form = GemmaFormat()
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"N": {"type": "null"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    source = form.grammar(
        [tool],
        choice="any",
        parallel=False,
        answer=None,
        literal=lambda marker: f"<[{SPECIAL[marker]}]>" if special else quote(marker),
        json=json_source,
    )
    matcher = LLMatcher(TOKENIZER, "start: answer\n" + source)
    assert not matcher.is_error(), matcher.get_error()
    tokens = ids(f"<start_function_call>call:f{text}<end_function_call>", special)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['{x:<escape>a{b},\n"<escape>}', "{x:<escape><escape>}", "{}"], ["{x:a}", "{x:1}", "{,}"]),
        ({"type": "integer", "minimum": 3}, ["{x:3}", "{x:40}"], ["{x:2}", "{x:3.5}", "{x:<escape>3<escape>}"]),
        ({"type": ["boolean", "null"], "default": None}, ["{x:true}", "{x:null}"], ["{x:True}", "{x:0}"]),
        ({"enum": ["a", 1, None], "description": "d"}, ["{x:<escape>a<escape>}", "{x:1}", "{x:null}"], ["{x:2}"]),
        ({"const": ""}, ["{x:<escape><escape>}"], ["{x:<escape>a<escape>}"]),
        ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/N"}]}, ["{x:1.5}", "{x:null}"], ["{x:true}"]),
        ({"type": "array", "items": {"type": "integer"}}, ["{x:[]}", "{x:[1,2]}"], ["{x:[1,]}", "{x:1}"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
            ["{x:[1,2]}", "{x:[1,2,3]}"],
            ["{x:[]}", "{x:[1]}", "{x:[1,2,3,4]}"],
        ),
        (
            {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "required": ["b"]},
            ["{x:{b:1}}", "{x:{a:1,b:2}}", "{x:{b:1,c:2}}", "{x:{a:1,b:2,c:3}}"],
            ["{x:{}}", "{x:{a:1}}", "{x:{b:1,a:2}}", "{x:{a:1b:2}}", "{x:{b:1,}}"],
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{x:{}}", "{x:{q:1}}", "{x:{q:1,r:2}}"],
            ["{x:{q:true}}"],
        ),
        ({}, ["{x:{a:[1,<escape>b<escape>,{}]}}", "{x:true}"], ["{x:b}", "{x:[1}"]),
    ],
)
@pytest.mark.parametrize("tokens", [True, False], ids=["special", "spelled"])
def test_schemas_in_gemmas_notation(schema: Any, good: list[str], bad: list[str], tokens: bool) -> None:
    assert [text for text in good if not gemma_reads(text, schema, tokens)] == []
    assert [text for text in bad if gemma_reads(text, schema, tokens)] == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, "additionalProperties beside"),
        ({"allOf": [{"type": "string"}, {"type": "string"}]}, "allOf"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"enum": [[1]]}, "enum or const"),
        (False, "false"),
    ],
)
def test_what_gemmas_notation_cannot_honour_is_refused_by_name(schema: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"tool 'f' cannot be honoured .*{said}"):
        gemma_reads("{}", schema)
