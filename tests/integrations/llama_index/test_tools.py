"""Tools: calls in all four forms, as agents and programs read them, and back to the model in the next turn."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from foreword import MessageDelta, OutputChunk, ToolCallDelta
from llama_index.llms.foreword import Foreword, _blocks, _turn
from llama_index.llms.foreword._turn import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine


def weather(city: str, days: int) -> str:
    """The weather in a city for so many days."""
    return f"{city}: sun for {days} days"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


WEATHER, ADD = FunctionTool.from_defaults(weather), FunctionTool.from_defaults(add)
TOOLS = [WEATHER, ADD]
QUESTION = "What is 17 plus 25? Use the tool."


@pytest.fixture
def llm(engine: Engine, brief: dict[str, Any]) -> Foreword:
    return Foreword(engine=engine, **brief)


def calls(message: ChatMessage) -> list[ToolCallBlock]:
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]


def check_call(llm: Foreword, response: ChatResponse, names: set[str]) -> None:
    """The three ways in which LlamaIndex reads a call agree, and the arguments are those of the tool."""
    (selection,) = llm.get_tool_calls_from_response(response)
    (block,) = calls(response.message)
    (legacy,) = response.message.additional_kwargs["tool_calls"]
    assert selection.tool_name == block.tool_name == legacy["function"]["name"] in names
    assert selection.tool_id == block.tool_call_id == legacy["id"] != ""
    assert selection.tool_kwargs == block.tool_kwargs == json.loads(legacy["function"]["arguments"])
    expected = {"weather": {"city": str, "days": int}, "add": {"a": int, "b": int}}[selection.tool_name]
    assert {key: type(value) for key, value in selection.tool_kwargs.items()} == expected
    assert response.raw["finish_reason"] == "tool_calls"


async def test_all_four_forms_give_one_required_call(llm: Foreword, idle: Callable[[], None]) -> None:
    assert llm.metadata.is_function_calling_model
    asked: dict[str, Any] = {"user_msg": QUESTION, "tool_required": True}
    responses = [
        llm.chat_with_tools(TOOLS, **asked),
        await llm.achat_with_tools(TOOLS, **asked),
        list(llm.stream_chat_with_tools(TOOLS, **asked))[-1],
        [response async for response in await llm.astream_chat_with_tools(TOOLS, **asked)][-1],
    ]
    for response in responses:
        check_call(llm, response, {"weather", "add"})
    assert len({json.dumps(calls(response.message)[0].tool_kwargs) for response in responses}) == 1
    idle()


@pytest.mark.parametrize(
    "choice", ["weather", {"type": "function", "function": {"name": "weather"}}], ids=["name", "dict"]
)
def test_the_tool_that_is_asked_for_is_called(llm: Foreword, choice: Any) -> None:
    response = llm.chat_with_tools(TOOLS, user_msg=QUESTION, tool_choice=choice)
    check_call(llm, response, {"weather"})


def test_no_call_where_none_is_allowed(llm: Foreword) -> None:
    response = llm.chat_with_tools(TOOLS, user_msg="What is the capital of France?", tool_choice="none")
    assert response.message.content
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        llm.get_tool_calls_from_response(response)
    assert llm.chat_with_tools([], user_msg="Hello").message.content


def test_tools_are_in_the_prompt(llm: Foreword, engine: Engine) -> None:
    """langchain #29033: bound tools are rendered, and counted."""
    definitions = [tool.metadata.to_openai_tool() for tool in TOOLS]
    messages = [{"role": "user", "content": QUESTION}]
    response = llm.chat_with_tools(TOOLS, user_msg=QUESTION, tool_required=True)
    assert response.raw["usage"]["prompt_tokens"] == engine.count_tokens(messages, tools=definitions)
    plain = llm.chat([ChatMessage(role="user", content=QUESTION)], tools=TOOLS, tool_choice="none")
    assert plain.raw["usage"]["prompt_tokens"] == response.raw["usage"]["prompt_tokens"]
    assert engine.count_tokens(messages, tools=definitions) > engine.count_tokens(messages) + 40


