"""Evidence for causes: what counts as a clock or an id, how much is lost, and what is no evidence."""

from __future__ import annotations

import pytest

from foreword.core.explanation import PromptPiece
from foreword.text.causes import compare
from foreword.text.causes.align import shared, similarity
from foreword.text.causes.clock import clock
from foreword.text.causes.history import history
from foreword.text.causes.identifier import identifier
from foreword.text.causes.order import order
from foreword.text.conversation import ChatOptions, Conversations
from foreword.text.pieces import Piece, PromptText, common_prefix, locate, plain
from foreword.text.tokenizer import Tokenizer

CLOCKS = [
    ("at 12:05 now", "at 12:47 now", "12:05", "12:47"),
    ("Mon, 30 Nov 2026 12:05:00 +0000", "Tue, 01 Dec 2026 09:05:00 +0000", "Mon, 30 Nov 2026 12:05:00 +0000", None),
    ("20261130T120509Z", "20261201T000000Z", "20261130T120509Z", "20261201T000000Z"),
    ("11/30/2026", "30.11.2026", "11/30/2026", "30.11.2026"),
    ("30. 11. 2026", "1. 12. 2026", "30. 11. 2026", "1. 12. 2026"),
    ("30.11.26", "01.12.26", "30.11.26", "01.12.26"),
    ("30-Nov-2026", "01-Dec-2026", "30-Nov-2026", "01-Dec-2026"),
    ("2026年11月30日", "2026年12月1日", "2026年11月30日", "2026年12月1日"),
    ("今日は2026年11月30日(月)です", "今日は2026年11月30日(火)です", "2026年11月30日(月)", "2026年11月30日(火)"),
    ("30 de noviembre de 2026", "1 de diciembre de 2026", "30 de noviembre de 2026", "1 de diciembre de 2026"),
    ("понедельник, 30 ноября 2026", "вторник, 1 декабря 2026", "понедельник, 30 ноября 2026", None),
    ("30 listopada 2026", "1 grudnia 2026", "30 listopada 2026", "1 grudnia 2026"),
    ("12.05 Uhr", "12.47 Uhr", "12.05 Uhr", "12.47 Uhr"),
    ("13h05", "13h47", "13h05", "13h47"),
    ("It is 2 PM", "It is 3 PM", "2 PM", "3 PM"),
    ("Today is Monday.", "Today is Tuesday.", "Monday", "Tuesday"),
    ("in 2025 we", "in 2026 we", "2025", "2026"),
    ("1764504000123", "1764507600456", "1764504000123", "1764507600456"),
    ("12.5 s elapsed", "13.1 s elapsed", "12.5 s elapsed", "13.1 s elapsed"),
    ("vor 3 Minuten", "vor 5 Minuten", "vor 3 Minuten", "vor 5 Minuten"),
]
NO_CLOCKS = [
    ("at most 3 sentences", "at most 5 sentences"),
    ("version 2.10.26", "version 2.11.26"),
    ("1234567890", "1987654321"),
    ("10.0.0.12", "10.0.0.15"),
    ("You may go", "You mar go"),
    ("the sun is", "the sat is"),
    ("ratio 3:1", "ratio 4:1"),
    ("room 25:70", "room 26:70"),
    ("a1b2c3d4-2025-4e5f-8888-123456789abc", "a1b2c3d4-2026-4e5f-8888-123456789abc"),
    ("$2000", "$2010"),
    ("1995 words", "2020 words"),
    ("model-2024", "model-2025"),
    ("31.02.2026", "31.04.2026"),
    ("step 3 of 5", "step 4 of 5"),
]
IDENTIFIERS = [
    ("req_8f3ac1", "req_19bd07"),
    ("6fa459ea-ee8a-4ca4-894e-db77e160355e", "16fd2706-8baf-433b-82eb-8c7fada847da"),
    ("01HX3V8K2M5T7W9Y4N6P8R0S1Q", "01HX3V8K9A5T7W9Y4N6P8R0S1Q"),
    ("DE89 3704 0044 0532 0130 00", "DE12 5001 0517 0648 4898 90"),
    ("4871 2290 0315", "4871 3010 7722"),
    ("+49 30 1234567", "+49 30 7654321"),
    ("ada@example.org", "bob.k@example.com"),
    ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b71-01"),
    ("ticket #4711", "ticket #5012"),
    ("user id: 17", "user id: 3"),
    ('"user_id": "u-8812"', '"user_id": "u-9034"'),
    ("10.0.0.12", "10.0.3.7"),
    ("x9Kd83LmQz2", "Tr41pWq8Zb0"),
]
NO_IDENTIFIERS = [
    ("Temperature: 20", "Temperature: 25"),
    ("helpful", "careful"),
    ("Python 3.11", "Python 3.12"),
    ("$2,000", "$3,000"),
    ("deadbeef", "feedface"),
    ("rule 7", "rule 8"),
    ("order 3 bells", "order 4 bells"),
]


