"""LlamaIndex's own agents: events, tool calls, turns and their cached tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.agent.workflow import (
    AgentOutput,
    AgentStream,
    AgentWorkflow,
    FunctionAgent,
    ReActAgent,
    ToolCall,
    ToolCallResult,
)
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field

from llama_index.llms.foreword import Foreword

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine

PROMPT = "You look things up for travellers. Use the tools."


def weather(city: str) -> str:
    """The weather in a city."""
    return f"In {city} the sun shines."


@pytest.fixture
def llm(cold: Engine, brief: dict[str, Any]) -> Foreword:
    return Foreword(engine=cold, **brief)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_its_tool_and_answers(
    llm: Foreword, events: list[Any], idle: Callable[[], None], streaming: bool
) -> None:
    agent = FunctionAgent(
        tools=[weather], llm=llm, system_prompt=PROMPT, initial_tool_choice="weather", streaming=streaming
    )
    handler = agent.run("What is the weather in Rome?", max_iterations=8)
    seen = [event async for event in handler.stream_events()]
    result = await handler
    (call, *_) = [event for event in seen if isinstance(event, ToolCall)]
    (done, *_) = [event for event in seen if isinstance(event, ToolCallResult)]
    assert (call.tool_name, set(call.tool_kwargs)) == ("weather", {"city"})
    assert (done.tool_id, done.tool_output.is_error) == (call.tool_id, False)
    assert done.tool_output.content == f"In {call.tool_kwargs['city']} the sun shines."
    assert isinstance(result, AgentOutput)
    assert result.response.content
    if streaming:
        pieces = [event for event in seen if isinstance(event, AgentStream)]
        assert any(piece.tool_calls and piece.tool_calls[0].tool_name == "weather" for piece in pieces)
        assert sum(bool(piece.delta) for piece in pieces) > 3
        assert pieces[-1].raw["usage"]["completion_tokens"] > 0
    turns = [event.response.raw["usage"] for event in events if isinstance(event, LLMChatEndEvent)]
    assert len(turns) >= 2
    for earlier, later in itertools.pairwise(turns):
        # the next request begins with all of this one and of its answer, but for the answer's last token
        assert later["cached_tokens"] == earlier["prompt_tokens"] + earlier["completion_tokens"] - 1
    idle()


async def test_memory_keeps_the_turns_as_they_were_generated(llm: Foreword, events: list[Any]) -> None:
    agent = FunctionAgent(tools=[weather], llm=llm, system_prompt=PROMPT)
    memory = Memory.from_defaults(token_limit=2000, tokenizer_fn=llm.get_engine().encode)
    await agent.run("Hello!", memory=memory, max_iterations=4)
    first = [event.response.raw["usage"] for event in events if isinstance(event, LLMChatEndEvent)][-1]
    events.clear()
    await agent.run("And who are you?", memory=memory, max_iterations=4)
    second = next(event.response.raw["usage"] for event in events if isinstance(event, LLMChatEndEvent))
    assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"] - 1


async def test_a_tool_may_give_the_answer_itself(llm: Foreword) -> None:
    tool = FunctionTool.from_defaults(weather, return_direct=True)
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt=PROMPT, initial_tool_choice="weather")
    result = await agent.run("What is the weather in Rome?")
    assert str(result).endswith("the sun shines.")
    assert [call.tool_name for call in result.tool_calls] == ["weather"]


async def test_an_agent_with_an_output_class(llm: Foreword) -> None:
    class Forecast(BaseModel):
        city: str = Field(max_length=20)
        sunny: bool

    agent = FunctionAgent(tools=[weather], llm=llm, initial_tool_choice="weather", output_cls=Forecast)
    result = await agent.run("What is the weather in Rome?", max_iterations=8)
    assert isinstance(result.get_pydantic_model(Forecast), Forecast)


async def test_a_workflow_of_agents(llm: Foreword) -> None:
    agent = FunctionAgent(name="guide", description="A guide.", tools=[weather], llm=llm, initial_tool_choice="weather")
    handler = AgentWorkflow(agents=[agent], root_agent="guide").run("What is the weather in Rome?", max_iterations=8)
    seen = [event async for event in handler.stream_events()]
    await handler
    assert next(event.tool_name for event in seen if isinstance(event, ToolCallResult)) == "weather"


async def test_a_react_agent_acts_on_text(llm: Foreword) -> None:
    """The format is forced, since a small model does not keep to it."""
    forced = Foreword(
        engine=llm.engine,
        temperature=0,
        max_tokens=80,
        structured={"regex": r'Thought: [a-z ]{1,20}\nAction: weather\nAction Input: \{"city": "[A-Z][a-z]{2,8}"\}'},
    )
    tool = FunctionTool.from_defaults(weather, return_direct=True)
    handler = ReActAgent(tools=[tool], llm=forced).run("What is the weather in Rome?")
    seen = [event async for event in handler.stream_events()]
    assert str(await handler).endswith("the sun shines.")
    assert [event.tool_name for event in seen if isinstance(event, ToolCallResult)] == ["weather"]
