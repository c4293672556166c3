"""Structured output."""

from __future__ import annotations

import dataclasses
import itertools
import json
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, Field
from pydantic.v1 import BaseModel as BaseModelV1

from foreword import StructuredParams
from langchain_foreword import ChatForeword, ForewordLLM
from langchain_foreword._structured import _answer_parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine


class City(BaseModel):
    """A city."""

    name: str = Field(description="its name", min_length=1, max_length=40)
    million_people: int


class CityDict(TypedDict):
    """A city."""

    name: str
    million_people: int


class CityV1(BaseModelV1):
    """A city."""

    name: str
    million_people: int


SCHEMA = CityDict.__annotations__.keys()
QUESTION = "Tell me about Paris in France as JSON."
METHODS = pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])


@METHODS
async def test_pydantic_class_gives_an_instance(llm: ChatForeword, method: str) -> None:
    """langchain #32197."""
    structured = llm.with_structured_output(City, method=method)
    city = structured.invoke(QUESTION)
    assert type(city) is City
    assert city.name
    assert await structured.ainvoke(QUESTION) == city
    assert structured.batch([QUESTION] * 2) == [city] * 2
    streamed = list(structured.stream(QUESTION))
    assert streamed[-1] == city
    assert all(type(each) is City for each in streamed)
    assert [each async for each in structured.astream(QUESTION)][-1] == city


@METHODS
def test_other_schemas_give_dicts(llm: ChatForeword, method: str) -> None:
    tool = {"type": "function", "function": {"name": "City", "parameters": convert_to_json_schema(CityDict)}}
    for schema in (CityDict, CityV1.schema(), tool):
        found = llm.with_structured_output(schema, method=method).invoke(QUESTION)
        assert type(found) is dict
        assert found.keys() == SCHEMA
        assert type(found["million_people"]) is int
    assert type(llm.with_structured_output(CityV1, method=method).invoke(QUESTION)) is CityV1


@METHODS
@pytest.mark.usefixtures("real_engine")
def test_streams_grow(llm: ChatForeword, method: str) -> None:
    found = list(llm.with_structured_output(CityDict, method=method).stream(QUESTION))
    assert len(found) > 4
    assert found[-1].keys() == SCHEMA
    names = [each.get("name", "") for each in found]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(names))


@METHODS
def test_include_raw(llm: ChatForeword, method: str) -> None:
    found = llm.with_structured_output(City, method=method, include_raw=True).invoke(QUESTION)
    assert found.keys() == {"raw", "parsed", "parsing_error"}
    assert type(found["raw"]) is AIMessage
    assert type(found["parsed"]) is City
    assert found["parsing_error"] is None
    arguments = found["raw"].tool_calls[0]["args"] if method == "function_calling" else json.loads(found["raw"].text)
    assert City(**arguments) == found["parsed"]


@pytest.mark.parametrize("schema", [City, CityDict])
def test_answer_that_was_cut_short_is_an_error(llm: ChatForeword, schema: Any) -> None:
    """LangChain's parsers would mend it, and what is missing would go unnoticed."""
    for method in ("json_schema", "function_calling"):
        structured = llm.with_structured_output(schema, method=method, max_tokens=2)
        with pytest.raises(OutputParserException, match="cut short by max_tokens"):
            structured.invoke(QUESTION)
        raw = llm.with_structured_output(schema, method=method, include_raw=True, max_tokens=2).invoke(QUESTION)
        assert raw["parsed"] is None
        assert "max_tokens" in str(raw["parsing_error"])
    with pytest.raises(OutputParserException, match="stop string"):
        llm.with_structured_output(schema).invoke(QUESTION, stop=['"'])


def test_json_mode_without_a_schema_is_any_object(llm: ChatForeword) -> None:
    assert type(llm.with_structured_output(None, method="json_mode").invoke(QUESTION)) is dict
    for response_format in ({"type": "json_object"}, {"type": "object"}):
        assert type(json.loads(llm.invoke(QUESTION, response_format=response_format).text)) is dict
    with pytest.raises(ValueError, match="needs a schema"):
        llm.with_structured_output(None)
    with pytest.raises(ValueError, match="method='xml'"):
        llm.with_structured_output(City, method="xml")
    with pytest.raises(ValueError, match="temprature"):
        llm.with_structured_output(City, temprature=0)


