"""A LangChain chain that answers from retrieved passages, streamed; it needs no package besides langchain-core.

    python examples/rag_chain.py [model]

A prompt is reused as far as it begins like an earlier one. A retriever gives passages in the order of their scores,
another one for each question. Here they are put in the order of the documents, before the question, so that questions
with the same passages share all of their prompt but the question.
"""

import math
import re
import sys
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

from langchain_foreword import ChatForeword

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = [
    "In which amendment is the right to a speedy and public trial?",
    "What is said about the trial by jury?",
    "Which president delivered the Gettysburg Address?",
    "In which year was the Gettysburg Address delivered?",
]


class KeywordRetriever(BaseRetriever):
    """Finds the passages that share the rarest words with a question, the best one first."""

    passages: list[Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        texts = [words(passage.page_content) for passage in self.passages]
        rarity = {word: math.log(len(texts) / sum(word in text for text in texts)) for text in texts for word in text}
        scores = [sum(rarity[word] for word in words(query) & text) / math.sqrt(len(text)) for text in texts]
        best = sorted(range(len(texts)), key=lambda number: -scores[number])[: self.k]
        return [self.passages[number] for number in best]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def read_passages() -> list[Document]:
    """The documents, the Bill of Rights taken apart into its amendments, each with its place in the order."""
    files = sorted(DOCUMENTS.glob("*.txt"))
    texts = [text for file in files for text in re.split(r"\n\n(?=Amendment )", file.read_text().strip())]
    return [Document(text, metadata={"place": place}) for place, text in enumerate(texts)]


def context(found: list[Document]) -> str:
    """The passages as one text, in an order that does not depend on the question."""
    return "\n\n".join(each.page_content for each in sorted(found, key=lambda each: each.metadata["place"]))


def main(model: str = "smollm2-135m") -> None:
    # The default model has 135 M parameters; a larger one, given by name, writes better answers.
    llm = ChatForeword(model=model, temperature=0, max_tokens=40)
    retriever = KeywordRetriever(passages=read_passages())
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer in one short sentence, using only these passages.\n\n{context}"), ("human", "{question}")]
    )
    chain = prompt | llm
    for question in QUESTIONS:
        found = retriever.invoke(question)
        titles = [passage.page_content.splitlines()[0] for passage in found]
        print(f"\n{question}\n  found:  {', '.join(titles)}\n  answer: ", end="", flush=True)
        answer = AIMessageChunk("")
        for chunk in chain.stream({"context": context(found), "question": question}):
            print(chunk.text, end="", flush=True)
            answer += chunk
        usage = answer.usage_metadata
        assert usage is not None  # it comes with the last chunk
        print(f"\n  [{usage['input_token_details']['cache_read']} of {usage['input_tokens']} prompt tokens reused]")


if __name__ == "__main__":
    main(*sys.argv[1:])
