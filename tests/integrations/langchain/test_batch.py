"""A batch is one batch of the engine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from langchain_foreword import ChatForeword, ForewordLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine, EngineStats

COUNTRIES = ("France", "Spain", "Italy", "Japan", "China", "Egypt", "Peru", "Chile")
QUESTIONS = [f"What is the capital of {country}?" for country in COUNTRIES]
TOKENS = 12
ONE_BATCH = TOKENS + 8  # steps: the tokens, and a few for prompts; two rounds take 24


@pytest.fixture
def llm(engine: Engine) -> ChatForeword:
    return ChatForeword(engine=engine, temperature=0, max_tokens=TOKENS, ignore_eos=True)


def test_batch_of_eight_runs_as_one_continuous_batch(
    llm: ChatForeword, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    together(8)
    answers = llm.batch(QUESTIONS)
    assert spent().tokens_generated == 8 * TOKENS
    assert spent().steps <= ONE_BATCH
    assert [answer.text for answer in answers[::3]] == [llm.invoke(question).text for question in QUESTIONS[::3]]


async def test_abatch_of_eight_runs_as_one_continuous_batch(
    llm: ChatForeword, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    together(8)
    answers = await llm.abatch(QUESTIONS)
    assert len({answer.text for answer in answers}) > 4
    assert spent().tokens_generated == 8 * TOKENS
    assert spent().steps <= ONE_BATCH


def test_generate_runs_as_one_continuous_batch(
    llm: ChatForeword, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    together(8)
    result = llm.generate([[HumanMessage(question)] for question in QUESTIONS])
    assert spent().steps <= ONE_BATCH
    assert len(result.generations) == 8
    assert result.generations[3][0].text == llm.invoke(QUESTIONS[3]).text
    assert len({run.run_id for run in result.run}) == 8


def test_batch_as_completed_runs_as_one_batch(
    llm: ChatForeword, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    together(8)
    found = dict(llm.batch_as_completed(QUESTIONS))
    assert spent().steps <= ONE_BATCH
    assert sorted(found) == list(range(8))


def test_second_batch_reuses_the_prefix(cold: Engine, document: str, spent: Callable[[], EngineStats]) -> None:
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=2)
    shared = cold.count_tokens(document)
    ask = [[SystemMessage(document), HumanMessage(question)] for question in ("Who?", "When?", "Where?", "Why?")]
    llm.batch(ask)
    computed = spent().tokens_prefilled
    answers = llm.batch([[SystemMessage(document), HumanMessage(f"{turn[1].text} Tell me.")] for turn in ask])
    assert all(answer.usage_metadata["input_token_details"]["cache_read"] >= shared for answer in answers)
    assert spent().tokens_prefilled - computed < 4 * 40


def test_cold_batch_computes_the_shared_prefix_once(
    cold: Engine, document: str, spent: Callable[[], EngineStats]
) -> None:
    llm = ChatForeword(engine=cold, temperature=0, max_tokens=2)
    llm.batch([[SystemMessage(document), HumanMessage(question)] for question in QUESTIONS])
    assert spent().tokens_prefilled < cold.count_tokens(document) + 8 * 40


class Peak(BaseCallbackHandler):
    """The most runs that were open at once."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.lock = threading.Lock()

    def on_chat_model_start(self, *_: object, **__: object) -> None:
        with self.lock:
            self.open += 1
            self.most = max(self.most, self.open)

    def on_llm_start(self, *_: object, **__: object) -> None:
        self.on_chat_model_start()

    def on_llm_end(self, *_: object, **__: object) -> None:
        with self.lock:
            self.open -= 1


def test_max_concurrency_is_honoured(llm: ChatForeword, together: Callable[[int], None]) -> None:
    peak = Peak()
    together(2)
    llm.batch(QUESTIONS, {"max_concurrency": 2, "callbacks": [peak]}, max_tokens=2)
    assert peak.most == 2
    together(8)
    llm.batch(QUESTIONS, {"callbacks": [peak]}, max_tokens=2)
    assert peak.most == 8  # not just the handful that LangChain's own batch runs at once


async def test_abatch_max_concurrency_is_honoured(llm: ChatForeword, together: Callable[[int], None]) -> None:
    peak = Peak()
    together(3)
    await llm.abatch(QUESTIONS, {"max_concurrency": 3, "callbacks": [peak]}, max_tokens=2)
    assert peak.most == 3


@pytest.mark.parametrize("kind", [ChatForeword, ForewordLLM])
async def test_return_exceptions_works_per_item(kind: type, engine: Engine) -> None:
    llm = kind(engine=engine, temperature=0, max_tokens=4)
    too_long = "word " * engine.max_model_len
    for results in (
        llm.batch(["The sky is", too_long, "The sea is"], return_exceptions=True),
        await llm.abatch(["The sky is", too_long, "The sea is"], return_exceptions=True),
    ):
        assert isinstance(results[1], ValueError)
        assert not isinstance(results[0], Exception)
        assert results[0] == llm.invoke("The sky is") or results[0].text == llm.invoke("The sky is").text
        assert not isinstance(results[2], Exception)
    with pytest.raises(ValueError, match="max_model_len"):
        llm.batch(["The sky is", too_long])


def test_llm_batch_runs_as_one_batch(engine: Engine, spent: Callable[[], EngineStats]) -> None:
    llm = ForewordLLM(engine=engine, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [f"The capital of {name} is" for name in ("France", "Japan", "Egypt", "Peru")]
    texts = llm.batch(prompts)
    assert spent().steps == TOKENS  # submitted in one piece
    assert texts[1:] == [llm.invoke(prompt) for prompt in prompts[1:]]
    assert llm.batch(["The capital of France is"] * 3, {"max_concurrency": 2}) == [texts[0]] * 3


def test_chain_batch_reaches_the_engine_as_one_batch(
    llm: ChatForeword, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    together(8)
    prompt = ChatPromptTemplate.from_messages([("system", "Answer briefly."), ("human", "{question}")])
    chain = prompt | llm | StrOutputParser()
    texts = chain.batch([{"question": question} for question in QUESTIONS])
    assert len(texts) == 8
    assert spent().steps <= ONE_BATCH


def test_many_threads_give_the_serial_results(llm: ChatForeword) -> None:
    """llama-cpp-python #1367: 32 concurrent threads."""
    with ThreadPoolExecutor(32) as pool:
        together = [
            message.text for message in pool.map(lambda prompt: llm.invoke(prompt, max_tokens=6), QUESTIONS * 4)
        ]
    assert together == [llm.invoke(question, max_tokens=6).text for question in QUESTIONS] * 4
    assert len(set(together)) > len(QUESTIONS) // 2


def test_empty_batch(llm: ChatForeword) -> None:
    assert llm.batch([]) == []
    assert list(llm.batch_as_completed([])) == []
