"""Where the beginnings of conversations end, and what cache points in messages and tools ask for."""

from __future__ import annotations

from typing import Any

import pytest

from foreword.core.sampling import SamplingParams
from foreword.text.beginnings import Keep, beginning, kept
from foreword.text.chat import ChatTemplate
from foreword.text.conversation import ChatOptions, Conversations
from foreword.text.tokenizer import Tokenizer

from .tool_templates import TEMPLATES

RULES = "You answer customers of a bicycle shop."
SYSTEM = {"role": "system", "content": RULES}
FOLDING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
NEEDS_USER = (
    "{% if messages | length < 2 %}{{ raise_exception('no user') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content if loop.last or m.role == 'user' else 'said' }} [end]"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def part(text: str, ttl: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})} | more


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} | more


@pytest.fixture(params=["own", FOLDING, NEEDS_USER, FORGETFUL], ids=["own", "folding", "needs user", "forgetful"])
def conversations(request: pytest.FixtureRequest, smollm: Tokenizer) -> Conversations:
    found = Conversations(smollm)
    if request.param != "own":
        found.template = ChatTemplate(request.param)
    return found


def shown(
    conversations: Conversations, messages: list[Any], options: ChatOptions | None = None
) -> list[tuple[str, float]]:
    """The texts that are kept of a conversation, and for how long."""
    rendered = conversations.render(messages, options or ChatOptions())
    tokenizer = conversations.tokenizer
    return [
        (tokenizer.decode(rendered.token_ids[: keep.num_tokens], skip_special_tokens=False), keep.ttl_s)
        for keep in kept(rendered)
    ]


# -- beginnings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM],
        [SYSTEM, user("Do you sell bells?")],
        [SYSTEM, user("Do you sell bells?"), {"role": "assistant", "content": "Yes."}],
    ],
    ids=["system", "user", "assistant"],
)
def test_a_beginning_begins_what_follows(conversations: Conversations, messages: list[Any]) -> None:
    """In tokens, for different continuations, and as far as they are the same: all that was said is in it."""
    found = beginning(conversations, messages, ChatOptions(), SamplingParams())
    asked = messages[-1]["role"] == "user"
    said = [{"role": "assistant", "content": text} for text in ("Yes, two kinds.", "No.")]
    follow = said if asked else [user("Where are you?"), user("When are you open?")]
    for message in follow:
        prompt = conversations.render([*messages, message], ChatOptions())
        assert prompt.token_ids[: len(found.token_ids)] == found.token_ids
        assert prompt.text.startswith(found.text)
    if conversations.template.source != FORGETFUL or asked:
        assert messages[-1]["content"] in found.text
    assert found.messages == messages


# -- cache points --------------------------------------------------------------------------------------------------


def test_points_are_found_in_the_prompt(conversations: Conversations) -> None:
    """At the end of a part, wherever the template puts the message; with spaces that it trims, and in a merged one."""
    messages = [
        {"role": "system", "content": [part("Rules. ", "1h"), {"type": "text", "text": "More rules."}]},
        user([part("A document.\n\n"), "A question?  "]),
        user([part("And another?  ")]),
    ]
    found = shown(conversations, messages)
    assert [ttl for _, ttl in found] == [3600.0, 300.0, 300.0]
    for (text, _), end in zip(found, ("Rules.", "A document.", "another?"), strict=True):
        assert text.rstrip().endswith(end), text


def test_a_point_among_tools_covers_all_up_to_it(smollm: Tokenizer) -> None:
    """Tools are shown sorted: whatever stands before the last of them is kept. No prompt shows the mark."""
    conversations = Conversations(smollm)
    marked = [tool("look_up"), tool("buy", cache_control={"type": "ephemeral", "ttl": "1h"}), tool("zoom")]
    plain = [{key: value for key, value in each.items() if key != "cache_control"} for each in marked]
    options = ChatOptions(tools=marked)
    rendered = conversations.render([SYSTEM, user("Hi")], options)
    assert rendered.text == conversations.render([SYSTEM, user("Hi")], ChatOptions(tools=plain)).text
    [(text, ttl)] = shown(conversations, [SYSTEM, user("Hi")], options)
    assert "look_up" in text
    assert "buy" in text
    assert "zoom" not in text
    assert ttl == 3600.0
    assert ChatOptions(tools=plain).points == ChatOptions(tools=[tool("a", cache_control=None)]).points == ()


def test_a_point_before_tools_that_move(smollm: Tokenizer) -> None:
    """The tools stand before the last message, so not in the beginning that the next turn shares."""
    conversations = Conversations(smollm)
    conversations.template = TEMPLATES["mistral"]
    messages = [user([part("One?")]), {"role": "assistant", "content": "Yes."}, user([part("Two?")])]
    found = shown(conversations, messages, ChatOptions(tools=[tool("look_up")]))
    assert [text.endswith(end) for (text, _), end in zip(found, ("One?", "Two?"), strict=True)] == [True, True]
    assert ["look_up" in text for text, _ in found] == [False, True]


def test_a_point_that_no_prompt_shows_is_left_out(smollm: Tokenizer) -> None:
    conversations = Conversations(smollm)
    conversations.template = ChatTemplate(FORGETFUL)
    messages = [user("One?"), {"role": "assistant", "content": [part("Yes.")]}, user([part("Two?")])]
    assert [text.endswith("Two?") for text, _ in shown(conversations, messages)] == [True]


def test_a_point_before_any_text_keeps_what_comes_before(smollm: Tokenizer) -> None:
    messages = [SYSTEM, user([part(""), "Hi"])]
    [(text, _)] = shown(Conversations(smollm), messages)
    assert RULES in text
    assert "Hi" not in text


def test_nothing_is_kept_without_a_point(smollm: Tokenizer) -> None:
    conversations = Conversations(smollm)
    assert kept(conversations.render([SYSTEM, user([part("Hi", cache_control=None)])], ChatOptions())) == []
    rendered = conversations.render([user([part("Hi")])], ChatOptions())
    assert kept(rendered) == [Keep(len(smollm.encode(rendered.text.split("Hi")[0] + "Hi")), 300.0)]
