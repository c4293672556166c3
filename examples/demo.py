"""The main job: a LangChain chain and a LlamaIndex query engine answer questions over the same documents, in one
process, on one engine. Every call pays only for what is new; the table at the end shows it.

    make demo
"""

from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core import Document, SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from tqdm import tqdm

from foreword import Engine, Usage
from foreword.cli.report import UsageTable
from langchain_foreword import ChatForeword, ForewordLLM
from llama_index.llms.foreword import Foreword

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = [
    "When was the Gettysburg Address delivered?",
    "What does the Second Amendment protect?",
    "Who wrote the Zen of Python?",
    "Which punishments does the Eighth Amendment forbid?",
    "Where was the Gettysburg Address delivered?",
    "In which state is Gettysburg?",
    "Who was president during the Gettysburg Address?",
    "What is the title of the first ten amendments?",
]


def main() -> None:
    with tqdm(total=1, desc="loading the model", bar_format="{desc} {elapsed}", leave=False) as bar:
        engine = Engine.shared("smollm2-135m")
        bar.update()
    calls = Calls()
    langchain_completion(calls.of("LangChain ForewordLLM"))
    langchain_chat(calls.of("LangChain ChatForeword"))
    get_dispatcher().add_event_handler(calls.of("LlamaIndex query engine").llama_index)
    llama_index_query_engine()
    print(f"\nWhat each call cost, in tokens of its prompt:\n\n{calls.table}")
    engine.close()


def langchain_completion(usage: "Recorder") -> None:
    """A completion model behind a prompt template: the document first, the unfinished sentence last."""
    show_heading("LangChain: ForewordLLM completes a sentence after reading a document")
    llm = ForewordLLM(model="smollm2-135m", temperature=0, max_tokens=16, stop=["\n"], callbacks=[usage])
    prompt = PromptTemplate.from_template("{document}\n\nSummary. {beginning}")
    chain = prompt | llm
    document = (DOCUMENTS / "gettysburg_address.txt").read_text()
    for beginning in ("The speech was delivered by", "The speech was delivered on", "The cemetery lies in"):
        usage.label(f"complete: {beginning}")
        show(beginning, chain.invoke({"document": document, "beginning": beginning}))


def langchain_chat(usage: "Recorder") -> None:
    """A chat model behind a prompt that holds all documents: one call, a batch of eight, a stream."""
    documents = "\n\n".join(file.read_text() for file in sorted(DOCUMENTS.iterdir()))
    system = "Answer in one short sentence, using only these documents.\n\n{documents}"
    prompt = ChatPromptTemplate.from_messages([("system", system), ("human", "{question}")])
    llm = ChatForeword(model="smollm2-135m", temperature=0, max_tokens=40, callbacks=[usage])
    chain = prompt.partial(documents=documents) | llm

    show_heading("LangChain: ChatForeword, one call")
    usage.label("invoke: the first reads the documents")
    question = "Who delivered the Gettysburg Address?"
    show(question, chain.invoke({"question": question}).text)

    show_heading("LangChain: ChatForeword, a batch of 8")
    usage.label("batch")
    with tqdm(total=len(QUESTIONS), desc="answering", delay=2, leave=False) as bar:
        answers: dict[int, str] = {}
        for index, message in chain.batch_as_completed([{"question": question} for question in QUESTIONS]):
            answers[index] = message.text
            bar.update()
    for index, question in enumerate(QUESTIONS):
        show(question, answers[index])

    show_heading("LangChain: ChatForeword, a stream")
    usage.label("stream")
    question = "Why did Lincoln go to Gettysburg?"
    print(f"{question}\n    ", end="")
    for chunk in chain.stream({"question": question}):
        print(chunk.text, end="", flush=True)
    print()


def llama_index_query_engine() -> None:
    """A query engine that puts all documents into its prompt: the second question finds them computed."""
    show_heading("LlamaIndex: a query engine on the same engine")
    llm = Foreword(model="smollm2-135m", temperature=0, max_tokens=40)
    documents = [Document(text=file.read_text()) for file in sorted(DOCUMENTS.iterdir())]
    index = SummaryIndex.from_documents(documents)
    query_engine = index.as_query_engine(llm=llm)
    for question in ("When was the Gettysburg Address delivered?", "What does the Second Amendment protect?"):
        show(question, str(query_engine.query(question)))


class Calls:
    """The table of all calls, and recorders that fill it."""

    def __init__(self) -> None:
        self.table = UsageTable()

    def of(self, caller: str) -> "Recorder":
        return Recorder(self.table, caller)


class Recorder(BaseCallbackHandler):
    """Writes the usage that LangChain and LlamaIndex report to the table."""

    def __init__(self, table: UsageTable, caller: str) -> None:
        self.table, self.caller, self.what = table, caller, ""
        self.llama_index = LlamaIndexEvents(recorder=self)

    def label(self, what: str) -> None:
        self.what = what

    def add(self, counts: dict[str, Any], timing: dict[str, Any]) -> None:
        label = f"{self.caller}, {self.what}" if self.what else self.caller
        first, total = timing["time_to_first_token_s"], timing["total_time_s"]
        self.table.add(label, Usage(**counts, time_to_first_token_s=first, total_time_s=total))

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        for (generation,) in response.generations:
            message = getattr(generation, "message", None)
            metadata = message.response_metadata if message else generation.generation_info or {}
            usage = message.usage_metadata if message else metadata["usage_metadata"]
            counts = {
                "prompt_tokens": usage["input_tokens"],
                "cached_tokens": usage["input_token_details"]["cache_read"],
                "completion_tokens": usage["output_tokens"],
            }
            self.add(counts, metadata["timing"])


class LlamaIndexEvents(BaseEventHandler):
    """LlamaIndex reports through events."""

    recorder: Any

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            raw = event.response.raw
            counts = {key: raw["usage"][key] for key in ("prompt_tokens", "cached_tokens", "completion_tokens")}
            self.recorder.add(counts, raw["timing"])


def show_heading(text: str) -> None:
    print(f"\n== {text}")


def show(question: str, answer: str) -> None:
    print(f"{question}\n    {answer.strip()}")


if __name__ == "__main__":
    main()
