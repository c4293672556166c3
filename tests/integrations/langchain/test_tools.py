"""Tool calling: definitions, choices, calls whole and streamed, and the turns behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableBinding
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from langchain_foreword import ChatForeword

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather at a location.",
        "parameters": {"properties": {"location": {"type": "string"}}, "required": ["location"], "type": "object"},
    },
}


def _parts(message: AIMessage) -> tuple[Any, ...]:
    """A message without what differs from call to call."""
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    invalid = [call["name"] for call in message.invalid_tool_calls]
    metadata = {key: message.response_metadata[key] for key in ("model_name", "finish_reason", "stop_reason")}
    return message.content, calls, invalid, metadata, message.usage_metadata


# -- binding ---------------------------------------------------------------------------------------------------


def test_bound_tools_appear_in_the_prompt(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    """langchain #29033."""
    plain, with_tools = llm.get_num_tokens_from_messages(paris), llm.get_num_tokens_from_messages(paris, tools)
    assert with_tools > plain + 40
    message = llm.bind_tools(tools).invoke(paris, max_tokens=2)
    assert message.usage_metadata["input_tokens"] == with_tools
    assert llm.bind_tools(tools).get_num_tokens_from_messages(paris) == with_tools
    assert llm.invoke(paris, max_tokens=2).usage_metadata["input_tokens"] == plain


def test_every_kind_of_tool_becomes_the_same_definition(llm: ChatForeword) -> None:
    @tool
    def decorated(location: str) -> str:
        """Get the weather at a location."""
        return location

    decorated.name = "get_weather"

    def get_weather(location: str) -> str:
        """Get the weather at a location."""
        return location

    class Weather(BaseModel):
        """Get the weather at a location."""

        location: str

    class Typed(TypedDict):
        """Get the weather at a location."""

        location: str

    anthropic = {**WEATHER["function"], "input_schema": WEATHER["function"]["parameters"]}
    del anthropic["parameters"]
    for given in (decorated, get_weather, WEATHER, WEATHER["function"], anthropic):
        assert llm.bind_tools([given]).kwargs["tools"] == [WEATHER]
    for given in (Weather, Typed, Weather.model_json_schema()):
        (definition,) = llm.bind_tools([given]).kwargs["tools"]
        assert definition["function"]["parameters"]["properties"]["location"]["type"] == "string"


