"""Where a match with the cache ends, and why: what keeps a prompt from being reused has a name and a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreword import Engine

RULES = "You answer questions about the weather. Be polite, be brief, name the source. "


@pytest.fixture
def engine(fp32_engine: Engine) -> Engine:
    fp32_engine.reset_prefix_cache()
    return fp32_engine


def chat(time: str, question: str = "Will it rain?") -> list[dict[str, Any]]:
    system = f"It is {time} now. {RULES}"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def test_volatile_text_near_the_head_is_named(engine: Engine) -> None:
    """A clock in the system prompt: the report shows the message, the offset and both texts."""
    engine.chat(chat("12:05"), max_tokens=1, temperature=0)
    report = engine.explain(chat("12:47"))
    assert (report.reason, report.message) == ("diverged", 0)
    assert report.text.startswith("47 now." if report.text[0] == "4" else "7 now.")
    assert report.cached_text.startswith("05 now." if report.cached_text[0] == "0" else "5 now.")
    assert report.cached_tokens < 20 < report.prompt_tokens
    output = engine.chat(chat("12:47"), max_tokens=1, temperature=0)
    assert output.usage.cached_tokens == report.cached_tokens
    text = engine._client.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text[report.offset :].startswith(report.text[:3])


def test_a_question_that_differs_is_the_users_message(engine: Engine) -> None:
    engine.chat(chat("noon"), max_tokens=1, temperature=0)
    report = engine.explain(chat("noon", "Is it cold?"))
    assert (report.reason, report.message) == ("diverged", 1)
    assert report.cached_text.startswith("Will it rain?")


def test_all_known_all_new_and_known_so_far(engine: Engine) -> None:
    assert engine.explain("Nothing is cached yet.").reason == "new"
    engine.generate("One, two, three, four", max_tokens=1, ignore_eos=True)
    assert engine.explain("One, two, three, four").reason == "complete"
    longer = engine.explain("One, two, three, four, five, six")
    assert longer.cached_tokens == len(engine.encode("One, two, three, four"))
    assert (longer.offset, longer.text) == (len("One, two, three, four"), ", five, six")
    assert longer.message is None


def test_it_changes_nothing_and_keeps_salts_apart(engine: Engine) -> None:
    engine.chat(chat("noon"), max_tokens=1, temperature=0)
    before = engine.stats()
    assert engine.explain(chat("noon"), cache_salt="other").cached_tokens == 0
    assert engine.explain(chat("noon")).reason == "complete"
    assert engine.stats() == before


def test_tools_that_change_are_found(engine: Engine) -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    engine.chat(chat("noon"), tools=[tool("rain"), tool("wind")], max_tokens=1)
    shuffled = engine.explain(chat("noon"), tools=[tool("wind"), tool("rain")])
    assert shuffled.reason == "complete"
    renamed = engine.explain(chat("noon"), tools=[tool("rain"), tool("winds")])
    assert (renamed.reason, renamed.message) == ("diverged", 0)


def test_wrong_input_is_refused_as_in_a_call(engine: Engine) -> None:
    calls: list[Callable[[], Any]] = [lambda: engine.explain(""), lambda: engine.explain([{"role": "x"}])]
    for call in calls:
        with pytest.raises(ValueError):  # noqa: PT011 - their messages are tested where they are raised
            call()
