"""What a program sees of the cache, and how it marks what is to stay there."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool

from foreword import CacheExplanation
from langchain_foreword import ChatForeword, ForewordLLM
from langchain_foreword._messages import to_dicts

if TYPE_CHECKING:
    from pathlib import Path

    from foreword import Engine

RULES = "You answer questions about the weather. Be polite, be brief, name the source of what you say. " * 4
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


def chat(time: str, question: str = "Will it rain?") -> list[Any]:
    return [("system", f"It is {time} now. {RULES}"), ("human", question)]


def marked(text: str, **control: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | control}


@tool
def forecast(city: str) -> str:
    """The weather of tomorrow."""
    return f"Rain in {city}."


# -- explained -----------------------------------------------------------------------------------------------------


def test_every_answer_says_why_no_more_was_cached(cold: Engine) -> None:
    """Whole, streamed and added up; as JSON and pickled too."""
    llm = ChatForeword(engine=cold, **GREEDY)
    llm.invoke(chat("12:05"))
    found = llm.invoke(chat("12:47")).response_metadata["prefix_cache"]
    assert (found["reason"], found["cause"]) == ("diverged", "clock")
    assert found["piece"] == {"kind": "system", "index": 0, "role": "system"}
    assert found["cached_tokens"] == found["matched_tokens"] == found["position"]
    assert found["lost_tokens"] > 60
    assert found.keys() == llm.explain(chat("12:59")).to_dict().keys() | {"cached_tokens"}
    whole: Any = None
    for chunk in llm.stream(chat("13:15")):
        whole = chunk if whole is None else whole + chunk
    streamed = whole.response_metadata["prefix_cache"]
    assert (streamed["cause"], streamed["piece"]) == ("clock", found["piece"])
    assert json.loads(json.dumps(streamed)) == streamed
    assert pickle.loads(pickle.dumps(whole)).response_metadata["prefix_cache"] == streamed


def test_text_completion_is_explained(cold: Engine) -> None:
    llm = ForewordLLM(engine=cold, **GREEDY)
    llm.invoke("It is 12:05 now. " + RULES)
    prompt = "It is 12:47 now. " + RULES
    before = llm.explain(prompt)
    assert (before.cause, before.piece and before.piece.kind) == ("clock", "text")
    [[generation]] = llm.generate([prompt]).generations
    assert generation.generation_info is not None
    found = generation.generation_info["prefix_cache"]
    assert (found["cause"], found["position"], found["cached_tokens"]) == ("clock", before.position, before.position)
    assert llm.explain(prompt).reason == "complete"
    assert llm.explain(prompt, config={"configurable": {"cache_salt": "t"}}).reason == "other_namespace"


def test_without_prefix_caching_only_counts_are_known(chat_dir: Path) -> None:
    from foreword import Engine

    with Engine(str(chat_dir), enable_prefix_caching=False, kv_cache_memory="32MiB") as engine:
        found = ChatForeword(engine=engine, **GREEDY).invoke("Hello").response_metadata["prefix_cache"]
    assert found == {"prompt_tokens": found["prompt_tokens"], "cached_tokens": 0}


def test_explain_renders_as_a_call_does(cold: Engine) -> None:
    """Tools, bound or given; the schema in the prompt; the salt of field, config or binding: all found cached."""
    llm = ChatForeword(engine=cold, **GREEDY)
    bound = llm.bind_tools([forecast], tool_choice="any", max_tokens=32)
    structured = llm.bind(
        response_format={"title": "Answer", "type": "object", "properties": {"rain": {"type": "boolean"}}}
    )
    salted = llm.with_config({"configurable": {"cache_salt": "tenant"}})
    for runnable in (llm, bound, structured, salted):
        assert runnable.explain(chat("noon")).reason != "complete"
        runnable.invoke(chat("noon"))
        found = runnable.explain(chat("noon"))
        assert isinstance(found, CacheExplanation)
        assert found.reason == "complete", found
    assert llm.explain(chat("noon"), [forecast]).reason == "complete"
    assert llm.explain(chat("noon"), config={"configurable": {"cache_salt": "tenant"}}).reason == "complete"
    assert llm.explain(chat("noon"), cache_salt="another").reason == "other_namespace"
    prompt = ChatPromptTemplate.from_messages(chat("{time}")).invoke({"time": "noon"})
    assert llm.explain(prompt).reason == "complete"


def test_explain_refuses_what_a_call_refuses(engine: Engine) -> None:
    llm = ChatForeword(engine=engine, **GREEDY)
    with pytest.raises(ValueError, match="a call takes no option 'temprature'"):
        llm.explain("Hello", temprature=1)
    with pytest.raises(ValueError, match="reads text only"):
        llm.explain([HumanMessage([{"type": "image", "url": "x"}])])


# -- cache points --------------------------------------------------------------------------------------------------


def test_marks_reach_the_engine() -> None:
    """In every kind of message; blocks without a mark stay one text."""
    messages = [
        SystemMessage([marked("Rules. ", ttl="1h"), {"type": "text", "text": "More."}]),
        HumanMessage(["A ", marked("question?")]),
        AIMessage([marked("A call.")], tool_calls=[{"name": "forecast", "args": {}, "id": "call00001"}]),
        ToolMessage([marked("No such city.")], tool_call_id="call00001", status="error"),
        HumanMessage([{"type": "text", "text": "Why", "cache_control": None}, "?"]),
    ]
    found = [turn["content"] for turn in to_dicts(messages)]
    assert found == [
        [marked("Rules. ", ttl="1h"), "More."],
        ["A ", marked("question?")],
        [marked("A call.")],
        ["Error: ", marked("No such city.")],
        "Why?",
    ]


def test_a_marked_beginning_is_pinned(unpinned: Engine) -> None:
    """Also through a prompt template; the tokens are those of the same messages without a mark."""
    llm = ChatForeword(engine=unpinned, **GREEDY)
    parts = [marked(RULES), {"type": "text", "text": "The time is {time}."}]
    prompt = ChatPromptTemplate.from_messages([("system", parts), ("human", "{question}")])
    question = "Will it rain tomorrow, and what do I need to take along for a long walk?"
    answer = (prompt | llm).invoke({"time": "12:05", "question": question})
    assert answer.usage_metadata["input_tokens"] == llm.get_num_tokens_from_messages(
        [SystemMessage(RULES + "The time is 12:05."), HumanMessage(question)]
    )
    pinned = unpinned.stats().blocks_pinned * unpinned.config.block_size
    rules = unpinned.count_tokens(RULES)
    assert rules <= pinned <= rules + 32
    unpinned.reset_prefix_cache()
    assert llm.explain([("system", RULES + "The time is 12:47."), ("human", question)]).matched_tokens >= rules


_MARK = {"cache_control": {"type": "ephemeral"}}
_FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "marked",
    [
        _FORECAST | _MARK,
        {"type": "function", "function": {"name": "forecast", "parameters": {"type": "object"}} | _MARK},
        {"name": "forecast", "description": "Rain?", "input_schema": {"type": "object", "properties": {}}} | _MARK,
    ],
    ids=["beside the function", "in it", "Anthropic's"],
)
def test_marked_tools_are_pinned(unpinned: Engine, marked: dict[str, Any]) -> None:
    llm = ChatForeword(engine=unpinned, temperature=0, max_tokens=32)
    llm.bind_tools([marked]).invoke(chat("noon"))
    assert 0 < unpinned.stats().blocks_pinned <= unpinned.stats().blocks_cached
    plain: dict[str, Any] = {name: value for name, value in marked.items() if name != "cache_control"}
    assert llm.bind_tools([plain]).explain(chat("noon")).reason == "complete"


def test_a_wrong_mark_is_named(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\]\.cache_control=.*\"ttl\": \"5m\" or \"1h\""):
        ChatForeword(engine=engine, **GREEDY).invoke([HumanMessage([marked("Hello", ttl="2d")])])
