"""Streams: more than one chunk, usage once, the same message as invoke, and blocks freed when one is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tracers._streaming import _StreamingCallbackHandler

from langchain_foreword import ChatForeword, ForewordLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine

QUESTION = "What is the capital of France? Answer briefly."


@pytest.fixture
def llm(engine: Engine) -> ChatForeword:
    return ChatForeword(engine=engine, temperature=0, max_tokens=12)


def _sum(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def _timeless(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name not in ("timing", "prefix_cache")}


def test_stream_yields_more_than_one_chunk(llm: ChatForeword) -> None:
    """langchain #29428."""
    chunks = list(llm.stream(QUESTION))
    assert sum(bool(chunk.text) for chunk in chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == llm.invoke(QUESTION).text


def test_only_one_chunk_carries_usage(llm: ChatForeword) -> None:
    """llama_index #19740: streaming token counts are not zero."""
    chunks = list(llm.stream(QUESTION))
    carriers = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert len(carriers) == 1
    total = _sum(chunks)
    assert total.usage_metadata == carriers[0]
    assert total.usage_metadata["output_tokens"] > 3
    assert total.response_metadata["model_name"] == llm.model
    assert total.response_metadata["finish_reason"] == "length"


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends = 0

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.ends += 1


class StreamingTokens(Tokens, _StreamingCallbackHandler):
    """Its presence makes LangChain reroute `invoke` to `_stream`."""

    def tap_output_aiter(self, run_id: Any, output: Any) -> Any:  # noqa: ARG002
        return output

    def tap_output_iter(self, run_id: Any, output: Any) -> Any:  # noqa: ARG002
        return output


async def test_invoke_rerouted_to_stream_gives_the_same_message(llm: ChatForeword) -> None:
    llm.invoke(QUESTION)  # from here on the cached counts are equal
    plain = llm.invoke(QUESTION)
    handler = StreamingTokens()
    rerouted = llm.invoke(QUESTION, {"callbacks": [handler]})
    assert len(handler.tokens) > 3
    assert handler.ends == 1
    arerouted = await llm.ainvoke(QUESTION, {"callbacks": [StreamingTokens()]})
    streaming = ChatForeword(engine=llm.engine, temperature=0, max_tokens=12, streaming=True).invoke(QUESTION)
    for other in (rerouted, arerouted, streaming):
        assert type(other) is AIMessage
        assert other.content == plain.content != ""
        assert other.usage_metadata == plain.usage_metadata
        assert other.response_metadata.keys() == plain.response_metadata.keys()
        assert _timeless(other.response_metadata) == _timeless(plain.response_metadata)


@pytest.mark.parametrize("kind", [ChatForeword, ForewordLLM])
def test_private_stream_itself_reports_new_tokens(kind: type, engine: Engine) -> None:
    """Callers of `_stream` with a run manager see every token."""

    seen: list[str] = []

    class Manager:
        def on_llm_new_token(self, token: str, chunk: Any) -> None:
            assert chunk.text == token
            seen.append(token)

    model = kind(engine=engine, temperature=0, max_tokens=6)
    prompt = "The capital of France is"
    chunks = list(model._stream(prompt if kind is ForewordLLM else [HumanMessage(prompt)], run_manager=Manager()))
    assert [chunk.text for chunk in chunks] == seen
    assert len(seen) > 3


async def test_closing_a_stream_frees_its_blocks(llm: ChatForeword, idle: Callable[[], None]) -> None:
    """langchain #11959."""
    stream = llm.stream("Count from one to a thousand.", max_tokens=2000, ignore_eos=True)
    next(stream)
    assert llm.engine.stats().running == 1
    stream.close()
    idle()
    stream = llm.astream("Count from one to a thousand.", max_tokens=2000, ignore_eos=True)
    await anext(stream)
    assert llm.engine.stats().running == 1
    await stream.aclose()
    idle()


def test_an_exception_in_the_consumer_frees_the_blocks(llm: ChatForeword, idle: Callable[[], None]) -> None:
    class Broken(BaseCallbackHandler):
        raise_error = True

        def on_llm_new_token(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"):
        for _ in llm.stream(
            "Count from one to a thousand.", {"callbacks": [Broken()]}, max_tokens=2000, ignore_eos=True
        ):
            pass
    idle()


def test_stop_across_tokens_is_equal_in_stream_and_invoke(llm: ChatForeword) -> None:
    """vllm #2577: no part of a stop string leaks."""
    free = [chunk.text for chunk in llm.stream(QUESTION)]
    stop, rest = [free[2][-1] + free[3][:2]], "".join(free)
    whole = llm.invoke(QUESTION, stop=stop)
    chunks = list(llm.stream(QUESTION, stop=stop))
    assert "".join(chunk.text for chunk in chunks) == whole.text == rest.split(stop[0])[0]
    assert _sum(chunks).response_metadata["stop_reason"] == whole.response_metadata["stop_reason"] == stop[0]


@pytest.mark.usefixtures("real_engine")
def test_no_broken_characters_mid_stream(llm: ChatForeword) -> None:
    """llama-cpp-python #372."""
    chunks = [chunk.text for chunk in llm.stream("Repeat: 日本語 😀 été", max_tokens=30)]
    assert not any("\ufffd" in chunk for chunk in chunks)
    assert not "".join(chunks).isascii()


@pytest.mark.usefixtures("real_engine")
async def test_astream_events_of_a_chain(llm: ChatForeword) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | llm | StrOutputParser()
    events = [event async for event in chain.astream_events({"question": QUESTION}, version="v2")]
    tokens = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    (end,) = [event for event in events if event["event"] == "on_chat_model_end"]
    assert "".join(tokens) == end["data"]["output"].text == "The capital of France is Paris."
    assert end["data"]["output"].usage_metadata["output_tokens"] > 3
    assert end["data"]["output"].response_metadata["finish_reason"] == "stop"


@pytest.mark.filterwarnings("ignore:.*beta.*")
async def test_usage_survives_stream_events_v3(llm: ChatForeword) -> None:
    llm.invoke(QUESTION)
    expected = llm.invoke(QUESTION)
    message = llm.stream_events(QUESTION, version="v3").output
    stream = await llm.astream_events(QUESTION, version="v3")
    amessage = await stream.output
    for other in (message, amessage):
        assert other.text == expected.text
        assert other.usage_metadata == expected.usage_metadata
        assert other.response_metadata["model_name"] == llm.model


def test_usage_reaches_the_usage_callback(llm: ChatForeword) -> None:
    with get_usage_metadata_callback() as usage:
        first = llm.invoke(QUESTION)
        list(llm.stream(QUESTION))
    counted = usage.usage_metadata[llm.model]
    assert counted["input_tokens"] == 2 * first.usage_metadata["input_tokens"]
    assert counted["output_tokens"] == 2 * first.usage_metadata["output_tokens"]


def test_one_engine_serves_stream_and_batch_at_once(llm: ChatForeword) -> None:
    """vllm #2125."""
    alone = llm.invoke(QUESTION).text
    expected = [message.text for message in llm.batch(["Say yes.", "Say no."])]
    stream = llm.stream(QUESTION)
    first = next(stream)
    assert [message.text for message in llm.batch(["Say yes.", "Say no."])] == expected
    assert first.text + "".join(chunk.text for chunk in stream) == alone


async def test_chain_streams_sync_and_async(llm: ChatForeword) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | llm | StrOutputParser()
    pieces = list(chain.stream({"question": QUESTION}))
    apieces = [piece async for piece in chain.astream({"question": QUESTION})]
    assert pieces == apieces
    assert "".join(pieces) == chain.invoke({"question": QUESTION})
    assert sum(bool(piece) for piece in pieces) > 3


async def test_llm_streams(engine: Engine) -> None:
    llm = ForewordLLM(engine=engine, temperature=0, max_tokens=6)
    pieces = list(llm.stream("The capital of France is"))
    assert [piece async for piece in llm.astream("The capital of France is")] == pieces
    assert "".join(pieces) == llm.invoke("The capital of France is")
    assert len(pieces) > 3


def test_several_answers_cannot_be_streamed(llm: ChatForeword) -> None:
    result = llm.generate([[HumanMessage(QUESTION)]], n=2, callbacks=[StreamingTokens()])
    assert len(result.generations[0]) == 2
    (whole,) = list(llm.stream(QUESTION, n=2))  # not a stream of mixed answers
    assert whole.text == llm.invoke(QUESTION).text
    with pytest.raises(ValueError, match="n=2"):
        list(ForewordLLM(engine=llm.engine, n=2).stream("x"))
