"""A LangChain agent and a LlamaIndex query engine in one process: one set of weights, one cache, nothing to configure.

    python examples/both_on_one_engine.py [model]

Models with the same name and the same engine options find the same engine. Prompts are shared as far as they begin
alike: here both put one instruction and the documents into the system message. Whoever comes second reads them from
the cache.
"""

import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from llama_index.core import ChatPromptTemplate as LlamaIndexTemplate
from llama_index.core import Document, SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent

from langchain_foreword import ChatForeword
from llama_index.llms.foreword import Foreword

DOCUMENTS = [file.read_text().strip() for file in sorted((Path(__file__).parent / "documents").glob("*.txt"))]
SYSTEM = "Answer in one short sentence, using only these documents.\n\n{context_str}"


class ShowUsage(BaseEventHandler):
    """LlamaIndex's query engines give text; what their calls cost is in the events."""

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            usage = event.response.raw["usage"]
            show("LlamaIndex", usage["cached_tokens"], usage["prompt_tokens"], event.response.message.content)


def main(model: str = "smollm2-135m") -> None:
    # The default model has 135 M parameters; a larger one, given by name, writes better answers.
    chat = ChatForeword(model=model, temperature=0, max_tokens=40)
    llm = Foreword(model=model, temperature=0, max_tokens=40)
    print(f"one engine: {chat.get_engine() is llm.get_engine()}\n")

    agent = create_agent(chat, tools=[], system_prompt=SYSTEM.format(context_str="\n\n".join(DOCUMENTS)))

    index = SummaryIndex.from_documents([Document(text=text) for text in DOCUMENTS])
    template = LlamaIndexTemplate.from_messages([("system", SYSTEM), ("user", "{query_str}")])
    query_engine = index.as_query_engine(llm=llm, text_qa_template=template)
    get_dispatcher().add_event_handler(ShowUsage())

    ask_agent(agent, "Who delivered the Gettysburg Address?")
    query_engine.query("When was the Gettysburg Address delivered?")
    ask_agent(agent, "Where was the Gettysburg Address delivered?")
    query_engine.query("Who wrote the Zen of Python?")


def ask_agent(agent: Any, question: str) -> None:
    message = agent.invoke({"messages": [("user", question)]})["messages"][-1]
    usage = message.usage_metadata
    show("LangChain", usage["input_token_details"]["cache_read"], usage["input_tokens"], message.text)


def show(name: str, reused: int, prompt: int, answer: str) -> None:
    print(f"{name:11}{reused:5} of {prompt} prompt tokens reused\n           {answer.strip()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
