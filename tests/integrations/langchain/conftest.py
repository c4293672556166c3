"""Tools and prompts that several test files use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

from langchain_foreword import ChatForeword

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from foreword import Engine


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return f"It is sunny in {location}."


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
def tools() -> list[Any]:
    return [get_weather, add]


@pytest.fixture
def llm(engine: Engine, brief: dict[str, Any]) -> ChatForeword:
    return ChatForeword(engine=engine, **brief)


@pytest.fixture
def paris() -> list[BaseMessage]:
    """A conversation in which the model is glad to call a tool."""
    return [SystemMessage("You are a helpful assistant for travellers."), HumanMessage("What is the weather in Paris?")]


@pytest.fixture
def added() -> Callable[[Iterable[AIMessageChunk]], AIMessageChunk]:
    """Adds up the chunks of a stream."""

    def add_up(chunks: Iterable[AIMessageChunk]) -> AIMessageChunk:
        first, *rest = chunks
        for chunk in rest:
            first += chunk
        return first

    return add_up
