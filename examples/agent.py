"""A LangChain agent with two tools: every step finds what came before it computed.

    pip install langchain
    python examples/agent.py [model]

The system prompt and the tools stand at the beginning of each prompt, so they are computed once. A tool call goes back
to the model in the very tokens in which it was generated, so that the step after it pays for the tool's result only.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from langchain_foreword import ChatForeword

DOCUMENTS = Path(__file__).parent / "documents"
# Examples of calls help a small model to choose between the tools and to copy what the question says.
SYSTEM = """You are the assistant of a library that has three documents: the Bill of Rights, the Gettysburg Address and
the Zen of Python. Never answer from memory: call a tool first, and answer with what it gave you, in one short sentence.
look_up reads who wrote a document, when and where. calculate computes with two numbers.

What is 12 times 9?
{"name": "calculate", "arguments": {"a": 12, "operation": "times", "b": 9}}

Who is the author of the Zen of Python?
{"name": "look_up", "arguments": {"document": "Zen of Python"}}

How much is 5 plus 1999?
{"name": "calculate", "arguments": {"a": 5, "operation": "plus", "b": 1999}}

Where was the Gettysburg Address delivered?
{"name": "look_up", "arguments": {"document": "Gettysburg Address"}}"""

QUESTIONS = [
    "What is 17 times 23?",
    "Who wrote the Zen of Python?",
    "Which speech did Lincoln deliver at Gettysburg?",
    "How much is 87 plus 1776?",
]


@tool
def calculate(a: int, operation: Literal["plus", "minus", "times"], b: int) -> str:
    """Calculate with two numbers."""
    return str({"plus": a + b, "minus": a - b, "times": a * b}[operation])


@tool
def look_up(document: Literal["Bill of Rights", "Gettysburg Address", "Zen of Python"]) -> str:
    """Look up who wrote a document, when and where."""
    text = (DOCUMENTS / f"{document.lower().replace(' ', '_')}.txt").read_text()
    return "\n".join(text.splitlines()[:4])


class Answer(BaseModel):
    """The answer to a question."""

    answer: str = Field(max_length=100)


@wrap_model_call
def call_then_answer(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """First a call, then the answer; which tool, and with what, is up to the model.

    A model of 135 M parameters does not know by itself when to call and when it is done. Leave this out for a larger
    one: the grammar then admits both, a call of a tool or an `Answer`.
    """
    # With a response_format (a plain class, which the model itself enforces) an agent reads the choice from
    # model_settings; without one it reads request.override(tool_choice=...), and model_settings would be an error.
    is_done = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(model_settings={"tool_choice": "none" if is_done else "any"}))


def main(model: str = "smollm2-135m") -> None:
    # max_tokens: more than any step here takes; a call that is cut is an invalid one, which the agent cannot run.
    # parallel_tool_calls: a small model writes one call several times, and each of them would be run; a
    # response_format=ToolStrategy(Answer) would take several answers for an error and ask again, for ever.
    llm = ChatForeword(model=model, temperature=0, max_tokens=128, parallel_tool_calls=False)
    agent = create_agent(
        llm, [calculate, look_up], system_prompt=SYSTEM, response_format=Answer, middleware=[call_then_answer]
    )
    agent = agent.with_config(recursion_limit=10)  # an error instead of a model that calls tools for ever
    for question in QUESTIONS:
        print(f"\n{question}")
        for step in agent.stream({"messages": [("human", question)]}, stream_mode="updates"):
            for update in step.values():
                show(update["messages"][-1])


def show(message: Any) -> None:
    if isinstance(message, ToolMessage):
        print("  result ", " / ".join(filter(None, message.text.splitlines())))
        return
    for call in message.tool_calls:
        print("  call   ", call["name"], call["args"])
    if not message.tool_calls:
        print("  answer ", message.text)
    usage = message.usage_metadata
    print(f"          [{usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens reused]")


if __name__ == "__main__":
    main(*sys.argv[1:])
