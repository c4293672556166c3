"""The main job: a LangChain chain and a LlamaIndex query engine answer questions over the same documents, in one
process, on one engine. Every call pays only for what is new; the table at the end shows it.

    make demo
"""

from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core import ChatPromptTemplate as LlamaIndexTemplate
from llama_index.core import Document, SummaryIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from tqdm import tqdm

from foreword import Engine, Usage
from foreword.cli.report import UsageTable, prefill_progress
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


SYSTEM = "Answer in one short sentence, using only these documents.\n\n{context_str}"


def main() -> None:
    print("loading the model ...", flush=True)
    engine = Engine("smollm2-135m")
    table = UsageTable()
    langchain_completion(engine, table)
    langchain_chat(engine, table)
    llama_index_query_engine(engine, table)
    print(f"\nWhat each call cost, in tokens; the eight of the batch run together:\n\n{table}")
    engine.close()


def langchain_completion(engine: Engine, table: UsageTable) -> None:
    """A completion model behind a prompt template: the document first, the unfinished sentence last."""
    show_heading("LangChain: ForewordLLM completes a sentence after reading a document")
    usage = LangChainUsage(table, "ForewordLLM")
    llm = ForewordLLM(engine=engine, temperature=0, max_tokens=16, stop=["\n"], callbacks=[usage])
    prompt = PromptTemplate.from_template("{document}\n\nSummary. {beginning}")
    chain = prompt | llm
    document = (DOCUMENTS / "gettysburg_address.txt").read_text()
    for beginning in ("The speech was delivered by", "The speech was delivered on", "The cemetery lies in"):
        show(beginning, chain.invoke({"document": document, "beginning": beginning}))


def langchain_chat(engine: Engine, table: UsageTable) -> None:
    """A chat model behind a prompt that holds all documents: one call, a batch of eight, a stream."""
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{question}")])
    usage = LangChainUsage(table, "ChatForeword")
    llm = ChatForeword(engine=engine, temperature=0, max_tokens=40, callbacks=[usage])
    chain = prompt.partial(context_str="\n\n".join(read_documents())) | llm

    show_heading("LangChain: ChatForeword, one call, which reads all documents")
    question = "Who delivered the Gettysburg Address?"
    num_tokens = engine.count_tokens("\n\n".join(read_documents()))
    with prefill_progress(engine, "reading the documents", num_tokens):
        answer = chain.invoke({"question": question}).text
    show(question, answer)

    show_heading("LangChain: ChatForeword, a batch of 8")
    with tqdm(total=len(QUESTIONS), desc="answering", delay=2, leave=False, disable=None) as bar:
        answers: dict[int, str] = {}
        for index, message in chain.batch_as_completed([{"question": question} for question in QUESTIONS]):
            answers[index] = message.text
            bar.update()
    for index, question in enumerate(QUESTIONS):
        show(question, answers[index])

    show_heading("LangChain: ChatForeword, a stream")
    question = "Why did Lincoln go to Gettysburg?"
    print(f"{question}\n    ", end="")
    for chunk in chain.stream({"question": question}):
        print(chunk.text, end="", flush=True)
    print()


def llama_index_query_engine(engine: Engine, table: UsageTable) -> None:
    """A query engine that puts all documents into its prompt. As the prompt begins like LangChain's, LlamaIndex's very
    first question finds the documents computed."""
    show_heading("LlamaIndex: a query engine on the same engine")
    get_dispatcher().add_event_handler(LlamaIndexUsage(table=table))
    llm = Foreword(engine=engine, temperature=0, max_tokens=40)
    index = SummaryIndex.from_documents([Document(text=text) for text in read_documents()])
    template = LlamaIndexTemplate.from_messages([("system", SYSTEM), ("user", "{query_str}")])
    query_engine = index.as_query_engine(llm=llm, text_qa_template=template)
    for question in ("When was the Gettysburg Address delivered?", "What does the Second Amendment protect?"):
        show(question, str(query_engine.query(question)))


def read_documents() -> list[str]:
    return [file.read_text().strip() for file in sorted(DOCUMENTS.iterdir())]


class LangChainUsage(BaseCallbackHandler):
    """Writes what LangChain reports of each call to the table."""

    def __init__(self, table: UsageTable, model: str) -> None:
        self.table, self.model = table, model
        self.asked: dict[Any, str] = {}

    def on_llm_start(self, _: Any, prompts: list[str], *, run_id: Any, **__: Any) -> None:
        self.asked[run_id] = prompts[0].splitlines()[-1]

    def on_chat_model_start(self, _: Any, messages: list[list[BaseMessage]], *, run_id: Any, **__: Any) -> None:
        self.asked[run_id] = messages[0][-1].text

    def on_llm_end(self, response: LLMResult, *, run_id: Any, **_: Any) -> None:
        ((generation,),) = response.generations
        message = getattr(generation, "message", None)
        metadata = message.response_metadata if message else generation.generation_info or {}
        usage = message.usage_metadata if message else metadata["usage_metadata"]
        cached = usage["input_token_details"]["cache_read"]
        label = f"LangChain {self.model}: {self.asked.pop(run_id)}"
        add(self.table, label, usage["input_tokens"], cached, usage["output_tokens"], metadata["timing"])


class LlamaIndexUsage(BaseEventHandler):
    """Writes what LlamaIndex's events report of each call to the table."""

    table: Any

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            usage, timing = event.response.raw["usage"], event.response.raw["timing"]
            label = f"LlamaIndex Foreword: {event.messages[-1].content}"
            add(self.table, label, usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"], timing)


def add(table: UsageTable, label: str, prompt: int, cached: int, completion: int, timing: dict[str, Any]) -> None:
    first, total = timing["time_to_first_token_s"], timing["total_time_s"]
    short = label if len(label) <= 60 else label[:57] + "..."
    table.add(short, Usage(prompt, cached, completion, time_to_first_token_s=first, total_time_s=total))


def show_heading(text: str) -> None:
    print(f"\n== {text}")


def show(question: str, answer: str) -> None:
    print(f"{question}\n    {answer.strip()}")


if __name__ == "__main__":
    main()
