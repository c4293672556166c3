"""Structured prediction: the four forms, what grows in a stream, what is refused, and the LLMs made from it."""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
from typing import TYPE_CHECKING, Any, Literal

import pytest
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictInProgressEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, RootModel, field_validator

from llama_index.llms.foreword import Foreword
from llama_index.llms.foreword._structured import instructions, schema_text, whole_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class City(BaseModel):
    """A city."""

    name: str = Field(description="Its name.", max_length=20)
    capital: bool
    size: Size


class Country(BaseModel):
    """A country and its cities."""

    name: str = Field(max_length=20)
    continent: Literal["Europe", "Asia", "Africa"]
    cities: list[City] = Field(min_length=1, max_length=1)
    motto: str | None = Field(default=None, max_length=20)


PROMPT = PromptTemplate("Describe the country {country} with its largest cities.")


@pytest.fixture
def llm(engine: Engine) -> Foreword:
    return Foreword(engine=engine, temperature=0, max_tokens=200)


async def test_all_four_forms_agree(llm: Foreword, idle: Callable[[], None]) -> None:
    whole = llm.structured_predict(Country, PROMPT, country="France")
    assert isinstance(whole, Country)
    assert await llm.astructured_predict(Country, PROMPT, country="France") == whole
    streamed = list(llm.stream_structured_predict(Country, PROMPT, country="France"))
    astreamed = [each async for each in await llm.astream_structured_predict(Country, PROMPT, country="France")]
    assert streamed[-1] == astreamed[-1] == whole
    assert [each.model_dump() for each in streamed] == [each.model_dump() for each in astreamed]
    idle()


def test_a_stream_shows_the_object_as_it_grows(llm: Foreword) -> None:
    objects = list(llm.stream_structured_predict(Country, PROMPT, country="France"))
    names = [each.name for each in objects]
    assert len(objects) > 5
    assert len(set(names)) > 2
    assert all(later.startswith(earlier or "") for earlier, later in itertools.pairwise(names))
    assert objects[0].continent is None
    assert not isinstance(objects[0], Country)
    assert isinstance(objects[-1], Country)
    assert all(one != other for one, other in itertools.pairwise(objects))


async def test_closing_a_stream_of_objects_frees_its_blocks(
    llm: Foreword, engine: Engine, idle: Callable[[], None]
) -> None:
    objects = llm.stream_structured_predict(Country, PROMPT, country="France")
    next(objects)
    assert engine.stats().running == 1
    objects.close()
    idle()


async def test_every_answer_is_valid_at_any_temperature(engine: Engine) -> None:
    llms = [Foreword(engine=engine, temperature=1.5, seed=seed, max_tokens=400) for seed in range(6)]
    found = await asyncio.gather(*[llm.astructured_predict(Country, PROMPT, country="Japan") for llm in llms])
    assert all(isinstance(each, Country) for each in found)
    assert len({each.model_dump_json() for each in found}) > 1


def test_the_schema_is_in_the_prompt_and_the_messages_stay_as_they_are(llm: Foreword, events: list[Any]) -> None:
    messages = [ChatMessage(role="system", content="Be exact."), ChatMessage(role="user", content="Describe Rome.")]
    llm.structured_predict(City, ChatPromptTemplate(message_templates=messages))
    sent = next(event for event in events if isinstance(event, LLMChatStartEvent)).messages
    assert [message.content for message in messages] == ["Be exact.", "Describe Rome."]
    assert sent[0].content == "Be exact."
    assert sent[1].content.startswith("Describe Rome.\n\n")
    assert '"Its name."' in sent[1].content
    assert "{{" not in sent[1].content