@dataclasses.dataclass
class CityData:
    name: str
    million_people: int


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "city", "schema": CityV1.schema(), "strict": True}},
        {"type": "json_schema", "name": "city", "schema": CityV1.schema()},
        {"type": "json_schema", "json_schema": {"schema": CityDict}},
        CityV1.schema(),
        CityV1,
        CityDict,
        CityData,
    ],
)
def test_response_formats(llm: ChatForeword, response_format: Any) -> None:
    """Per call, and bound, which translates them then."""
    text = llm.invoke(QUESTION, response_format=response_format).text
    assert json.loads(text).keys() == SCHEMA
    assert llm.bind_tools([], response_format=response_format).invoke(QUESTION).text == text


async def test_a_response_format_in_every_kind_of_call(llm: ChatForeword) -> None:
    text = llm.invoke(QUESTION, response_format=CityDict).text
    assert llm.bind(response_format=CityDict).invoke(QUESTION).text == text
    assert (await llm.bind_tools([], response_format=CityDict).ainvoke(QUESTION)).text == text
    assert "".join(chunk.text for chunk in llm.stream(QUESTION, response_format=CityDict)) == text


def test_text_is_a_response_format_too_and_others_are_refused(llm: ChatForeword) -> None:
    assert llm.invoke("Hi", response_format={"type": "text"}).text == llm.invoke("Hi").text
    for wrong in ({}, 5, {"type": "json_schema"}):
        with pytest.raises(ValueError, match="schema"):
            llm.invoke("Hi", response_format=wrong)
    with pytest.raises(ValueError, match="response_format and structured"):
        llm.invoke("Hi", response_format=City, structured={"choices": ["a"]})


