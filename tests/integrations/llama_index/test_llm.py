"""The eight methods, their options, usage and events."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatInProgressEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionInProgressEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM

from foreword import SamplingParams
from llama_index.llms.foreword import Foreword

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from foreword import Engine, EngineStats

QUESTION = "What is the capital of France? Answer briefly."
ANSWER = "The capital of France is Paris."
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


@pytest.mark.usefixtures("real_engine")
async def test_all_eight_methods_agree(llm: Foreword) -> None:
    """llama_index #9477: stream_chat works, and so do the others."""
    texts = [
        llm.complete(QUESTION).text,
        (await llm.acomplete(QUESTION)).text,
        llm.chat(MESSAGES).message.content,
        (await llm.achat(MESSAGES)).message.content,
    ]
    assert texts == [ANSWER] * 4
    generated = llm.complete(QUESTION).raw["usage"]["completion_tokens"]
    completions = list(llm.stream_complete(QUESTION)), [r async for r in await llm.astream_complete(QUESTION)]
    chats = list(llm.stream_chat(MESSAGES)), [r async for r in await llm.astream_chat(MESSAGES)]
    for responses, final in (
        *((each, each[-1].text) for each in completions),
        *((each, each[-1].message.content) for each in chats),
    ):
        assert final == "".join(response.delta for response in responses) == ANSWER
        assert len(responses) > 3
        assert [response.raw is not None for response in responses] == [False] * (len(responses) - 1) + [True]
        assert responses[-1].raw["usage"]["completion_tokens"] == generated


@pytest.mark.usefixtures("real_engine")
def test_usage(cold: Engine) -> None:
    llm = Foreword(engine=cold, temperature=0, max_tokens=12)
    first, second = llm.complete(QUESTION).raw, llm.chat(MESSAGES).raw
    prompt = cold.count_tokens([{"role": "user", "content": QUESTION}])
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == prompt
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] == prompt - 1
    assert second["usage"]["total_tokens"] == prompt + second["usage"]["completion_tokens"]
    found = second["prefix_cache"]
    assert (found["prompt_tokens"], found["cached_tokens"], found["reason"]) == (prompt, prompt - 1, "complete")
    assert (second["model"], second["finish_reason"]) == ("smollm2-135m", "stop")
    assert 0 < second["timing"]["time_to_first_token_s"] <= second["timing"]["total_time_s"]


async def test_token_counting_handler_reads_the_counts(engine: Engine) -> None:
    """llama_index #19740: also while streaming."""
    counter = TokenCountingHandler(tokenizer=engine.encode)
    llm = Foreword(engine=engine, temperature=0, max_tokens=12, callback_manager=CallbackManager([counter]))
    usage = llm.complete(QUESTION).raw["usage"]
    list(llm.stream_complete(QUESTION))
    llm.chat(MESSAGES)
    list(llm.stream_chat(MESSAGES))
    await llm.achat(MESSAGES)
    _ = [response async for response in await llm.astream_chat(MESSAGES)]
    assert counter.prompt_llm_token_count == 6 * usage["prompt_tokens"]
    assert counter.completion_llm_token_count == 6 * usage["completion_tokens"]


def test_metadata(llm: Foreword) -> None:
    metadata = llm.metadata
    assert isinstance(llm, FunctionCallingLLM)
    assert (metadata.context_window, metadata.num_output) == (8192, 12)
    assert (metadata.model_name, metadata.system_role) == (llm.engine.model, MessageRole.SYSTEM)
    assert metadata.is_chat_model
    assert metadata.is_function_calling_model
    assert llm.class_name() == "Foreword"
    assert not Foreword(engine=llm.engine, is_chat_model=False).metadata.is_chat_model


def test_complete_uses_the_chat_template_unless_told_otherwise(llm: Foreword) -> None:
    prompt = "The capital of Italy is"
    templated = llm.complete(prompt).raw["usage"]["prompt_tokens"]
    assert templated == llm.engine.count_tokens([{"role": "user", "content": prompt}])
    plain = llm.engine.count_tokens(prompt)
    base = Foreword(engine=llm.engine, is_chat_model=False, max_tokens=2)
    own = Foreword(engine=llm.engine, completion_to_prompt=lambda text: f"{text} ", max_tokens=2)
    assert llm.complete(prompt, formatted=True).raw["usage"]["prompt_tokens"] == plain
    assert base.complete(prompt).raw["usage"]["prompt_tokens"] == plain
    assert own.complete(prompt).raw["usage"]["prompt_tokens"] == llm.engine.count_tokens(f"{prompt} ")
    written = Foreword(engine=llm.engine, messages_to_prompt=lambda messages: messages[0].content, max_tokens=2)
    assert written.chat(MESSAGES).raw["usage"]["prompt_tokens"] == llm.engine.count_tokens(QUESTION)
    system = Foreword(engine=llm.engine, system_prompt="Be brief.", max_tokens=2)
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    assert system.complete(prompt).raw["usage"]["prompt_tokens"] == llm.engine.count_tokens(expected)
    as_given = llm.engine.count_tokens([{"role": "user", "content": QUESTION}])
    assert system.chat(MESSAGES).raw["usage"]["prompt_tokens"] == as_given


