"""A LlamaIndex query engine on the engine: the second question pays only for what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llama_index.core import Document, Settings, SummaryIndex

from llama_index.llms.foreword import Foreword

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine, EngineStats

pytestmark = pytest.mark.usefixtures("real_engine")


@pytest.fixture
def llm(settings: Foreword, cold: Engine) -> Foreword:
    assert settings.engine is cold
    return settings


@pytest.mark.parametrize("streaming", [False, True])
def test_second_query_reuses_the_document(
    llm: Foreword, document: str, streaming: bool, spent: Callable[[], EngineStats]
) -> None:
    index = SummaryIndex.from_documents([Document(text=document)])
    ask = index.as_query_engine(response_mode="compact", streaming=streaming).query
    assert "Ada Holm" in str(ask("Who was the engineer that built the lighthouse?"))
    assert spent().tokens_reused < 20
    first = spent()
    assert str(ask("When was the lighthouse automated?"))
    reused = spent().tokens_reused - first.tokens_reused
    prompt = spent().prompt_tokens - first.prompt_tokens
    assert reused >= llm.engine.count_tokens(document)
    assert prompt - reused < 60


@pytest.mark.usefixtures("llm")
async def test_async_query(document: str, idle: Callable[[], None]) -> None:
    index = SummaryIndex.from_documents([Document(text=document)])
    response = await index.as_query_engine(response_mode="compact").aquery("Who built the lighthouse?")
    assert "Ada Holm" in str(response)
    idle()


def test_base_model_query_sends_plain_text(llm: Foreword, document: str, spent: Callable[[], EngineStats]) -> None:
    base = Foreword(engine=llm.engine, temperature=0, max_tokens=8, is_chat_model=False)
    query_engine = SummaryIndex.from_documents([Document(text=document)]).as_query_engine(llm=base)
    assert str(query_engine.query("Who built the lighthouse?"))
    assert spent().prompt_tokens > llm.engine.count_tokens(document)


def test_settings_tokenizer_is_the_models(llm: Foreword) -> None:
    assert Settings.tokenizer("The sky is blue.") == llm.engine.encode("The sky is blue.")
