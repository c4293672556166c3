"""Cache salts and cache events (vllm #16016)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda

from langchain_foreword import ChatForeword, ForewordLLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from foreword import Engine

PROMPT = [SystemMessage("You answer in one short sentence. " * 8), HumanMessage("Which city is the capital of Peru?")]


KINDS = pytest.mark.parametrize("kind", [ChatForeword, ForewordLLM])


def _salted(salt: str | None) -> Any:
    return {"configurable": {"cache_salt": salt}}


def _read(message: Any) -> int:
    return message.usage_metadata["input_token_details"]["cache_read"]


@pytest.fixture
def chat(cold: Engine) -> ChatForeword:
    return ChatForeword(engine=cold, temperature=0, max_tokens=2)


def test_salts_isolate_and_the_same_salt_hits(chat: ChatForeword) -> None:
    """vllm #16016."""
    prompt = chat.get_num_tokens_from_messages(PROMPT)
    answers = [chat.invoke(PROMPT, cache_salt=salt) for salt in ("red", "blue", "red", "blue")]
    assert [_read(answer) for answer in answers] == [0, 0, prompt - 1, prompt - 1]
    assert len({answer.text for answer in answers}) == 1
    assert [_read(chat.invoke(PROMPT)) for _ in range(2)] == [0, prompt - 1]  # no salt is a salt too
    field = ChatForeword(engine=chat.engine, temperature=0, max_tokens=2, cache_salt="red")
    assert _read(field.invoke(PROMPT)) == prompt - 1
    with pytest.raises(ValueError, match="cache_salt"):
        chat.invoke(PROMPT, cache_salt=7)


async def test_salt_from_the_config_reaches_every_kind_of_call(chat: ChatForeword) -> None:
    hit = chat.get_num_tokens_from_messages(PROMPT) - 1

    async def streamed(config: Any) -> Any:
        return [chunk async for chunk in chat.astream(PROMPT, config)][-1]

    async def events(config: Any) -> Any:
        return await (await chat.astream_events(PROMPT, config, version="v3")).output

    async def old_events(config: Any) -> Any:
        found = [event async for event in chat.astream_events(PROMPT, config, version="v2")]
        return found[-1]["data"]["output"]

    async def now(value: Any) -> Any:
        return value

    calls: list[Callable[[Any], Any]] = [
        lambda config: chat.ainvoke(PROMPT, config),
        lambda config: now(chat.invoke(PROMPT, config)),
        lambda config: now(list(chat.stream(PROMPT, config))[-1]),
        lambda config: now(chat.batch([PROMPT], config)[0]),
        lambda config: now(chat.stream_events(PROMPT, config, version="v3").output),
        lambda config: now(chat.bind(stop=["x"]).with_config(tags=["a"]).invoke(PROMPT, config)),
        streamed,
        events,
        old_events,
    ]
    for number, call in enumerate(calls):
        assert _read(await call(_salted(f"tenant {number}"))) == 0
        assert _read(await call(_salted(f"tenant {number}"))) == hit


async def test_salt_reaches_models_inside_chains_agents_and_functions(chat: ChatForeword) -> None:
    system, question = PROMPT
    chain = ChatPromptTemplate.from_messages([system, ("human", "{question}")]) | chat
    agent = create_agent(chat, [], system_prompt=system.content)

    def ask(_: Any) -> Any:
        return chat.invoke(PROMPT)  # without a config of its own

    async def aask(_: Any) -> Any:
        return chat.generate([PROMPT]).generations[0][0].message

    programs: list[Callable[[Any], Any]] = [
        lambda config: chain.ainvoke({"question": question.content}, config),
        lambda config: RunnableLambda(ask, afunc=aask).ainvoke(None, config),
        lambda config: agent.ainvoke({"messages": [question]}, config),
    ]
    for number, program in enumerate(programs):
        found = [await program(_salted(f"tenant {number}")) for _ in range(2)]
        first, second = (each["messages"][-1] if isinstance(each, dict) else each for each in found)
        assert (_read(first), _read(second) > 50) == (0, True)


def test_members_of_a_batch_have_their_own_salts(cold: Engine, chat: ChatForeword) -> None:
    hit = chat.get_num_tokens_from_messages(PROMPT) - 1
    chat.invoke(PROMPT, _salted("red"))
    red, blue = chat.batch([PROMPT] * 2, [_salted("red"), _salted("blue")])
    assert (_read(red), _read(blue)) == (hit, 0)
    llm = ForewordLLM(engine=cold, temperature=0, max_tokens=2)
    before = cold.stats().tokens_reused
    text = "The capital of Peru, a country in the Andes, is"
    assert len(set(llm.batch([text] * 2, [_salted("green"), _salted("yellow")]))) == 1
    assert cold.stats().tokens_reused == before
    llm.invoke(text, _salted("green"))
    list(llm.stream(text, _salted("yellow")))
    assert cold.stats().tokens_reused - before == 2 * (cold.count_tokens(text) - 1)


