"""Which part of a prompt is whose: messages, tools, passages and the template's own words, for every family."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from foreword.core.explanation import PromptPiece
from foreword.text.chat import ChatTemplate
from foreword.text.conversation import ChatOptions, Conversations
from foreword.text.passages import passage_key, passages
from foreword.text.pieces import PromptText, locate, plain
from foreword.text.tokenizer import Tokenizer

from .tool_templates import TEMPLATES

ID = "call00001"
CALL = {"id": ID, "type": "function", "function": {"name": "zeta", "arguments": {"key": "unlikely argument"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules of the house."},
    {"role": "user", "content": "Use it.\n\nContext:\nAlpha passage.\n\nBeta passage.\n\nQuestion: What?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "Forty-two.", "tool_call_id": ID, "name": "zeta"},
    {"role": "assistant", "content": "It is that number."},
    {"role": "user", "content": "Thank you."},
    {"role": "user", "content": "  And more?  \n"},
]
SAID = {
    0: "Rules of the house.",
    1: "Question: What?",
    2: "unlikely argument",
    3: "Forty-two.",
    4: "It is that number.",
    5: "Thank you.",
    6: "And more?",
}


def tool(name: str) -> dict[str, Any]:
    properties = {"key": {"type": "string"}}
    function = {
        "name": name,
        "description": f"Does {name}.",
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


TOOLS = [tool("zeta"), tool("beta"), tool("kappa")]


def conversations(tokenizer: Tokenizer, template: ChatTemplate | None) -> Conversations:
    own = copy.copy(tokenizer)
    if template is not None:
        own.chat_template = template
    return Conversations(own)


def located(chat: Conversations, messages: list[dict[str, Any]], **options: Any) -> PromptText:
    found = locate(chat.render(messages, ChatOptions(**options)), messages)
    assert found.pieces[0].start == 0
    assert found.pieces[-1].end == len(found.text)
    assert all(a.end == b.start for a, b in zip(found.pieces, found.pieces[1:], strict=False))
    assert all(piece.start < piece.end for piece in found.pieces)
    return found


def shown(prompt: PromptText, kind: str) -> list[tuple[int | None, str]]:
    return [(piece.index, prompt.text[a:b]) for piece, a, b in prompt.pieces if piece.kind == kind]


@pytest.mark.parametrize("family", [None, *sorted(TEMPLATES)])
def test_every_message_owns_what_it_says(smollm: Tokenizer, family: str | None) -> None:
    """With an index as given, though contents are trimmed, merged, moved, or folded into other messages."""
    chat = conversations(smollm, TEMPLATES.get(family or ""))
    for tools in (None, TOOLS):
        prompt = located(chat, MESSAGES, tools=tools)
        for index, words in SAID.items():
            if words not in prompt.text:  # SMOLLM3's shows no calls and no results
                continue
            place = prompt.text.index(words) + len(words) // 2
            kind = "system" if index == 0 else "message"
            assert prompt.owner(place) == PromptPiece(kind, index, MESSAGES[index]["role"]), words
        assert [text for _, text in shown(prompt, "document")] == ["Alpha passage.", "Beta passage."]
        assert {index for index, _ in shown(prompt, "document")} == {1}


@pytest.mark.parametrize("family", [None, *sorted(TEMPLATES)])
@pytest.mark.parametrize("canonical", [True, False])
def test_every_tool_owns_its_definition(smollm: Tokenizer, family: str | None, canonical: bool) -> None:
    """With its index in the list as given, in whatever order and spelling the template shows it."""
    prompt = located(
        conversations(smollm, TEMPLATES.get(family or "")), MESSAGES, tools=TOOLS, canonical_tools=canonical
    )
    found = {index: text for index, text in shown(prompt, "tools") if index is not None}
    assert list(found) == ([1, 2, 0] if canonical else [0, 1, 2])
    for index, text in found.items():
        own, *others = (
            TOOLS[index]["function"]["name"],
            *(each["function"]["name"] for each in TOOLS if each != TOOLS[index]),
        )
        assert own in text
        assert not any(other in text for other in others)


def test_the_borders_of_the_default_template(smollm: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": "S"},
        *({"role": role, "content": role} for role in ("user", "assistant")),
    ]
    prompt = located(conversations(smollm, None), [*messages, {"role": "user", "content": "Bye"}])
    assert [(*piece, prompt.text[a:b]) for piece, a, b in prompt.pieces] == [
        ("system", 0, "system", "<|im_start|>system\nS<|im_end|>\n"),
        ("message", 1, "user", "<|im_start|>user\nuser<|im_end|>\n"),
        ("message", 2, "assistant", "<|im_start|>assistant\nassistant<|im_end|>\n"),
        ("message", 3, "user", "<|im_start|>user\nBye<|im_end|>\n"),
        ("generation", None, None, "<|im_start|>assistant\n"),
    ]
    assert prompt.owner(0) == PromptPiece("system", 0, "system")
    assert prompt.owner(len(prompt.text) + 9) == PromptPiece("generation")


def test_the_templates_own_system_prompt(smollm: Tokenizer) -> None:
    prompt = located(conversations(smollm, None), [{"role": "user", "content": "Hello"}])
    (own,) = shown(prompt, "system")
    assert own[0] is None
    assert own[1].startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert str(prompt.owner(30)) == "the template's own system prompt"
    for family in ("mistral", "gemma3", "text arguments"):  # these have none
        assert not shown(
            located(conversations(smollm, TEMPLATES[family]), [{"role": "user", "content": "Hello"}]), "system"
        )


def test_words_around_the_tools_are_the_tools(smollm: Tokenizer) -> None:
    prompt = located(conversations(smollm, None), MESSAGES[:2], tools=TOOLS)
    words = "".join(text for index, text in shown(prompt, "tools") if index is None)
    assert "<tools>" in words
    assert "</tool_call>" in words
    assert "Rules" not in words


def test_a_template_that_shows_contents_otherwise(smollm: Tokenizer) -> None:
    """Marks would change the text: contents are then looked for one after the other."""
    source = "{% for m in messages %}[{{ m.role }} {{ m.content | length }}] {{ m.content }}\n{% endfor %}"
    prompt = located(conversations(smollm, ChatTemplate(source)), MESSAGES)
    for index in (0, 1, 4):
        assert prompt.owner(prompt.text.index(SAID[index])).index == index


def test_marks_in_the_text_itself(smollm: Tokenizer) -> None:
    messages = [{"role": "user", "content": "\U000f0000 a"}, {"role": "assistant", "content": "b \U000f0003"}]
    prompt = located(conversations(smollm, None), [*messages, {"role": "user", "content": "c"}])
    assert prompt.owner(prompt.text.index("b \U000f0003")) == PromptPiece("message", 1, "assistant")


def test_the_number_of_renderings_does_not_grow_with_the_conversation(
    smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = conversations(smollm, None)
    text_of, calls = Conversations.text_of, list[int]()

    def counted(*arguments: Any, **options: Any) -> str:
        calls.append(1)
        return text_of(*arguments, **options)

    counts = []
    for turns in (4, 40):
        rendered = chat.render(MESSAGES[:2] + MESSAGES[4:6] * turns, ChatOptions())
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Conversations, "text_of", counted)
            locate(rendered)
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 6


def test_text_prompts_and_answers(smollm: Tokenizer) -> None:
    assert plain("abc").owner(1) == PromptPiece("text")
    assert plain("abc").with_answer("de").pieces == ((PromptPiece("text"), 0, 5),)
    prompt = located(conversations(smollm, None), MESSAGES[:2]).with_answer("Yes.")
    assert prompt.text.endswith("<|im_start|>assistant\nYes.")
    assert prompt.owner(len(prompt.text) - 1) == PromptPiece("generation")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<doc>a b</doc> and <doc>c</doc>?", ["<doc>a b</doc>", "<doc>c</doc>"]),
        ("<context>\none\n\ntwo\n</context>\nWhy?", ["one", "two"]),
        ("Context information is below.\n-----\none\n\ntwo\n-----\nQuery: why?", ["one", "two"]),
        ("Context information is below.\n-----\npage_label: 1\n\none\n-----\nQ", ["page_label: 1\n\none"]),
        ("Say it.\nContext:\none\n\ntwo\n\nQuestion: why?", ["one", "two"]),
        ("Relevant documents: one\n\nWhy?", ["one"]),
        ("Use the following context.\n\none\n\ntwo\n\nQuestion: why?\nHelpful Answer:", ["one", "two"]),
        ("Document 1: one\n\nDocument 2: two\n\nWhy?", ["Document 1: one", "Document 2: two"]),
        ("[1] one\n[2] two\n\nWhy?", ["[1] one", "[2] two"]),
        ("Source: a\none\n\nSource: b\ntwo\n\nWhy?", ["Source: a\none", "Source: b\ntwo"]),
        ("file_path: a\n\none\n\nWhy?", ["file_path: a\n\none"]),
        (
            "Document 1:\none\n\nmore\n\nDocument 2:\ntwo\n\nmore\n\nWhy?",
            ["Document 1:\none\n\nmore", "Document 2:\ntwo\n\nmore"],
        ),
        # no passages
        ("What is the context of this?", []),
        ("Is [1] in the list?", []),
        ("Title: my holidays\nwrite about them", []),
        ("The source is open.", []),
        ("one\n\ntwo", []),
    ],
)
def test_passages(text: str, found: list[str]) -> None:
    assert [text[a:b] for a, b in passages(text)] == found


def test_numbers_in_a_system_prompt_are_rules() -> None:
    assert passages("[1] Be kind.\n[2] Be brief.", is_system=True) == []
    assert len(passages("[1] Be kind.\n[2] Be brief.")) == 2


def test_a_passage_is_the_same_at_another_place() -> None:
    assert passage_key("Document 1: a  b") == passage_key("Document 12: a b")
    assert passage_key('<doc index="1" score="0.9">a</doc>') == passage_key('<doc index="2" score="0.8">a</doc>')
    assert passage_key("[1] a") != passage_key("[1] b")


def test_text_parts(smollm: Tokenizer) -> None:
    parts = ["Answer from these:", "First passage.", "Second passage.", "Which of them?"]
    messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
    prompt = located(conversations(smollm, None), messages)
    assert shown(prompt, "document") == [(0, "First passage."), (0, "Second passage.")]
    two = [{"role": "user", "content": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "How are you?"}]}]
    assert not shown(located(conversations(smollm, None), two), "document")


@pytest.mark.parametrize(
    "text", ["the context of it " * 6000, "following context " * 6000, "<doc>" * 20_000, " " * 100_000]
)
def test_long_texts_without_passages_take_one_pass(text: str) -> None:
    """They would not end within minutes otherwise."""
    assert passages(text) == []