# -- options ---------------------------------------------------------------------------------------------------


def test_every_sampling_option_but_n_is_a_field() -> None:
    llm = Foreword(temperature=1.0)
    assert {field.name for field in dataclasses.fields(SamplingParams)} - set(Foreword.model_fields) == {"n"}
    assert llm._sampling({}) == SamplingParams()


def test_unknown_and_wrong_options_raise(llm: Foreword) -> None:
    with pytest.raises(ValueError, match="temprature"):
        Foreword(temprature=0.5)
    with pytest.raises(ValueError, match="top_p"):
        Foreword(top_p=2)
    with pytest.raises(ValueError, match="block_sise"):
        Foreword(engine_options={"block_sise": 8})
    with pytest.raises(ValueError, match="contradicts"):
        Foreword(engine=llm.engine, model="other")
    for call in (llm.complete, llm.stream_complete):
        with pytest.raises(ValueError, match="temprature"):
            call(QUESTION, temprature=0.5)
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(ValueError, match="n is not available"):
            call(MESSAGES, n=2)
        with pytest.raises(ValueError, match="temperature=-1"):
            call(MESSAGES, temperature=-1)


@pytest.mark.usefixtures("real_engine")
def test_constructor_stop_is_honoured_and_a_calls_stop_replaces_it(engine: Engine) -> None:
    llm = Foreword(engine=engine, temperature=0, max_tokens=12, stop=["France is"])
    assert llm.complete(QUESTION).text == "The capital of "
    assert "".join(response.delta for response in llm.stream_complete(QUESTION)) == "The capital of "
    assert llm.chat(MESSAGES, stop=["capital"]).message.content == "The "
    assert llm.complete(QUESTION, stop=[]).text == ANSWER
    assert llm.complete(QUESTION, stop=[], max_tokens=2).raw["usage"]["completion_tokens"] == 2


@pytest.mark.usefixtures("real_engine")  # a token of random ones may be part of a character
def test_logprobs(llm: Foreword) -> None:
    response = llm.complete(QUESTION, logprobs=2)
    assert len(response.logprobs) == response.raw["usage"]["completion_tokens"]
    assert "".join(token[0].token for token in response.logprobs) == ANSWER
    assert all(token[0].logprob >= token[1].logprob for token in response.logprobs)
    pieces = [piece for each in llm.stream_complete(QUESTION, logprobs=2) for piece in each.logprobs]
    assert pieces == response.logprobs


# -- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", ["SSUUAAU", "AU", "UA", "S", "UST", "UAT"])
def test_no_order_of_roles_raises(llm: Foreword, roles: str) -> None:
    """langchain #16992, langchain #15232."""
    names = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
    response = llm.chat([ChatMessage(role=names[role], content="Hello.") for role in roles], max_tokens=2)
    assert response.raw["usage"]["completion_tokens"] >= 1


def test_tool_turns_reach_the_prompt_as_text(llm: Foreword) -> None:
    from llama_index.core.base.llms.types import ToolCallBlock

    call = ToolCallBlock(tool_call_id="call-1", tool_name="add", tool_kwargs={"a": 1})
    legacy = {"id": "call-1", "function": {"name": "add", "arguments": {"a": 1}}}
    result = ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": "call-1", "name": "add"})
    without = llm.chat([*MESSAGES, result], max_tokens=2).raw["usage"]["prompt_tokens"]
    for turn in (
        ChatMessage(role="assistant", blocks=[call]),
        ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [legacy]}),
    ):
        usage = llm.chat([*MESSAGES, turn, result], max_tokens=2).raw["usage"]
        assert usage["prompt_tokens"] - without > len(llm.engine.encode('{"name": "add", "arguments": {"a": 1}}'))


def test_other_content_blocks_raise_and_are_named(llm: Foreword) -> None:
    message = ChatMessage(role="user", blocks=[TextBlock(text="What is this?"), ImageBlock(image=b"x")])
    with pytest.raises(ValueError, match=r"messages\[0\] \(user\).*'image'"):
        llm.chat([message])


def test_over_length_prompt_raises_a_clear_error(llm: Foreword) -> None:
    """llama_index #17496."""
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens.*max_model_len=8192"):
        llm.complete("word " * 9000)