def test_a_calls_own_salt_comes_first_and_configurable_fields_work(chat: ChatForeword) -> None:
    hit = chat.get_num_tokens_from_messages(PROMPT) - 1
    chat.invoke(PROMPT, _salted("red"))
    assert _read(chat.invoke(PROMPT, _salted("blue"), cache_salt="red")) == hit
    configurable = chat.configurable_fields(cache_salt=ConfigurableField(id="tenant"))
    assert _read(configurable.invoke(PROMPT, {"configurable": {"tenant": "red"}})) == hit
    assert _read(configurable.invoke(PROMPT, {"configurable": {"tenant": "blue"}})) == 0


# -- events ----------------------------------------------------------------------------------------------------


class Events(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Any]] = []
        self.runs: list[Any] = []

    def on_chat_model_start(self, *_: Any, run_id: Any, **__: Any) -> None:
        self.runs.append(run_id)

    def on_llm_start(self, *_: Any, run_id: Any, **__: Any) -> None:
        self.runs.append(run_id)

    def on_custom_event(self, name: str, data: Any, *, run_id: Any, **_: Any) -> None:
        self.seen.append((name, data, run_id))


class AsyncEvents(Events, AsyncCallbackHandler):
    async def on_chat_model_start(self, *_: Any, run_id: Any, **__: Any) -> None:
        self.runs.append(run_id)

    async def on_llm_start(self, *_: Any, run_id: Any, **__: Any) -> None:
        self.runs.append(run_id)

    async def on_custom_event(self, name: str, data: Any, *, run_id: Any, **_: Any) -> None:
        self.seen.append((name, data, run_id))


@KINDS
@pytest.mark.parametrize("events", [Events, AsyncEvents])
async def test_calls_report_their_reuse(kind: type, events: type[Events], cold: Engine) -> None:
    llm, handler = kind(engine=cold, temperature=0, max_tokens=2), events()
    await llm.ainvoke(PROMPT, {"callbacks": [handler]})
    await llm.ainvoke(PROMPT, {"callbacks": [handler]})
    if events is Events:
        llm.invoke(PROMPT, {"callbacks": [handler]})
    text = PROMPT if kind is ChatForeword else ChatPromptValue(messages=PROMPT).to_string()
    prompt = llm.get_num_tokens_from_messages(text) if kind is ChatForeword else cold.count_tokens(text)
    assert [name for name, _, _ in handler.seen] == ["foreword.prefix_cache"] * (3 if events is Events else 2)
    reused = [0, prompt - 1, prompt - 1]
    assert [data for _, data, _ in handler.seen] == [
        {"model": cold.model, "prompt_tokens": prompt, "cached_tokens": cached}
        for cached in reused[: len(handler.seen)]
    ]
    assert [run for _, _, run in handler.seen] == handler.runs


@KINDS
async def test_streams_report_to_the_run_around_them(kind: type, engine: Engine) -> None:
    llm = kind(engine=engine, temperature=0, max_tokens=2)
    chain = ChatPromptTemplate.from_messages(PROMPT) | llm | StrOutputParser()
    events = [event async for event in chain.astream_events({}, version="v2") if event["event"] == "on_custom_event"]
    (event,) = events
    assert event["name"] == "foreword.prefix_cache"
    assert event["data"].keys() == {"model", "prompt_tokens", "cached_tokens"}
    handler = Events()
    assert list(chain.stream({}, {"callbacks": [handler]}))
    assert [name for name, _, _ in handler.seen] == ["foreword.prefix_cache"]
    assert list(llm.stream(PROMPT))  # outside of a run there is nobody to tell


async def test_a_batch_of_completions_reports_every_prompt(engine: Engine) -> None:
    llm, handler = ForewordLLM(engine=engine, max_tokens=1), Events()
    prompts = ["One two three four", "One two"]
    llm.batch(prompts, {"callbacks": [handler]})
    await llm.abatch(prompts, {"callbacks": [handler]})
    assert [data["prompt_tokens"] for _, data, _ in handler.seen] == [engine.count_tokens(text) for text in prompts * 2]