@pytest.mark.parametrize(("first", "second", "own", "other"), CLOCKS)
def test_clocks(first: str, second: str, own: str, other: str | None) -> None:
    """The whole expression is found, though only its middle differs."""
    found = clock(first, second, common_prefix(first, second))
    assert found is not None
    assert first[slice(*found[0])] == own
    assert second[slice(*found[1])] == (second if other is None else other)


@pytest.mark.parametrize(("first", "second"), NO_CLOCKS)
def test_no_clocks(first: str, second: str) -> None:
    assert clock(first, second, common_prefix(first, second)) is None


@pytest.mark.parametrize(("first", "second"), IDENTIFIERS)
def test_identifiers(first: str, second: str) -> None:
    assert identifier(f"It is {first}.", f"It is {second}.", 6 + common_prefix(first, second)) is not None


@pytest.mark.parametrize(("first", "second"), NO_IDENTIFIERS)
def test_no_identifiers(first: str, second: str) -> None:
    assert identifier(f"It is {first}.", f"It is {second}.", 6 + common_prefix(first, second)) is None


def test_what_is_shared() -> None:
    assert shared("one\ntwo\nthree\n", "three\none\nfour\n") == len("three\none\n") + 1  # in any order; and the end
    assert shared("a b c d e f g", "x b c d e f y") == len("b c d e f")  # a run of words
    assert shared("the cat and the dog", "the dog or a cat") == 0  # words that merely occur
    assert shared("x" * 10, "y" * 3 + "x" * 7) == 7  # one word, the end is equal
    assert shared("l\nl\n.", "l\nl\nl\nl\n!") == 4  # as often as both have it
    assert similarity("", "") == 1
    assert similarity("a b c d e", "") == 0


def test_what_is_lost_ends_where_the_answer_begins(smollm: Tokenizer) -> None:
    chat = Conversations(smollm)

    def prompt(time: str, question: str) -> str:
        return f"<|im_start|>system\nIt is {time} now.\nBe brief.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"

    found = []
    for time, question in (("12:05", "Why?"), ("12:47", "Why?"), ("12:47", "When is it?")):
        messages = [
            {"role": "system", "content": f"It is {time} now.\nBe brief."},
            {"role": "user", "content": question},
        ]
        found.append(locate(chat.render(messages, ChatOptions())))
        assert found[-1].text == prompt(time, question) + "<|im_start|>assistant\n"
    behind = " now.\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert compare(found[0], found[1]).lost_characters == len(behind + "Why?<|im_end|>\n")
    other = compare(found[0], found[2])
    assert (other.cause, other.piece) == ("clock", PromptPiece("system", 0, "system"))
    assert len("Be brief.<|im_end|>\n<|im_start|>user\n") <= other.lost_characters < len(behind + "Why?<|im_end|>\n")
    assert compare(found[1], found[2]).lost_characters <= len("?<|im_end|>\n")  # another question loses nothing


def test_tokens_can_differ_where_texts_agree() -> None:
    text = plain("It is the model's own answer, in other tokens.")
    found = compare(text, text, 10, retokenized=True)
    assert (found.offset, found.cause, found.piece) == (10, "retokenized", PromptPiece("text"))
    assert found.lost_characters == len(text.text) - 10
    assert compare(text, text, 10).cause is None


