"""Thoughts of reasoning models, told from answers, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.message import MessageDelta
from foreword.text.reasoning import Reasoning, ReasoningParser, recognise

CASES = [
    # opened by the prompt, text, reasoning, content
    (False, "<think>\nLet me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    (False, "\n<think>a</think>b", "a", "b"),
    (False, "Four.", "", "Four."),
    (False, "  spaces stay", "", "  spaces stay"),
    (False, "Is <think> a tag?</think>", "", "Is <think> a tag?</think>"),
    (False, "<think>cut off <", "cut off <", ""),
    (False, "<think></think>\n\nx", "", "x"),
    (False, "<think>one</think>two</think>", "one", "two</think>"),
    (False, "<thin", "", "<thin"),
    (False, "", "", ""),
    (True, "\nI think </thi no\n</think>\n yes", "I think </thi no", "yes"),
    (True, "never closed\n", "never closed", ""),
]


def parse(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    parser, total = ReasoningParser(reasoning), MessageDelta()
    for piece in pieces:
        total += parser.append(piece)
    total += parser.finish()
    return total.reasoning, total.content


@pytest.mark.parametrize(("opened", "text", "reasoning", "content"), CASES)
def test_thought_and_answer(opened: bool, text: str, reasoning: str, content: str) -> None:
    assert parse(Reasoning(opened), [text]) == (reasoning, content)
    assert parse(Reasoning(opened), list(text)) == (reasoning, content)


@given(st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "\n", " ", "a", "<"])))
def test_the_parts_do_not_depend_on_the_cuts(opened: bool, pieces: list[str]) -> None:
    whole = parse(Reasoning(opened), ["".join(pieces)])
    assert parse(Reasoning(opened), pieces) == whole
    assert parse(Reasoning(opened), list("".join(pieces))) == whole


@pytest.mark.parametrize(
    ("source", "prompt", "expected"),
    [
        ("{{ messages }}", "user: hi\nassistant:", None),
        ("... </think> ...", "<|im_start|>assistant\n", Reasoning()),
        ("... </think> ...", "<|im_start|>assistant\n<think>\n", Reasoning(opened=True)),
        ("... </think> ...", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
    ],
)
def test_template_and_prompt_say_whether_it_thinks(source: str, prompt: str, expected: Reasoning | None) -> None:
    assert recognise(source, prompt) == expected
