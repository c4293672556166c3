"""A LangChain agent and a LlamaIndex query engine in one process: one set of weights, one cache, nothing to configure.

    python examples/both_on_one_engine.py [model]

Models with the same name and the same engine options find the same engine. Prompts are shared as far as they begin
alike: here both put one instruction and the documents into the system message. Whoever comes second reads them from
the cache. (Where the model's template has no place for tools, the agent's is described behind the documents.)
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from llama_index.core import ChatPromptTemplate as LlamaIndexTemplate
from llama_index.core import Document, SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from pydantic import BaseModel, Field

from langchain_foreword import ChatForeword
from llama_index.llms.foreword import Foreword

DOCUMENTS = [file.read_text().strip() for file in sorted((Path(__file__).parent / "documents").glob("*.txt"))]
SYSTEM = "Answer in one short sentence, using only these documents.\n\n{context_str}"


@tool
def count_words(document: Literal["Bill of Rights", "Gettysburg Address", "Zen of Python"]) -> str:
    """Count the words of a document."""
    text = next(text for text in DOCUMENTS if document in text.splitlines()[0])
    return f"The {document} has {len(text.split())} words."


class Answer(BaseModel):
    """The answer to a question."""

    answer: str = Field(max_length=100)


@wrap_model_call
def call_then_answer(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """First a call, then the answer: the default model does not know by itself when to call. See agent.py."""
    is_done = isinstance(request.messages[-1], ToolMessage)
    return handler(request.override(model_settings={"tool_choice": "none" if is_done else "any"}))


class ShowUsage(BaseEventHandler):
    """LlamaIndex's query engines give text; what their calls cost is in the events."""

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            usage = event.response.raw["usage"]
            show("LlamaIndex", usage["cached_tokens"], usage["prompt_tokens"], event.response.message.content)


def main(model: str = "smollm2-135m") -> None:
    # The default model has 135 M parameters; a larger one, given by name, writes better answers.
    chat = ChatForeword(model=model, temperature=0, max_tokens=64)
    llm = Foreword(model=model, temperature=0, max_tokens=40)
    print(f"one engine: {chat.get_engine() is llm.get_engine()}\n")

    system = SYSTEM.format(context_str="\n\n".join(DOCUMENTS))
    agent = create_agent(
        chat, [count_words], system_prompt=system, response_format=Answer, middleware=[call_then_answer]
    )

    index = SummaryIndex.from_documents([Document(text=text) for text in DOCUMENTS])
    template = LlamaIndexTemplate.from_messages([("system", SYSTEM), ("user", "{query_str}")])
    query_engine = index.as_query_engine(llm=llm, text_qa_template=template)
    get_dispatcher().add_event_handler(ShowUsage())

    ask_agent(agent, "How many words does the Gettysburg Address have?")
    query_engine.query("When was the Gettysburg Address delivered?")
    ask_agent(agent, "How many words does the Zen of Python have?")
    query_engine.query("Who wrote the Zen of Python?")


def ask_agent(agent: Any, question: str) -> None:
    """Show the agent's steps: a call of the tool, and the answer made of its result."""
    for message in agent.invoke({"messages": [("user", question)]})["messages"]:
        if isinstance(message, AIMessage):
            usage = message.usage_metadata
            calls = [f"{call['name']}({call['args']['document']!r})" for call in message.tool_calls]
            reused = usage["input_token_details"]["cache_read"]
            show("LangChain", reused, usage["input_tokens"], ", ".join(calls) or message.text)


def show(name: str, reused: int, prompt: int, answer: str) -> None:
    print(f"{name:11}{reused:5} of {prompt} prompt tokens reused\n           {answer.strip()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
