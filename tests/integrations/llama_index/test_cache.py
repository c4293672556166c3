"""What a program sees of the cache, and how it marks what is to stay there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.base.llms.types import CacheControl, CachePoint, ChatMessage, TextBlock
from llama_index.core.tools import FunctionTool

from foreword import CacheExplanation
from llama_index.llms.foreword import Foreword
from llama_index.llms.foreword._messages import to_dicts

if TYPE_CHECKING:
    from foreword import Engine

RULES = "You know the tides of every harbour. Be polite, be brief, name the source of what you say. " * 4


def chat(time: str, question: str = "Will it rain?") -> list[ChatMessage]:
    return [
        ChatMessage(role="system", content=f"The clock says {time}. {RULES}"),
        ChatMessage(role="user", content=question),
    ]


def point(ttl: str = "5m", kind: str = "ephemeral") -> CachePoint:
    return CachePoint(cache_control=CacheControl(type=kind, ttl=ttl))


def forecast(city: str) -> str:
    """The weather of tomorrow."""
    return f"Rain in {city}."


def test_every_response_says_why_no_more_was_cached(cold: Engine, llm: Foreword) -> None:
    """Whole and streamed."""
    llm.chat(chat("12:05"))
    before = llm.explain(chat("12:47"))
    assert isinstance(before, CacheExplanation)
    found = llm.chat(chat("12:47")).raw["prefix_cache"]
    assert (found["reason"], found["cause"], found["position"]) == ("diverged", "clock", before.position)
    assert found["piece"] == {"kind": "system", "index": 0, "role": "system"}
    assert found["cached_tokens"] == found["matched_tokens"]
    assert found.keys() == before.to_dict().keys() | {"cached_tokens"}
    streamed = list(llm.stream_chat(chat("13:15")))[-1].raw["prefix_cache"]
    assert (streamed["cause"], streamed["piece"]) == ("clock", found["piece"])
    cold.check_integrity()


def test_explain_renders_as_a_call_does(cold: Engine) -> None:
    """Messages, a text as user message or as it is; tools; the salt: all found cached."""
    llm = Foreword(engine=cold, temperature=0, max_tokens=32, cache_salt="tenant")
    tool = FunctionTool.from_defaults(forecast)
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (lambda: llm.chat(chat("noon")), chat("noon"), {}),
        (lambda: llm.complete("What is rain?"), "What is rain?", {}),
        (lambda: llm.complete("Rain is", formatted=True), "Rain is", {"formatted": True}),
        (lambda: llm.chat_with_tools([tool], chat_history=chat("noon")), chat("noon"), {"tools": [tool]}),
    ]
    for call, prompt, options in calls:
        assert llm.explain(prompt, **options).reason != "complete"
        call()
        found = llm.explain(prompt, **options)
        assert found.reason == "complete", found
    assert llm.explain(chat("noon"), cache_salt="another").reason == "other_namespace"
    with pytest.raises(ValueError, match="tools: only for prompts that go through the chat template"):
        llm.explain("Rain is", [tool], formatted=True)


def test_a_cache_point_marks_what_stands_before_it() -> None:
    blocks = [TextBlock(text="Rules."), point("1h"), TextBlock(text="More."), TextBlock(text="Even more."), point()]
    (turn,) = to_dicts([ChatMessage(role="system", blocks=blocks)])
    assert turn["content"] == [
        {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "\nMore."},
        {"type": "text", "text": "\nEven more.", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
    ]
    (turn,) = to_dicts([ChatMessage(role="user", blocks=[point(), TextBlock(text="Why?"), point("1h")])])
    assert turn["content"] == [
        {"type": "text", "text": "", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]


def test_a_cache_point_pins(unpinned: Engine) -> None:
    """The tokens are those of the same messages without it."""
    llm = Foreword(engine=unpinned, temperature=0, max_tokens=4)
    question = ChatMessage(role="user", content="Will it rain tomorrow, and what do I need for a walk in the hills?")
    system = ChatMessage(role="system", blocks=[TextBlock(text=RULES), point(), TextBlock(text="It is 12:05.")])
    llm.chat([system, question])
    rules = unpinned.count_tokens(RULES)
    assert rules <= unpinned.stats().blocks_pinned * unpinned.config.block_size <= rules + 32
    plain = ChatMessage(role="system", content=f"{RULES}\nIt is 12:05.")
    assert llm.explain([plain, question]).reason == "complete"
    unpinned.reset_prefix_cache()
    assert llm.explain([plain, question]).matched_tokens >= rules


def test_a_wrong_cache_point_is_named(llm: Foreword) -> None:
    with pytest.raises(ValueError, match=r"messages\[0\]\.content\[0\]\.cache_control=.*'2h'"):
        llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="Hello"), point("2h")])])