async def test_tools_and_schema_together(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    """The answer is a tool call or JSON of the schema, whichever the model begins."""
    both = llm.bind_tools(tools, response_format=CityDict, parallel_tool_calls=False)
    for message in (both.invoke(paris), both.invoke(QUESTION), await both.ainvoke("Hello!")):
        assert bool(message.tool_calls) != bool(message.content)
        if message.content:
            assert json.loads(message.content).keys() == SCHEMA
    assert both.bind(tool_choice="any").invoke(QUESTION).tool_calls
    assert json.loads(both.bind(tool_choice="none").invoke(paris).text).keys() == SCHEMA


def test_tools_beside_structured_output(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    forced = llm.with_structured_output(City, tools=tools, tool_choice="any", include_raw=True).invoke(paris)
    assert forced["raw"].tool_calls
    assert "called tools (" in str(forced["parsing_error"])
    answered = llm.bind_tools(tools).with_structured_output(City).invoke(QUESTION, tool_choice="none")
    assert type(answered) is City


def test_schema_features(llm: ChatForeword) -> None:
    """$defs, anyOf, enum, const, nested lists, optional fields, bounds, patterns and formats."""

    class Kind(Enum):
        MUSEUM = "museum"
        TOWER = "tower"

    class Sight(BaseModel):
        kind: Kind
        rating: float = Field(ge=0, le=5)

    class Trip(BaseModel):
        version: Literal[2]
        code: str = Field(pattern=r"^[A-Z]{3}-[0-9]{2}$")
        day: str = Field(json_schema_extra={"format": "date"})
        budget: int | None
        sights: list[list[Sight]] = Field(min_length=1, max_length=2)
        note: str | None = Field(default=None, max_length=30)

    trip = llm.with_structured_output(Trip, max_tokens=200).invoke("Plan a trip to Paris.")
    assert trip.version == 2
    assert trip.code[3] == "-"
    assert len(trip.day) == 10


def test_structured_output_in_traces(llm: ChatForeword) -> None:
    """`ls_structured_output_format`."""
    for method in ("json_schema", "function_calling", "json_mode"):
        bound: Any = llm.with_structured_output(City, method=method).first
        assert bound.kwargs["ls_structured_output_format"] == {
            "kwargs": {"method": method, "strict": None},
            "schema": convert_to_json_schema(City),
        }


def test_structured_as_a_field_and_per_call(engine: Engine) -> None:
    prompt = "Is Paris in France? Answer yes or no."
    chat = ChatForeword(engine=engine, temperature=0, max_tokens=8, structured={"choices": ["yes", "no"]})
    assert chat.invoke(prompt).text in ("yes", "no")
    assert chat.invoke(prompt, structured={"regex": "[0-9]{3}"}).text.isdigit()
    text = ForewordLLM(engine=engine, temperature=0, max_tokens=8, structured=StructuredParams(regex="[0-9]{3}"))
    assert len(text.invoke("The height of the tower is")) == 3
    assert text.structured == {"regex": "[0-9]{3}"}  # a dict, which LangChain can write to JSON
    assert "".join(text.stream("The height of the tower is")).isdigit()
    with pytest.raises(ValueError, match="regexp"):
        ChatForeword(structured={"regexp": "a"})


async def test_concurrent_grammars_do_not_mix(llm: ChatForeword, added: Callable[..., Any]) -> None:
    import asyncio

    formats = [{"choices": [f"answer {number}"]} for number in range(8)]
    found = await asyncio.gather(*(llm.ainvoke("Hi", structured=each) for each in formats))
    assert [message.text for message in found] == [f"answer {number}" for number in range(8)]
    assert added(llm.stream("Hi", structured=formats[3])).text == "answer 3"


def test_the_model_reads_the_schema(llm: ChatForeword) -> None:
    """The descriptions of fields are in the prompt, unless the caller writes them there; any JSON object needs none."""

    class Described(BaseModel):
        city: str = Field(description="The city that the text is about, in its own language.")

    def prompt_tokens(method: str, schema: Any, **options: Any) -> int:
        raw = llm.with_structured_output(schema, method=method, include_raw=True, **options).invoke("Paris")["raw"]
        return raw.usage_metadata["input_tokens"]

    plain = llm.get_num_tokens_from_messages([HumanMessage("Paris")])
    assert prompt_tokens("json_schema", Described, schema_in_prompt=False) == plain
    assert prompt_tokens("json_mode", None) == plain
    assert prompt_tokens("json_schema", Described) > plain + llm.get_num_tokens(
        Described.model_fields["city"].description
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"name": "p", "schema": s, "strict": True},
        lambda s: {"type": "json_schema", "json_schema": {"name": "p", "schema": s}},
    ],
)
def test_openais_ways_to_wrap_a_schema(llm: ChatForeword, wrap: Callable[[Any], Any]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    assert llm.with_structured_output(wrap(schema)).invoke("Three.").keys() == {"n"}
    assert json.loads(llm.invoke("Three.", response_format=wrap(schema)).text).keys() == {"n"}


@pytest.mark.parametrize("stop", [False, True])
def test_a_number_that_was_cut_is_no_answer(engine: Engine, stop: bool) -> None:
    """It parses all the same: that the schema asks for more tells it from a whole one."""
    schema = {"title": "Year", "type": "integer", "minimum": 1000, "maximum": 9999}
    digits = [engine.encode(digit)[-1] for digit in "0123456789"]
    cut: dict[str, Any] = {"stop_token_ids": digits, "include_stop_str_in_output": True} if stop else {"max_tokens": 1}
    with pytest.raises(OutputParserException, match="the stop token" if stop else "max_tokens"):
        ChatForeword(engine=engine, temperature=0, **cut).with_structured_output(schema).invoke(QUESTION)
    assert ChatForeword(engine=engine, temperature=0).with_structured_output(schema).invoke(QUESTION) >= 1000


def test_an_answer_nested_beyond_reading_is_no_answer() -> None:
    """Python's own parser gives up on it with another error than on malformed text."""
    message = AIMessage("[" * 100_000 + "]" * 100_000)
    with pytest.raises(OutputParserException, match="no whole JSON"):
        _answer_parser(None).invoke(message)
