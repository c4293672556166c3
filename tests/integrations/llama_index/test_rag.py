"""Indices over real documents with a real embedding model: every way of answering, chatting and judging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest
from llama_index.core import Document, VectorStoreIndex, get_response_synthesizer
from llama_index.core.evaluation import FaithfulnessEvaluator
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent, LLMCompletionStartEvent
from llama_index.core.node_parser import SentenceSplitter
from pydantic import BaseModel, Field

from llama_index.llms.foreword import Foreword

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index.core.embeddings import BaseEmbedding

    from foreword import Engine, EngineStats

QUESTION = "What does the First Amendment protect?"


class Amendment(BaseModel):
    """An amendment to the constitution."""

    number: int = Field(ge=1, le=10)
    subject: Literal["speech", "arms", "trial"]
    summary: str = Field(max_length=40)


@pytest.fixture(scope="module")
def index(embed_model: BaseEmbedding, documents: list[Document], tiny_engine: Engine) -> VectorStoreIndex:
    splitter = SentenceSplitter(chunk_size=160, chunk_overlap=16, tokenizer=tiny_engine.encode)
    return VectorStoreIndex.from_documents(documents, embed_model=embed_model, transformations=[splitter])


def test_the_embedding_finds_the_document(index: VectorStoreIndex) -> None:
    for question, name in (
        (QUESTION, "bill_of_rights"),
        ("What did Lincoln say about the dead of the battle?", "gettysburg_address"),
        ("Is explicit better than implicit in Python?", "zen_of_python"),
    ):
        best = index.as_retriever(similarity_top_k=1).retrieve(question)[0]
        assert best.metadata["name"] == name


@pytest.mark.parametrize(("mode", "calls"), [("compact", 1), ("refine", 2), ("tree_summarize", 1), ("accumulate", 2)])
async def test_query_modes(
    settings: Foreword, index: VectorStoreIndex, events: list[Any], idle: Callable[[], None], mode: str, calls: int
) -> None:
    query_engine = index.as_query_engine(llm=settings, similarity_top_k=2, response_mode=mode)
    response = query_engine.query(QUESTION)
    assert str(response)
    assert len(response.source_nodes) == 2
    ends = [event for event in events if isinstance(event, LLMChatEndEvent)]
    assert len(ends) == calls
    prompt = "".join(message.content for event in ends for message in event.messages)
    assert all(node.get_content() in prompt for node in response.source_nodes)
    assert str(await query_engine.aquery(QUESTION)) == str(response)
    idle()


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
async def test_streamed_queries_give_the_same_text(settings: Foreword, index: VectorStoreIndex, mode: str) -> None:
    options: dict[str, Any] = {"llm": settings, "similarity_top_k": 2, "response_mode": mode}
    whole = str(index.as_query_engine(**options).query(QUESTION))
    query_engine = index.as_query_engine(**options, streaming=True)
    tokens = list(query_engine.query(QUESTION).response_gen)
    assert len(tokens) > 3
    assert "".join(tokens) == whole
    response = await query_engine.aquery(QUESTION)
    assert "".join([token async for token in response.async_response_gen()]) == whole


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "accumulate"])
async def test_queries_with_an_output_class(settings: Foreword, index: VectorStoreIndex, mode: str) -> None:
    options: dict[str, Any] = {"llm": Foreword(engine=settings.engine, temperature=0, max_tokens=64)}
    query_engine = index.as_query_engine(**options, similarity_top_k=2, response_mode=mode, output_cls=Amendment)
    for response in (query_engine.query(QUESTION), await query_engine.aquery(QUESTION)):
        if mode == "accumulate":
            assert str(response).count("summary=") == 2
        else:
            assert isinstance(response.response, Amendment)


def test_refine_may_filter_answers_through_a_tool(
    settings: Foreword, index: VectorStoreIndex, events: list[Any], brief: dict[str, Any]
) -> None:
    llm = Foreword(engine=settings.engine, **brief)
    answer = get_response_synthesizer(llm=llm, response_mode="refine", structured_answer_filtering=True)
    assert str(answer.synthesize(QUESTION, index.as_retriever(similarity_top_k=2).retrieve(QUESTION)))
    started = [event for event in events if isinstance(event, LLMChatStartEvent)]
    names = {tool["function"]["name"] for event in started for tool in event.additional_kwargs["tools"]}
    assert names == {"StructuredRefineResponse"}


def test_a_structured_llm_answers_queries(settings: Foreword, index: VectorStoreIndex) -> None:
    llm = Foreword(engine=settings.engine, temperature=0, max_tokens=64).as_structured_llm(Amendment)
    response = index.as_query_engine(llm=llm).query(QUESTION)
    assert isinstance(response.response, Amendment)


def test_chunks_that_are_answered_at_the_same_time_are_one_batch(
    settings: Foreword, index: VectorStoreIndex, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    together(4)
    llm = Foreword(engine=settings.engine, temperature=0, max_tokens=16, ignore_eos=True)
    options: dict[str, Any] = {"llm": llm, "response_mode": "accumulate", "similarity_top_k": 4}
    response = index.as_query_engine(**options, use_async=True).query(QUESTION)
    assert str(response).count("Response ") == 4
    assert spent().tokens_generated == 4 * 16
    assert spent().steps < 2 * 16  # one after the other it is at least 64


def test_a_second_question_reuses_the_retrieved_text(
    cold: Engine, settings: Foreword, index: VectorStoreIndex, spent: Callable[[], EngineStats]
) -> None:
    query_engine = index.as_query_engine(llm=settings, similarity_top_k=2)
    first = query_engine.query(QUESTION)
    before = spent()
    second = query_engine.query("What does the First Amendment protect, and what the Second?")
    shared = [node.get_content() for node in first.source_nodes]
    assert [node.get_content() for node in second.source_nodes] == shared
    assert spent().tokens_reused - before.tokens_reused >= cold.count_tokens("".join(shared))


async def test_chat_engine(settings: Foreword, index: VectorStoreIndex, events: list[Any]) -> None:
    def asked() -> list[type]:
        kinds = [type(event) for event in events if isinstance(event, (LLMChatStartEvent, LLMCompletionStartEvent))]
        events.clear()
        return kinds

    chat = index.as_chat_engine(chat_mode="condense_plus_context", llm=settings, similarity_top_k=1)
    assert str(chat.chat(QUESTION))
    assert asked() == [LLMChatStartEvent]
    assert str(await chat.achat("And the second one?"))
    assert asked() == [LLMCompletionStartEvent, LLMChatStartEvent]  # the question is condensed first
    tokens = list(chat.stream_chat("And the third one?").response_gen)
    assert len(tokens) > 1
    assert [message.role.value for message in chat.chat_history] == ["user", "assistant"] * 3
    assert chat.chat_history[-1].content == "".join(tokens).strip()


async def test_faithfulness(settings: Foreword, index: VectorStoreIndex) -> None:
    response = index.as_query_engine(llm=settings, similarity_top_k=1).query(QUESTION)
    judge = Foreword(engine=settings.engine, temperature=0, structured={"choices": ["YES", "NO"]})
    result = await FaithfulnessEvaluator(llm=judge).aevaluate_response(query=QUESTION, response=response)
    assert result.feedback in ("YES", "NO")
    assert result.passing == (result.feedback == "YES")
    assert result.contexts == [node.get_content() for node in response.source_nodes]
