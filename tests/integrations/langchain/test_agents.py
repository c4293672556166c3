"""Whole programs: agents and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, RemoveMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from langchain_foreword import ChatForeword

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine, EngineStats

LONG = "You are a helpful assistant for travellers. You know the weather everywhere. " * 20
QUESTION = "What is the weather in Paris?"


class Weather(BaseModel):
    """The weather at a place."""

    city: str
    sunny: bool


@wrap_model_call
def one_call_then_answer(request: Any, handler: Callable[[Any], Any]) -> Any:
    """The decisions of a cleverer model: it calls a tool first, and answers once a result is there."""
    choice = "none" if isinstance(request.messages[-1], ToolMessage) else "any"
    settings = {"tool_choice": choice, "parallel_tool_calls": False}
    return handler(request.override(model_settings=settings))


@wrap_model_call
async def aone_call_then_answer(request: Any, handler: Callable[[Any], Any]) -> Any:
    choice = "none" if isinstance(request.messages[-1], ToolMessage) else "any"
    return await handler(request.override(model_settings={"tool_choice": choice, "parallel_tool_calls": False}))


def _steps(messages: list[Any]) -> list[str]:
    return [type(message).__name__ for message in messages]


@pytest.mark.usefixtures("real_engine")
def test_agent_with_tools_and_response_format(cold: Engine, tools: list[Any], idle: Callable[[], None]) -> None:
    """The profile makes it the provider's own structured output, sent along with the tools."""
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=64)
    agent = create_agent(llm, tools, system_prompt=LONG, response_format=Weather, middleware=[one_call_then_answer])
    state = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    assert type(state["structured_response"]) is Weather
    assert _steps(state["messages"]) == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
    _, call, result, answer = state["messages"]
    assert call.tool_calls[0]["name"] == "get_weather"
    assert result.content == "It is sunny in Paris."
    assert Weather.model_validate_json(answer.text) == state["structured_response"]
    known = call.usage_metadata["input_tokens"] + call.usage_metadata["output_tokens"] - 1
    assert answer.usage_metadata["input_token_details"]["cache_read"] == known
    again = agent.invoke({"messages": [HumanMessage("What is the weather in Rome?")]})["messages"]
    assert again[1].usage_metadata["input_token_details"]["cache_read"] > cold.count_tokens(LONG)
    idle()


@pytest.mark.usefixtures("real_engine")
def test_agent_decides_by_itself(llm: ChatForeword, tools: list[Any]) -> None:
    """Tools and schema are one grammar: whatever the model begins is a call that runs or an answer that parses."""
    agent = create_agent(llm, tools, system_prompt=LONG, response_format=Weather)
    kinds = []
    for question in (QUESTION, 'Answer with JSON such as {"city": "Rome", "sunny": false}.'):
        updates = agent.stream({"messages": [HumanMessage(question)]}, stream_mode="updates")
        update = next(updates)["model"]
        (message,) = update["messages"]
        if message.tool_calls:
            kinds.append("call")
            assert all(result.status == "success" for result in next(updates)["tools"]["messages"])
        else:
            kinds.append("answer")
            assert type(update["structured_response"]) is Weather
        updates.close()
    assert kinds == ["call", "answer"]


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_agents_of_both_strategies(engine: Engine, brief: dict[str, Any], strategy: Any) -> None:
    llm = ChatForeword(engine=engine, **brief, parallel_tool_calls=False)
    agent = create_agent(llm, [], system_prompt=LONG, response_format=strategy(Weather))
    assert type(agent.invoke({"messages": [HumanMessage(QUESTION)]})["structured_response"]) is Weather


async def test_agent_streams_tokens(llm: ChatForeword, tools: list[Any], added: Callable[..., AIMessageChunk]) -> None:
    """stream_mode="messages" reroutes the agent's calls to streams; the messages stay the same."""
    question = {"messages": [HumanMessage(QUESTION)]}
    middleware = [one_call_then_answer]
    agent = create_agent(llm, tools, system_prompt=LONG, response_format=Weather, middleware=middleware)
    whole = agent.invoke(question)["messages"]
    pieces = [piece for piece, _ in agent.stream(question, stream_mode="messages")]
    chunks: dict[str, list[AIMessageChunk]] = {}
    for piece in pieces:
        if isinstance(piece, AIMessageChunk):
            chunks.setdefault(piece.id, []).append(piece)
    call, answer = map(added, chunks.values())
    assert len(chunks[call.id]) > 4
    assert call.tool_calls[0]["args"] == whole[1].tool_calls[0]["args"]
    assert answer.content == whole[3].content
    assert call.response_metadata["finish_reason"] == "tool_calls"
    aagent = create_agent(llm, tools, system_prompt=LONG, response_format=Weather, middleware=[aone_call_then_answer])
    apieces = [piece async for piece, _ in aagent.astream(question, stream_mode="messages")]
    assert "".join(piece.text for piece in apieces) == "".join(piece.text for piece in pieces)


async def test_graph_with_a_memory_streams_and_reuses_its_turns(cold: Engine, spent: Callable[[], EngineStats]) -> None:
    """A langgraph graph with stream_mode="messages"; the second turn finds the whole first one (langchain #15695)."""
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=24)

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    program = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    texts = []
    for question in ("What is the capital of France?", "And of Japan?"):
        pieces = [piece async for piece, _ in program.astream(_ask(question), config, stream_mode="messages")]
        assert sum(bool(piece.text) for piece in pieces) > 3
        texts.append("".join(piece.text for piece in pieces))
    messages = (await program.aget_state(config)).values["messages"]
    assert [message.text for message in messages[1::2]] == texts
    first, second = messages[1].usage_metadata, messages[3].usage_metadata
    assert second["input_token_details"]["cache_read"] == first["input_tokens"] + first["output_tokens"] - 1
    assert spent().tokens_reused == second["input_token_details"]["cache_read"]


def _ask(question: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(question)]}


def test_messages_that_a_graph_removed_do_not_reach_the_model(llm: ChatForeword) -> None:
    def forget_and_answer(state: MessagesState) -> dict[str, Any]:
        kept = state["messages"][-1:]
        return {"messages": [RemoveMessage(id=message.id) for message in state["messages"][:-1]] + [llm.invoke(kept)]}

    graph = StateGraph(MessagesState).add_node("answer", forget_and_answer).add_edge(START, "answer")
    state = graph.compile().invoke({"messages": [HumanMessage("Hello."), HumanMessage("What is 1 + 1?")]})
    assert [type(message) for message in state["messages"]] == [HumanMessage, AIMessage]