def test_tools_in_another_order_find_the_same_prompt(cold: Engine) -> None:
    llm = Foreword(engine=cold, temperature=0, max_tokens=4)
    first = llm.chat_with_tools([WEATHER, ADD], user_msg=QUESTION).raw["usage"]
    second = llm.chat_with_tools([ADD, WEATHER], user_msg=QUESTION).raw["usage"]
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, first["prompt_tokens"] - 1)
    as_given = Foreword(engine=cold, temperature=0, max_tokens=4, canonical_tools=False)
    prompts = [as_given.chat_with_tools(tools, user_msg=QUESTION) for tools in ([WEATHER, ADD], [ADD, WEATHER])]
    cached = [prompt.raw["usage"]["cached_tokens"] for prompt in prompts]
    assert min(cached) < first["prompt_tokens"] // 2


def test_argument_pieces_stream(llm: Foreword) -> None:
    responses = list(llm.stream_chat_with_tools(TOOLS, user_msg=QUESTION, tool_choice="add"))
    texts = [call["function"]["arguments"] for r in responses for call in r.message.additional_kwargs["tool_calls"]]
    assert len(set(texts)) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    ids = {call.tool_call_id for r in responses for call in calls(r.message)}
    assert len(ids) == 1
    seen = [llm.get_tool_calls_from_response(response)[0].tool_kwargs for response in responses]
    assert seen[0] == {}
    assert set(seen[-1]) == {"a", "b"}
    assert any(set(each) == {"a"} for each in seen)
    assert all(not response.delta for response in responses)


def test_two_streamed_calls_keep_their_names_ids_and_arguments(llm: Foreword) -> None:
    pieces = [
        MessageDelta(tool_calls=(ToolCallDelta(0, id="call-one1", name="add", arguments='{"a": 1'),)),
        MessageDelta(
            tool_calls=(
                ToolCallDelta(0, arguments=', "b": 2}'),
                ToolCallDelta(1, id="call-two2", name="weather", arguments='{"city": "Ro'),
            )
        ),
        MessageDelta(tool_calls=(ToolCallDelta(1, arguments='me", "days": 3}'),)),
    ]
    turn, seen = Turn(), []
    for piece in pieces:
        assert turn.add(OutputChunk("req-0", 0, "text", [1], delta=piece))
        found = llm.get_tool_calls_from_response(ChatResponse(message=turn.message()))
        seen.append([(each.tool_id, each.tool_name, each.tool_kwargs) for each in found])
    assert not turn.add(OutputChunk("req-0", 0, "</tool_call>", [1], delta=MessageDelta()))
    assert seen == [
        [("call-one1", "add", {"a": 1})],
        [("call-one1", "add", {"a": 1, "b": 2}), ("call-two2", "weather", {"city": "Ro"})],
        [("call-one1", "add", {"a": 1, "b": 2}), ("call-two2", "weather", {"city": "Rome", "days": 3})],
    ]


def test_a_schema_that_cannot_be_enforced_is_refused_before_anything_runs() -> None:
    """The LLM's engine does not exist, and is not asked for."""

    class Odd(BaseModel):
        value: int = Field(json_schema_extra={"not": {"const": 3}})

    tool = FunctionTool.from_defaults(lambda value: value, name="odd", description="odd", fn_schema=Odd)
    llm = Foreword(model="no/such-model")
    for method in (llm.chat_with_tools, llm.stream_chat_with_tools):
        with pytest.raises(ValueError, match=r"odd.*\bnot\b"):
            method([tool], user_msg="Hello")
    with pytest.raises(ValueError, match="tool_choice='subtract'"):
        llm.chat_with_tools(TOOLS, user_msg="Hello", tool_choice="subtract")
    with pytest.raises(ValueError, match="tool_choice=3"):
        llm.chat_with_tools(TOOLS, user_msg="Hello", tool_choice=3)
    with pytest.raises(ValueError, match="no tools to choose from"):
        llm.chat_with_tools([], user_msg="Hello", tool_required=True)


