"""How generated tokens become text, and when a completion ends."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from foreword import OutputChunk, SamplingParams
from foreword.core.request import Request
from foreword.engine.request_state import Completion, RequestState
from foreword.text.tokenizer import Tokenizer
from support import TINY_EOS


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(tiny_dir)


def request(prompt: Seq[int] = (1,), **options: Any) -> Request:
    params = SamplingParams(**options)
    return Request("req-0", 0, list(prompt), params, b"", 0.0, params.max_tokens or 10**6, 0)


def feed(
    tokenizer: Tokenizer, tokens: Seq[int], prompt: Seq[int] = (1,), **options: Any
) -> tuple[Completion, list[str]]:
    """Give tokens one by one until the completion ends; the pieces of text that were shown."""
    completion, pieces = Completion(0, request(prompt, **options), tokenizer), []
    for token in tokens:
        assert completion.finish_reason is None
        pieces.append(completion.append(token, None))
        if completion.finish_reason is not None:
            break
    return completion, pieces


def ending(completion: Completion) -> tuple[str, str | None, str | int | None]:
    return "".join(completion.text), completion.finish_reason, completion.stop_reason


def test_length(tokenizer: Tokenizer) -> None:
    """At ``max_tokens`` it ends, and text held back for a stop string is shown."""
    completion, pieces = feed(tokenizer, b"abcdefgh", max_tokens=4, stop=("dX",))
    assert ending(completion) == ("abcd", "length", None)
    assert pieces == ["a", "b", "c", "d"]


def test_end_token(tokenizer: Tokenizer) -> None:
    """The model's end token ends it without text; held text is shown; with ignore_eos it is a token like others."""
    completion, _ = feed(tokenizer, [*b"ab", TINY_EOS, *b"cd"], stop=("bX",), max_tokens=None)
    assert ending(completion) == ("ab", "stop", None)
    assert completion.token_ids == [*b"ab", TINY_EOS]
    completion, _ = feed(tokenizer, [*b"ab", TINY_EOS, *b"cd"], ignore_eos=True, max_tokens=5)
    assert ending(completion) == ("abcd", "length", None)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_stop_tokens(tokenizer: Tokenizer, include: bool, text: str) -> None:
    """A stop token is the reason given; its text is kept only if asked for."""
    completion, _ = feed(tokenizer, b"abcd", stop_token_ids=(ord("c"),), include_stop_str_in_output=include)
    assert ending(completion) == (text, "stop", ord("c"))


@pytest.mark.parametrize(
    ("stops", "include", "text", "reason"),
    [
        (("lo wo",), False, "hel", "lo wo"),
        (("lo wo",), True, "hello wo", "lo wo"),
        (("world", "o"), False, "hell", "o"),
        (("ell", "hell"), False, "", "hell"),
        (("h",), False, "", "h"),
        (("é", "w"), False, "hello ", "w"),
        (("nothing", "hello!"), False, "hello world", None),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, stops: tuple[str, ...], include: bool, text: str, reason: str | None
) -> None:
    """Across token borders the first completed stop string wins; not one of its characters is shown."""
    completion, pieces = feed(tokenizer, b"hello world", stop=stops, include_stop_str_in_output=include, max_tokens=11)
    assert ending(completion) == (text, "stop" if reason else "length", reason)
    assert "".join(pieces) == text


def test_a_stop_string_of_several_bytes_per_character(tokenizer: Tokenizer) -> None:
    """Stop strings are found in characters, not in bytes, and split no character."""
    completion, pieces = feed(tokenizer, "schön 東京です".encode(), stop=("京",), max_tokens=100)
    assert ending(completion) == ("schön 東", "stop", "京")
    assert not any("\ufffd" in piece for piece in pieces)


def test_min_tokens_holds_stops_off(tokenizer: Tokenizer) -> None:
    """Before ``min_tokens`` neither stop tokens, end tokens nor stop strings end it; the next one does."""
    completion, _ = feed(tokenizer, b"xaxbxc", stop=("x",), min_tokens=4, max_tokens=9)
    assert ending(completion) == ("xaxb", "stop", "x")
    completion, _ = feed(tokenizer, [TINY_EOS, 97, TINY_EOS, 98], min_tokens=3, max_tokens=9)
    assert ending(completion) == ("a", "stop", None)
    completion, _ = feed(tokenizer, b"cacb", stop_token_ids=(ord("c"),), min_tokens=2, max_tokens=9)
    assert ending(completion) == ("ca", "stop", ord("c"))


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_whole_characters(tokenizer: Tokenizer, seed: int) -> None:
    """No piece ever ends inside a character, and together they are the text."""
    text = "".join(random.Random(seed).choices("aé東🎉\n\u200d", k=20))
    data = text.encode()
    completion, pieces = feed(tokenizer, data, max_tokens=len(data))
    assert "".join(pieces) == "".join(completion.text) == text


def test_an_unfinished_character_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    """Ending inside a character leaves no U+FFFD."""
    completion, _ = feed(tokenizer, "a東".encode()[:3], max_tokens=3)
    assert ending(completion) == ("a", "length", None)


@pytest.mark.parametrize(("rest", "text"), [("東".encode()[1:] + b"a", "東a"), (b"ab", "ab"), ("é".encode(), "é")])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer, rest: bytes, text: str) -> None:
    """Its half is completed or forgotten, and never leaks as U+FFFD."""
    completion, _ = feed(tokenizer, rest, prompt=[*b"x", "東".encode()[0]], max_tokens=len(rest))
    assert "".join(completion.text) == text