def test_only_the_titles_that_name_nothing_are_left_out_of_the_prompt() -> None:
    class Book(BaseModel):
        title: str = Field(description="On the cover.")
        properties: dict[str, City]
        default: Literal["title"] = "title"

    shown = json.loads(instructions(schema_text(Book)).splitlines()[-1])
    assert shown["properties"]["title"] == {"description": "On the cover.", "type": "string"}
    assert shown["properties"]["default"] == {"const": "title", "default": "title", "type": "string"}
    assert shown["properties"]["properties"] == {"additionalProperties": {"$ref": "#/$defs/City"}, "type": "object"}
    assert shown["required"] == ["title", "properties"]
    assert set(shown["$defs"]["City"]) == {"description", "properties", "required", "type"}


def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_runs() -> None:
    """The LLM's engine does not exist, and is not asked for."""

    class Odd(BaseModel):
        value: int = Field(json_schema_extra={"not": {"const": 3}})

    llm = Foreword(model="no/such-model")
    for method in (llm.structured_predict, llm.stream_structured_predict):
        with pytest.raises(ValueError, match=r"Odd: .*\bnot\b"):
            method(Odd, PROMPT, country="France")


def test_an_answer_that_is_cut_short_is_an_error(llm: Foreword) -> None:
    with pytest.raises(
        ValueError, match=r"no whole Country: it was cut short after 8 tokens; give a larger max_tokens"
    ):
        llm.structured_predict(Country, PROMPT, llm_kwargs={"max_tokens": 8}, country="France")
    objects = llm.stream_structured_predict(Country, PROMPT, llm_kwargs={"max_tokens": 8}, country="France")
    with pytest.raises(ValueError, match="no whole Country"):
        list(objects)


def test_what_the_class_itself_refuses_is_its_own_error(llm: Foreword) -> None:
    class Never(BaseModel):
        word: Literal["yes"]

        @field_validator("word")
        @classmethod
        def refuse(cls, value: str) -> str:
            raise ValueError(f"the class refuses {value}")

    with pytest.raises(ValueError, match="the class refuses yes"):
        llm.structured_predict(Never, PROMPT, country="France")


def test_aliases_are_the_names_in_the_answer(llm: Foreword) -> None:
    class Named(BaseModel):
        first: str = Field(alias="firstName", max_length=12)
        last: Literal["x"] = Field(alias="lastName")

    objects = list(llm.stream_structured_predict(Named, PROMPT, country="France"))
    assert objects[-1].last == "x"
    assert objects[0].first is not None
    assert objects[0].last is None


def test_options_of_programs_are_accepted_and_others_reach_the_call(llm: Foreword) -> None:
    options = {"tool_required": True, "tool_choice": "auto", "allow_parallel_tool_calls": True, "max_tokens": 100}
    assert isinstance(llm.structured_predict(City, PROMPT, llm_kwargs=options, country="France"), City)
    assert len(options) == 4
    with pytest.raises(ValueError, match="temprature"):
        llm.structured_predict(City, PROMPT, llm_kwargs={"temprature": 1}, country="France")


def test_a_base_model_answers_in_the_schema_too(engine: Engine) -> None:
    llm = Foreword(engine=engine, temperature=0, max_tokens=100, is_chat_model=False)
    assert isinstance(llm.structured_predict(City, PROMPT, country="France"), City)
    assert isinstance(list(llm.stream_structured_predict(City, PROMPT, country="France"))[-1], City)


def test_another_program_mode_is_respected(engine: Engine, events: list[Any]) -> None:
    llm = Foreword(engine=engine, temperature=0, max_tokens=100, pydantic_program_mode=PydanticProgramMode.FUNCTION)
    assert isinstance(llm.structured_predict(City, PROMPT, country="France"), City)
    started = next(event for event in events if isinstance(event, LLMChatStartEvent))
    assert [tool["function"]["name"] for tool in started.additional_kwargs["tools"]] == ["City"]


# -- events ----------------------------------------------------------------------------------------------------


