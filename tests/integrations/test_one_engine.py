"""LangChain and LlamaIndex in one process: one engine, one set of weights, one cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from llama_index.core.llms import ChatMessage

from langchain_foreword import ChatForeword, ForewordLLM
from llama_index.llms.foreword import Foreword

if TYPE_CHECKING:
    from foreword import Engine

pytestmark = pytest.mark.usefixtures("real_engine")  # which is what an adapter without options asks for


def test_all_adapters_find_the_shared_engine(engine: Engine) -> None:
    models = ChatForeword(), ForewordLLM(temperature=0), Foreword(), ChatForeword(engine=engine)
    assert all(model.get_engine() is engine for model in models)
    for model in models:
        model.close()
    assert not engine.closed  # the fixture still uses it


def test_what_one_adapter_computed_the_others_reuse(cold: Engine, document: str) -> None:
    chat = ChatForeword(engine=cold, temperature=0, max_tokens=4)
    other = ChatForeword(temperature=0.5, max_tokens=4, seed=1)
    index = Foreword(engine=cold, temperature=0, max_tokens=4)
    system = f"Answer from this text.\n\n{document}"
    first = chat.invoke([SystemMessage(system), HumanMessage("Who built it?")])
    shared = cold.count_tokens(system)
    assert first.usage_metadata["input_token_details"]["cache_read"] == 0
    second = other.invoke([SystemMessage(system), HumanMessage("How tall is it?")])
    assert second.usage_metadata["input_token_details"]["cache_read"] >= shared
    messages = [ChatMessage(role="system", content=system), ChatMessage(role="user", content="When was it built?")]
    third = index.chat(messages)
    assert third.raw["usage"]["cached_tokens"] >= shared
    assert third.raw["usage"]["prompt_tokens"] - third.raw["usage"]["cached_tokens"] < 40
    other.close()


def test_both_ecosystems_give_the_same_answer_and_token_counts(engine: Engine) -> None:
    question = "What is the capital of France? Answer briefly."
    message = ChatForeword(engine=engine, temperature=0, max_tokens=16).invoke(question)
    response = Foreword(engine=engine, temperature=0, max_tokens=16).complete(question)
    assert message.text == response.text
    assert "Paris" in message.text
    assert message.usage_metadata["input_tokens"] == response.raw["usage"]["prompt_tokens"]