def test_tool_given_twice_is_one_tool_and_two_of_one_name_are_refused(llm: ChatForeword, tools: list[Any]) -> None:
    class Weather(BaseModel):
        """Get the weather."""

        location: str

    assert len(llm.bind_tools([Weather, Weather.model_json_schema(), *tools]).kwargs["tools"]) == 3
    other = {"name": "Weather", "description": "Something else.", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(ValueError, match="two tools have the name 'Weather'"):
        llm.bind_tools([Weather, other])


@pytest.mark.parametrize(
    ("choice", "bound"),
    [
        (None, "auto"),
        ("auto", "auto"),
        (False, "auto"),
        ("none", "none"),
        ("any", "any"),
        ("required", "required"),
        ("add", "add"),
        ({"type": "function", "function": {"name": "add"}}, "add"),
        ({"type": "any"}, "any"),
    ],
)
def test_tool_choices(llm: ChatForeword, tools: list[Any], choice: Any, bound: str) -> None:
    assert llm.bind_tools(tools, tool_choice=choice).kwargs["tool_choice"] == bound


def test_true_chooses_the_only_tool(llm: ChatForeword, tools: list[Any]) -> None:
    assert llm.bind_tools(tools[:1], tool_choice=True).kwargs["tool_choice"] == "get_weather"
    with pytest.raises(ValueError, match=r"only tool, but there are 2"):
        llm.bind_tools(tools, tool_choice=True)


def test_wrong_bindings_are_refused_when_they_are_made(llm: ChatForeword, tools: list[Any]) -> None:
    with pytest.raises(ValueError, match="get_wether"):
        llm.bind_tools(tools, tool_choice="get_wether")
    with pytest.raises(ValueError, match="tool_choice=3"):
        llm.bind_tools(tools, tool_choice=3)
    with pytest.raises(ValueError, match="no tools to choose from"):
        llm.bind_tools([], tool_choice="any")
    with pytest.raises(ValueError, match="'temprature'; did you mean temperature"):
        llm.bind_tools(tools, temprature=1)
    with pytest.raises(ValueError, match="top_p"):
        llm.bind_tools(tools, top_p=7)
    with pytest.raises(ValueError, match="web_search"):
        llm.bind_tools([{"type": "web_search"}])


def test_schema_that_cannot_be_enforced_is_refused_when_bound_and_named(llm: ChatForeword) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": {}, "uniqueItems": True}}}
    with pytest.raises(ValueError, match="uniqueItems"):
        llm.bind_tools([{"name": "save", "description": "Save.", "parameters": schema}])
    with pytest.raises(ValueError, match="uniqueItems"):
        llm.bind_tools([], response_format=schema)
    with pytest.raises(ValueError, match="uniqueItems"):
        llm.with_structured_output(schema)


def test_what_was_bound_before_is_kept(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    bound = llm.bind(max_tokens=3, stop=["x"]).bind_tools(tools, tool_choice="any")
    assert isinstance(bound, RunnableBinding)
    assert bound.kwargs.keys() == {"max_tokens", "stop", "tools", "tool_choice"}
    assert bound.invoke(paris).usage_metadata["output_tokens"] == 3
    again = bound.bind_tools(tools[:1])
    assert [each["function"]["name"] for each in again.kwargs["tools"]] == ["get_weather"]
    assert (again.kwargs["max_tokens"], again.kwargs["tool_choice"]) == (3, "auto")
    configured = llm.with_config(tags=["mine"]).bind_tools(tools)
    assert configured.config["tags"] == ["mine"]
    structured = llm.bind(max_tokens=2).with_structured_output({"type": "object", "properties": {}}, include_raw=True)
    assert structured.invoke("Hello")["raw"].usage_metadata["output_tokens"] <= 2


@pytest.fixture
def eager(llm: ChatForeword) -> ChatForeword:
    """It calls tools, where it may, until it is cut short."""
    ends = dict.fromkeys(llm.engine.encode("<|im_end|><|endoftext|>"), -100.0)
    return llm.model_copy(update={"logit_bias": llm.logit_bias | ends, "max_tokens": 112})


# -- calling ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_engine")
def test_any_with_two_tools_makes_a_call(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    """tool_choice="any" with two tools."""
    for choice in ("any", "required"):
        message = llm.bind_tools(tools, tool_choice=choice, parallel_tool_calls=False).invoke(paris)
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"location": "Paris"})
        assert (message.content, message.response_metadata["finish_reason"]) == ("", "tool_calls")
        assert call["id"]
        (block,) = message.content_blocks
        assert (block["type"], block["name"]) == ("tool_call", "get_weather")


def test_named_tool_is_called_once_and_none_calls_nothing(
    llm: ChatForeword, tools: list[Any], paris: list[Any]
) -> None:
    (call,) = llm.bind_tools(tools, tool_choice="add").invoke(paris).tool_calls
    assert call["name"] == "add"
    assert {type(value) for value in call["args"].values()} == {int}
    message = llm.bind_tools(tools, tool_choice="none").invoke(paris)
    assert message.tool_calls == []
    assert message.content


async def test_stream_adds_up_to_what_invoke_gives(
    eager: ChatForeword, tools: list[Any], paris: list[Any], added: Callable[..., AIMessageChunk]
) -> None:
    """llama-cpp-python #1883: deltas of tool calls stream."""
    bound = eager.bind_tools(tools, tool_choice="any")
    bound.invoke(paris, max_tokens=1)  # from here on the cached counts are equal
    whole = bound.invoke(paris)
    chunks = list(bound.stream(paris))
    achunks = [chunk async for chunk in bound.astream(paris)]
    for found in (added(chunks), added(achunks), await bound.ainvoke(paris), bound.batch([paris])[0]):
        assert _parts(found) == _parts(whole)
    assert len(whole.tool_calls) >= 2
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert len(pieces) > 6
    for index, call in enumerate(added(chunks).tool_calls):
        own = [piece for piece in pieces if piece["index"] == index]
        assert [piece["name"] for piece in own if piece["name"]] == [call["name"]]
        assert [piece["id"] for piece in own if piece["id"]] == [call["id"]]
    assert len({call["id"] for call in added(chunks).tool_calls}) == len(whole.tool_calls)


def test_rerouted_invoke_gives_the_same_calls(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    bound = llm.bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
    bound.invoke(paris)
    streaming = llm.model_copy(update={"streaming": True})
    rerouted = streaming.bind_tools(tools, tool_choice="any", parallel_tool_calls=False).invoke(paris)
    assert type(rerouted) is AIMessage
    assert _parts(rerouted) == _parts(bound.invoke(paris))
    quiet = llm.model_copy(update={"disable_streaming": "tool_calling"})
    assert len(list(quiet.bind_tools(tools, tool_choice="add").stream(paris))) == 1


@pytest.mark.parametrize(
    "limit", [9, 13, 14, 16, 19, *(pytest.param(n, marks=pytest.mark.soak) for n in (10, 11, 12, 15, 17, 18))]
)
def test_calls_that_were_cut_short_are_invalid_in_streams_too(
    llm: ChatForeword, tools: list[Any], limit: int, added: Callable[..., AIMessageChunk]
) -> None:
    """LangChain mends the arguments of a stream; a call without its end must not be carried out."""
    question = [HumanMessage('Use get_weather for the city called "Llanfair {PG} \\\\ [Gwyn]".')]
    bound = llm.bind_tools(tools, tool_choice="get_weather").bind(max_tokens=limit)
    whole, streamed = bound.invoke(question), added(bound.stream(question))
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.tool_calls == streamed.tool_calls == []
    assert len(whole.invalid_tool_calls) == len(streamed.invalid_tool_calls) == 1
    assert whole.content == streamed.content == ""
    for cut, mended in zip(whole.invalid_tool_calls, streamed.invalid_tool_calls, strict=True):
        assert (mended["name"] or "") == cut["name"]
        assert cut["name"] == ("get_weather" if limit >= 14 else "")
        assert mended["args"].startswith(cut["args"])
        assert "no JSON" in cut["error"]
        assert "max_tokens" in cut["error"]


async def test_tool_calls_survive_stream_events_v3(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    bound = llm.bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
    expected = bound.invoke(paris)
    stream = bound.stream_events(paris, version="v3")
    astream = await bound.astream_events(paris, version="v3")
    for message in (stream.output, await astream.output):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [
            (call["name"], call["args"]) for call in expected.tool_calls
        ]
        assert len(message.tool_calls) == 1
        assert message.usage_metadata["output_tokens"] == expected.usage_metadata["output_tokens"]


def test_arguments_follow_the_schema(llm: ChatForeword) -> None:
    """Enums, bounds, nested objects and lists."""

    class Room(BaseModel):
        number: int = Field(ge=1, le=40)
        beds: list[Literal["single", "double"]] = Field(min_length=1, max_length=2)

    class Book(BaseModel):
        """Book a hotel."""

        board: str = Field(json_schema_extra={"enum": ["half", "full"]})
        rooms: list[Room] = Field(min_length=2, max_length=2)

    bound = llm.bind_tools([Book], tool_choice="any", parallel_tool_calls=False, max_tokens=160)
    (call,) = bound.invoke("Book two rooms in a hotel.").tool_calls
    assert len(Book(**call["args"]).rooms) == 2
    assert call["args"]["board"] in ("half", "full")


@pytest.mark.usefixtures("real_engine")
def test_raw_unicode_in_arguments(llm: ChatForeword, tools: list[Any], added: Callable[..., AIMessageChunk]) -> None:
    """llama-cpp-python #372: no broken characters, no escapes."""
    bound = llm.bind_tools(tools, tool_choice="get_weather")
    chunks = list(bound.stream("What is the weather in Zürich or 東京?"))
    arguments = "".join(piece["args"] for chunk in chunks for piece in chunk.tool_call_chunks)
    assert "\ufffd" not in arguments
    assert "\\u" not in arguments
    assert not arguments.isascii()
    assert added(chunks).tool_calls[0]["args"].keys() == {"location"}


def test_parallel_calls_can_be_switched_off(eager: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    one = eager.model_copy(update={"parallel_tool_calls": False})
    assert len(one.bind_tools(tools, tool_choice="any").invoke(paris).tool_calls) == 1
    assert len(one.bind_tools(tools, tool_choice="any", parallel_tool_calls=True).invoke(paris).tool_calls) > 1
    assert len(one.invoke(paris, tools=tools, tool_choice="any").tool_calls) == 1  # unbound, per call
    for choice in ("any", True, "get_weather"):  # there is but one way: once
        assert len(eager.bind_tools(tools[:1], tool_choice=choice).invoke(paris).tool_calls) == 1


# -- the next turn ---------------------------------------------------------------------------------------------


def test_tool_call_turns_replay_identical_tokens(
    cold: Engine, brief: dict[str, Any], tools: list[Any], paris: list[Any]
) -> None:
    """langchain #15695: the next turn finds prompt and answer of this one, but for the last token."""
    llm = ChatForeword(engine=cold, **brief, parallel_tool_calls=False)
    history, bound, known = list(paris), llm.bind_tools(tools, tool_choice="any"), 0
    for turn in range(3):
        message = bound.invoke(history) if turn != 1 else _streamed(bound, history)
        usage = message.usage_metadata
        if turn:
            assert usage["input_token_details"]["cache_read"] == known
        known = usage["input_tokens"] + usage["output_tokens"] - 1
        (call,) = message.tool_calls
        history += [message, ToolMessage("It is sunny.", tool_call_id=call["id"]), HumanMessage(f"And on day {turn}?")]
    last = llm.bind_tools(tools).invoke(history, max_tokens=4)
    assert last.usage_metadata["input_token_details"]["cache_read"] == known


def _streamed(bound: Any, history: list[Any]) -> AIMessage:
    first, *rest = bound.stream(history)
    for chunk in rest:
        first += chunk
    return first


def test_history_that_ends_in_a_tool_message(llm: ChatForeword, tools: list[Any], paris: list[Any]) -> None:
    """langchain #15232."""
    bound = llm.bind_tools(tools, parallel_tool_calls=False)
    call = bound.bind(tool_choice="get_weather").invoke(paris)
    result = tools[0].invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    message = bound.invoke([*paris, call, result])
    assert message.usage_metadata["output_tokens"] > 0
    assert bound.get_num_tokens_from_messages([*paris, call, result]) == message.usage_metadata["input_tokens"]


def test_tools_in_another_order_are_the_same_prompt(cold: Engine, tools: list[Any], paris: list[Any]) -> None:
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=2)
    prompt = llm.bind_tools(tools).invoke(paris).usage_metadata["input_tokens"]
    reused = llm.bind_tools(tools[::-1]).invoke(paris).usage_metadata["input_token_details"]["cache_read"]
    assert reused == prompt - 1
    as_given = ChatForeword(engine=cold, temperature=0, max_tokens=2, canonical_tools=False)
    as_given.bind_tools(tools).invoke(paris)
    usage = as_given.bind_tools(tools[::-1]).invoke(paris).usage_metadata
    assert usage["input_token_details"]["cache_read"] < prompt - 20


def test_template_options_reach_the_template(llm: ChatForeword, paris: list[Any]) -> None:
    plain = llm.get_num_tokens_from_messages(paris)
    assert llm.invoke(paris, template_options={"unused": 1}, max_tokens=1).usage_metadata["input_tokens"] == plain
    with pytest.raises(ValueError, match="template_options"):
        llm.invoke(paris, template_options="enable_thinking")


def test_profile_says_what_the_model_can(llm: ChatForeword) -> None:
    for ability in ("tool_calling", "tool_choice", "tool_call_streaming", "structured_output", "text_inputs"):
        assert llm.profile[ability] is True
    assert llm.profile["max_input_tokens"] == 8192


def test_system_prompt_is_shared_whatever_tools_follow(cold: Engine, tools: list[Any], document: str) -> None:
    """Calls with the same system prompt and tools reuse both."""
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=2).bind_tools(tools)
    ask = [[SystemMessage(document), HumanMessage(question)] for question in ("Who?", "When?")]
    first, second = (llm.invoke(messages).usage_metadata for messages in ask)
    assert second["input_token_details"]["cache_read"] > first["input_tokens"] - 20