async def test_events_of_all_forms(llm: Foreword, events: list[Any]) -> None:
    def taken() -> list[type]:
        kinds = [
            type(event) for event in events if "Structured" in type(event).__name__ or "Chat" in type(event).__name__
        ]
        ends = [event for event in events if isinstance(event, LLMStructuredPredictEndEvent)]
        assert [type(event.output) for event in ends] == [City]
        events.clear()
        return kinds

    plain = [LLMStructuredPredictStartEvent, LLMChatStartEvent, LLMChatEndEvent, LLMStructuredPredictEndEvent]
    llm.structured_predict(City, PROMPT, country="France")
    assert taken() == plain
    await llm.astructured_predict(City, PROMPT, country="France")
    assert taken() == plain
    objects = list(llm.stream_structured_predict(City, PROMPT, country="France"))
    kinds = taken()
    assert (kinds[0], kinds[-1]) == (LLMStructuredPredictStartEvent, LLMStructuredPredictEndEvent)
    assert kinds.count(LLMStructuredPredictInProgressEvent) == len(objects)
    _ = [each async for each in await llm.astream_structured_predict(City, PROMPT, country="France")]
    assert taken() == kinds


# -- structured LLMs -------------------------------------------------------------------------------------------


async def test_as_structured_llm(llm: Foreword) -> None:
    structured = llm.as_structured_llm(City)
    messages = [ChatMessage(role="user", content="Describe {Rome}, please.")]
    response = structured.chat(messages)
    assert isinstance(response.raw, City)
    assert City.model_validate_json(response.message.content) == response.raw
    assert (await structured.achat(messages)).raw == response.raw
    assert list(structured.stream_chat(messages))[-1].raw == response.raw
    assert [each async for each in await structured.astream_chat(messages)][-1].raw == response.raw
    assert isinstance(structured.complete("Describe Rome.").raw, City)
    assert isinstance((await structured.acomplete("Describe Rome.")).raw, City)


# -- constraints of single calls -------------------------------------------------------------------------------


def test_a_call_may_bring_its_own_constraint(llm: Foreword) -> None:
    messages = [ChatMessage(role="user", content="Is Paris the capital of France?")]
    for structured, allowed in (({"choices": ["yes", "no"]}, {"yes", "no"}), ({"regex": "[A-C]{3}"}, None)):
        text = llm.chat(messages, structured=structured).message.content
        assert text in allowed if allowed else (len(text) == 3 and set(text) <= set("ABC"))
        assert llm.complete(messages[0].content, structured=structured).text == text
        assert list(llm.stream_complete(messages[0].content, structured=structured))[-1].text == text
    assert llm.complete("1 + 1 =", formatted=True, structured={"choices": ["two"]}).text == "two"
    with pytest.raises(ValueError, match="unknown key 'shape'"):
        llm.chat(messages, structured={"shape": "round"})


def test_an_llm_may_have_a_constraint(engine: Engine) -> None:
    from foreword import StructuredParams

    params = StructuredParams(choices=("red", "blue"))
    for llm in (
        Foreword(engine=engine, structured=params),
        Foreword(engine=engine, structured={"choices": ["red", "blue"]}),
    ):
        assert llm.complete("Which colour?").text in ("red", "blue")
        again = Foreword.from_dict(llm.to_dict())
        assert list(again.structured["choices"]) == ["red", "blue"]
        assert llm.complete("Which colour?", structured=None, max_tokens=5).raw["usage"]["completion_tokens"] == 5
    with pytest.raises(ValueError, match="structured asks for nothing"):
        Foreword(structured={})


def test_a_number_that_was_cut_is_no_object(engine: Engine) -> None:
    """It would do for the class: that the schema asks for more tells it from a whole one."""
    schema = {"json_schema": {"type": "integer", "minimum": 1000, "maximum": 9999}}
    whole = Foreword(engine=engine, temperature=0).complete("A year:", structured=schema)
    assert whole_object(RootModel[int], whole).root >= 1000
    cut = Foreword(engine=engine, temperature=0, max_tokens=1).complete("A year:", structured=schema)
    with pytest.raises(ValueError, match="cut by max_tokens"):
        whole_object(RootModel[int], cut)