def test_a_call_that_is_cut_short_is_an_error_and_is_never_made(llm: Foreword) -> None:
    made: list[Any] = []
    tool = FunctionTool.from_defaults(lambda text: made.append(text), name="note", description="Note a text.")
    with pytest.raises(ValueError, match=r"note was cut short \(max_tokens"):
        llm.predict_and_call([tool], user_msg="Note a long story.", tool_required=True, max_tokens=12)
    assert made == []


async def test_predict_and_call(llm: Foreword) -> None:
    for answer in (
        llm.predict_and_call([ADD], user_msg=QUESTION, tool_required=True),
        await llm.apredict_and_call([ADD], user_msg=QUESTION, tool_required=True),
    ):
        (source,) = answer.sources
        assert source.tool_name == "add"
        assert int(answer.response) == source.raw_input["kwargs"]["a"] + source.raw_input["kwargs"]["b"]


async def test_programs_that_call_functions(llm: Foreword) -> None:
    class Sum(BaseModel):
        """A sum of two numbers."""

        a: int
        b: int

    made: dict[str, Any] = {"prompt_template_str": "Add {a} and {b}.", "llm": llm}
    assert isinstance(FunctionCallingProgram.from_defaults(Sum, **made)(a=17, b=25), Sum)
    program = FunctionCallingProgram.from_defaults(Sum, **made, tool_choice="required")
    objects = list(program.stream_call(a=17, b=25))
    assert isinstance(objects[-1], Sum)
    assert not isinstance(objects[0], Sum)
    assert [each async for each in await program.astream_call(a=17, b=25)][-1] == objects[-1]


def test_the_next_turn_finds_the_calls_computed(cold: Engine) -> None:
    """The model's own turn goes back as it was generated; so the match reaches to its last token but one."""
    llm = Foreword(engine=cold, temperature=0, max_tokens=64)
    history = [ChatMessage(role="user", content=QUESTION)]
    first = llm.chat_with_tools(TOOLS, chat_history=history, tool_choice="add")
    usage = first.raw["usage"]
    (call,) = llm.get_tool_calls_from_response(first)
    result = ChatMessage(role="tool", content="42", additional_kwargs={"tool_call_id": call.tool_id})
    second = llm.chat_with_tools(TOOLS, chat_history=[*history, first.message, result], tool_choice="none")
    assert second.raw["usage"]["cached_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] - 1
    streamed = list(llm.stream_chat_with_tools(TOOLS, chat_history=history, tool_choice="add"))[-1]
    third = llm.chat_with_tools(TOOLS, chat_history=[*history, streamed.message, result], tool_choice="none")
    assert third.raw["usage"]["cached_tokens"] == third.raw["usage"]["prompt_tokens"] - 1


def test_an_older_core_without_the_blocks_keeps_calls_in_additional_kwargs(
    cold: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-index-core 0.13 has neither ToolCallBlock nor ThinkingBlock."""
    for module in (_blocks, _turn):
        for name in ("ToolCallBlock", "ThinkingBlock"):
            monkeypatch.setattr(module, name, None)
    llm = Foreword(engine=cold, temperature=0, max_tokens=64)
    history = [ChatMessage(role="user", content=QUESTION)]
    first = llm.chat_with_tools(TOOLS, chat_history=history, tool_choice="add")
    assert first.message.blocks == []
    (call,) = llm.get_tool_calls_from_response(first)
    assert set(call.tool_kwargs) == {"a", "b"}
    result = ChatMessage(role="tool", content="42", additional_kwargs={"tool_call_id": call.tool_id})
    second = llm.chat_with_tools(TOOLS, chat_history=[*history, first.message, result], tool_choice="none")
    usage = first.raw["usage"]
    assert second.raw["usage"]["cached_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] - 1
    turn = _turn.Turn()
    turn.add(OutputChunk("req-0", 0, "text", [1], delta=MessageDelta(reasoning="Hm.")))
    assert turn.message().additional_kwargs == {"reasoning_content": "Hm."}


def test_a_base_model_does_not_call(engine: Engine) -> None:
    llm = Foreword(engine=engine, is_chat_model=False, max_tokens=4)
    assert isinstance(llm, FunctionCallingLLM)
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(ValueError, match="tools: "):
        llm.complete("Hello", tools=[WEATHER])