def test_a_token_that_begins_before_the_difference() -> None:
    found = compare(plain("At 12:05 the shop closes for the day."), plain("At 12:47 the shop closes for the day."), 4)
    assert found.offset == len("At 12:")
    assert found.cause == "clock"


def test_an_answer_that_comes_back_changed(smollm: Tokenizer) -> None:
    """The cache holds what the model wrote; the next request shows it otherwise."""
    chat = Conversations(smollm)
    question = [{"role": "user", "content": "Which oil?"}]
    answer = "A wet lubricant stays on the chain in rain and snow."
    asked = locate(chat.render(question, ChatOptions()))

    def next_turn(shown: str) -> tuple[str | None, PromptPiece | None]:
        messages = [*question, {"role": "assistant", "content": shown}, {"role": "user", "content": "Why?"}]
        found = compare(asked.with_answer(f"{answer}<|im_end|>"), locate(chat.render(messages, ChatOptions())))
        return found.cause, found.piece

    own = PromptPiece("message", 1, "assistant")
    assert next_turn(answer) == (None, own)  # it goes on behind the end token
    assert next_turn(answer.replace("wet", "wet and thick")) == ("history_changed", own)
    assert next_turn(answer.replace("wet ", "wet  ")) == ("whitespace", own)
    assert next_turn("We have none.") == (None, own)  # another answer, of another request


def test_order() -> None:
    assert order("abc", "abc", [1, 1, 1]) == (3, False, 1.0)
    assert order("abc", "cab", [1, 1, 2]) == (3, True, 1.0)
    assert order("abc", "xbc", [2, 1, 1]) == (2, False, 0.5)
    assert order("aba", "ba", [1, 1]) == (1, False, 1.0)  # one of two equal members is gone
    assert order("", "a", [0]) == (0, False, 0.0)


@pytest.mark.parametrize(
    ("cached", "asked"),
    [
        ('{"a": 1, "b": 2}', '{"a": true, "b": 2}'),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 3}'),
        ('{"a": "é", "b": 2}', '{"a": "\\u00e9", "b": 2}'),
        ('[{"name": "Ada", "age": 3}]', '[{"name": "Ada", "age": 4}]'),
    ],
)
def test_json_with_other_values_is_no_order(cached: str, asked: str) -> None:
    assert compare(plain(f"Say it in words: {cached}"), plain(f"Say it in words: {asked}")).cause is None


def test_records_are_no_tools() -> None:
    first, second = '{"name": "bell", "price": 4, "description": "Loud."}', '{"name": "lamp", "price": 9, "args": 1}'
    found = compare(plain(f"Goods: [{first}, {second}]"), plain(f"Goods: [{second}, {first}]"))
    assert (found.cause, found.reusable_share) == ("document_order", 1.0)


def test_histories_that_say_nothing() -> None:
    def turns(*contents: str) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]

    assert history(turns("a"), turns("a", "b", "c")) is None
    assert history(turns("a", "b", "Thanks"), turns("x", "y", "Thanks")) is None
    assert history(turns("Hi"), turns("Hi there", "Hello", "What now?")) is None
    assert history(turns("a", "b", "c"), turns("c", "d", "e")) == "history_truncated"
    assert history(turns("a", "b", "c", "d", "e"), turns("a", "x", "c", "d", "e")) == "history_changed"
    assert history([], turns("a")) is None


def test_a_message_without_a_piece_of_its_own() -> None:
    """Where a tool's definition is taken to cover a message, the other prompt's text is read without its markup."""
    text = "<bos>f;<user>hello<model>"
    tool, rest = Piece(PromptPiece("tools", 0), 0, 18), Piece(PromptPiece("generation"), 18, len(text))
    actual = PromptText(text, (tool, rest), ({"role": "user", "content": "hello"},), contents={0: (13, 18)})
    assert compare(plain("<bos>f;<user>other<model>"), actual).cause is None