def test_a_request_reports_once_at_its_end_unless_streamed(tokenizer: Tokenizer) -> None:
    """Without streaming the sink hears the last chunk of the last completion only, with everything in it."""
    for stream, expected in ((False, [True]), (True, [False, False, True])):
        heard: list[OutputChunk] = []
        state = RequestState(request(n=2, max_tokens=2), tokenizer, heard.append, stream=stream)
        first, second = state.completions
        state.emit(first, first.append(97, None), [97], None)
        second.finish_reason = "cancelled"
        state.emit(second, "", [], None)
        state.emit(first, first.append(98, None), [98], None)
        assert [chunk.output is not None for chunk in heard] == expected
        output = heard[-1].output
        assert output is not None
        assert [c.finish_reason for c in output.outputs] == ["length", "cancelled"]
        assert (output.text, output.usage.completion_tokens, output.usage.prompt_tokens) == ("ab", 2, 1)
        assert output.usage.time_to_first_token_s is None
        state.detach()
        state.emit(first, "more", [1], None)
        assert len(heard) == len(expected)


class Numbers:
    """A constraint to four digits."""

    closed_early = False

    def __init__(self) -> None:
        self.digits = 0

    def advance(self) -> None:
        self.digits += 1

    @property
    def complete(self) -> bool:
        return self.digits == 4

    finished = complete


@pytest.mark.parametrize(
    ("options", "text", "reason", "complete"),
    [
        ({"max_tokens": 9}, "1234", "stop", True),
        ({"max_tokens": 4}, "1234", "stop", True),
        ({"max_tokens": 1}, "1", "length", False),
        ({"stop": ("2",)}, "1", "stop", False),
        ({"stop": ("34",)}, "12", "stop", False),
        ({"stop": ("34",), "include_stop_str_in_output": True}, "1234", "stop", True),
        ({"stop_token_ids": (ord("4"),)}, "123", "stop", False),
        ({"stop_token_ids": (ord("4"),), "include_stop_str_in_output": True}, "1234", "stop", True),
    ],
)
def test_an_output_that_is_cut_is_not_complete(
    tokenizer: Tokenizer, options: dict[str, Any], text: str, reason: str, complete: bool
) -> None:
    """A number that was cut looks like a whole one: what the constraint still asks for tells them apart."""
    completion, constraint = Completion(0, request(**options), tokenizer), Numbers()
    for token in b"1234":
        constraint.advance()
        completion.append(token, None, constraint)  # type: ignore[arg-type]
        if completion.finish_reason is not None:
            break
    output = completion.output()
    assert (output.text, output.finish_reason, output.complete) == (text, reason, complete)
