"""Pairs of prompts as people report them: the place, the piece and the cause of the first difference are exactly right.

The pairs are modelled on public reports about prompt caches that miss; each file holds those of one theme, with pairs
beside them that look alike and have another cause, or none.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any, get_args

import pytest

from explanations import clocks, documents, histories, identifiers, spacing, tools
from explanations.pair import MARK, RULES, Messages, Pair, system, user
from explanations.sentences import SENTENCES
from explanations.tokens import TOKENS
from foreword.core.explanation import Cause, PromptPiece
from foreword.model.source import resolve
from foreword.text.causes import compare
from foreword.text.chat import ChatTemplate
from foreword.text.conversation import ChatOptions, Conversations
from foreword.text.pieces import PromptText, locate, plain
from foreword.text.tokenizer import Tokenizer

PAIRS: list[Pair] = [
    pair for module in (clocks, identifiers, tools, documents, histories, spacing) for pair in module.PAIRS
]

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\\n' ~ m.content ~ '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' ~ m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""A template with a section for tools, in the structure of that family."""


@pytest.fixture(scope="session")
def conversations() -> dict[str, Conversations]:
    tokenizer = Tokenizer.from_directory(resolve("smollm2-135m").directory)
    other = copy.copy(tokenizer)
    other.chat_template = ChatTemplate(QWEN)
    return {"default": Conversations(tokenizer), "qwen": Conversations(other)}


def prompt(conversations: Conversations, given: Messages | str, tools: Messages | None) -> tuple[PromptText, list[int]]:
    if isinstance(given, str):
        return plain(given), conversations.tokenizer.encode(given)
    rendered = conversations.render(given, ChatOptions(tools=tools, canonical_tools=False))
    return locate(rendered, given), rendered.token_ids


def without_mark(value: Any) -> Any:
    return json.loads(json.dumps(value, ensure_ascii=False).replace(MARK, ""))


def place(pair: Pair, conversations: Conversations, text: str) -> int:
    """Where the data says that the prompts begin to differ."""
    if pair.at is not None:
        return text.index(pair.at) if pair.at else len(text)
    marked, _ = prompt(conversations, pair.asked, pair.tools)
    assert marked.text.count(MARK) == 1
    assert marked.text.replace(MARK, "") == text
    return marked.text.index(MARK)


def shared_tokens(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_place_piece_and_cause(pair: Pair, conversations: dict[str, Conversations]) -> None:
    chat = conversations[pair.template]
    expected, expected_ids = prompt(chat, pair.cached, pair.cached_tools)
    actual, ids = prompt(chat, without_mark(pair.asked), without_mark(pair.tools))
    offset = place(pair, chat, actual.text)

    found = compare(expected, actual)

    assert found.offset == offset, actual.text[found.offset :][:40]
    assert found.piece == (None if pair.piece is None else PromptPiece(*pair.piece))
    assert found.cause == pair.cause
    assert found.reusable_share == (None if pair.share is None else pytest.approx(pair.share, abs=0.03))
    same = shared_tokens(expected_ids, ids)
    ends = [
        len(chat.tokenizer.decode(each[: same + count], skip_special_tokens=False))
        for each in (expected_ids, ids)
        for count in (0, 1)
    ]
    assert min(ends) <= offset  # the first token that differs begins at the place or before it,
    assert max(ends) > offset or offset == len(actual.text)  # and one of the two reaches it
    assert pair.template != "default" or same == TOKENS[pair.name]


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("cached", "asked", "cause"), SENTENCES)
def test_sentences(
    cached: str, asked: str, cause: str | None, place: str, conversations: dict[str, Conversations]
) -> None:
    """The same in front of the rules and behind them, whatever is asked."""
    both = []
    for sentence, question in ((cached, "Is it open?"), (asked, "What is wet oil for?")):
        content = f"{sentence}\n{RULES}" if place == "first" else f"{RULES}\n{sentence}"
        both.append(prompt(conversations["default"], [system(content), user(question)], None)[0])
    found = compare(*both)
    assert found.cause == cause
    assert found.piece == PromptPiece("system", 0, "system")


NEEDS_MORE_THAN_TEXT = {
    "a date in a description (default)",  # where a definition begins and ends
    "a date in a description (qwen)",
    "several text parts, swapped",  # where a part begins and ends
}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_text_of_the_cached_prompt_is_enough(pair: Pair, conversations: dict[str, Conversations]) -> None:
    """Its messages are recognised by the markup of the other one."""
    chat = conversations[pair.template]
    expected, _ = prompt(chat, pair.cached, pair.cached_tools)
    actual, _ = prompt(chat, without_mark(pair.asked), without_mark(pair.tools))
    found = compare(plain(expected.text), actual)
    assert found.cause == (None if pair.name in NEEDS_MORE_THAN_TEXT else pair.cause)
    assert found.piece == (None if pair.piece is None else PromptPiece(*pair.piece))


def test_there_are_enough_of_each() -> None:
    """Every cause that a text alone can show, prompts that have none, and no name twice."""
    count = Counter(pair.cause for pair in PAIRS)
    assert len(PAIRS) >= 100
    assert count[None] >= 20
    assert {*get_args(Cause)} - {"retokenized", "namespace"} == {*count} - {None}
    assert min(count.values()) >= 4
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