# -- async and cancellation ------------------------------------------------------------------------------------


async def _running(engine: Engine) -> None:
    while engine.stats().running == 0:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("method", ["acomplete", "achat", "astream_chat", "astream_complete"])
async def test_cancelled_calls_free_their_blocks(engine: Engine, idle: Callable[[], None], method: str) -> None:
    llm = Foreword(engine=engine, temperature=0, max_tokens=2000, ignore_eos=True)

    async def call() -> None:
        response = await getattr(llm, method)(MESSAGES if "chat" in method else QUESTION)
        async for _ in response:
            pass

    task = asyncio.create_task(call())
    await _running(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    idle()


async def test_closing_a_stream_frees_its_blocks(engine: Engine, idle: Callable[[], None]) -> None:
    """langchain #11959."""
    llm = Foreword(engine=engine, temperature=0, max_tokens=2000, ignore_eos=True)
    stream = llm.stream_chat(MESSAGES)
    next(stream)
    assert engine.stats().running == 1
    stream.close()
    idle()
    astream = await llm.astream_chat(MESSAGES)
    await anext(astream)
    assert engine.stats().running == 1
    await astream.aclose()
    while engine.stats().running:  # LlamaIndex's wrapper leaves our generator to the event loop's finaliser
        await asyncio.sleep(0.01)
    idle()


async def test_concurrent_calls_are_one_batch(
    engine: Engine, together: Callable[[int], None], spent: Callable[[], EngineStats]
) -> None:
    llm = Foreword(engine=engine, temperature=0, max_tokens=6, ignore_eos=True)
    together(8)
    responses = await asyncio.gather(*[llm.acomplete(f"Say {number}.") for number in range(8)])
    assert len(responses) == 8
    assert spent().tokens_generated == 8 * 6
    assert spent().steps <= 6 + 8  # one after the other it is 48


def test_threads_give_the_serial_results(engine: Engine) -> None:
    """llama-cpp-python #1367."""
    llm = Foreword(engine=engine, temperature=0, max_tokens=8)
    questions = [f"What is the capital of {country}?" for country in ("Spain", "Egypt", "Peru", "Italy")] * 8
    alone = {question: llm.complete(question).text for question in questions[:4]}
    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda question: llm.complete(question).text, questions))
    assert texts == [alone[question] for question in questions]


# -- events, copies and the engine -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_instrumentation_events(llm: Foreword, events: list[Any], kind: str) -> None:
    asked = MESSAGES if kind == "chat" else QUESTION
    start, progress, end = {
        "chat": (LLMChatStartEvent, LLMChatInProgressEvent, LLMChatEndEvent),
        "complete": (LLMCompletionStartEvent, LLMCompletionInProgressEvent, LLMCompletionEndEvent),
    }[kind]
    answer = llm.complete(QUESTION).text
    assert answer
    events.clear()
    for name in (kind, f"a{kind}", f"stream_{kind}", f"astream_{kind}"):
        response = getattr(llm, name)(asked, seed=3)
        response = await response if name.startswith("a") else response
        responses = [each async for each in response] if name.startswith("astream") else response
        pieces = list(responses) if "stream" in name else []
        kinds = [type(event) for event in events]
        assert kinds == [start, *[progress] * len(pieces), end]
        assert events[0].model_dict["model_name"] == llm.engine.model
        assert events[0].model_dict["temperature"] == 0
        assert events[0].additional_kwargs == {"seed": 3}
        final = events[-1].response
        assert (final.message.content if kind == "chat" else final.text) == answer
        assert final.raw["usage"]["completion_tokens"] > 0
        events.clear()


def test_engine_stays_out_of_serialisation_and_repr(llm: Foreword) -> None:
    assert "Engine(" not in repr(llm)
    assert "engine" not in llm.to_dict()
    assert copy.deepcopy(llm).get_engine() is llm.engine
    again = Foreword.from_dict(llm.to_dict())
    assert (again.model, again.max_tokens, again.engine) == (llm.engine.model, 12, None)
    shared = pickle.loads(pickle.dumps(Foreword(temperature=0.25)))
    assert shared.temperature == 0.25


def test_close_gives_the_engine_back_and_it_can_be_rebuilt(chat_dir: Path) -> None:
    """llama_index #12492."""
    options = {"max_model_len": 512, "kv_cache_memory": "32MiB"}
    llm = Foreword(model=str(chat_dir), temperature=0, max_tokens=4, engine_options=options)
    text = llm.complete(QUESTION).text
    first = llm.get_engine()
    assert llm.metadata.context_window == 512
    llm.close()
    assert first.closed
    assert llm.complete(QUESTION).text == text
    second = llm.get_engine()
    llm.close()
    assert second.closed
    assert second is not first
