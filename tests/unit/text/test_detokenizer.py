"""Incremental detokenization, on the default model's tokenizer and on a sentencepiece-like stub."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreword.text.detokenizer import IncrementalDetokenizer
from foreword.text.tokenizer import Tokenizer

TOKEN_IDS = st.lists(st.integers(0, 49_151), max_size=30)
# Ids 3 to 300 hold the single bytes, so that broken characters are frequent.
BYTE_IDS = st.lists(st.integers(0, 300), max_size=30)
# What may complete an unfinished character.
TAILS = [bytes([a]) for a in range(0x80, 0xC0)] + [bytes([a, 0x80]) for a in range(0x80, 0xC0)]
TAILS += [bytes([a, 0x80, 0x80]) for a in range(0x80, 0xC0)]


class Counting:
    """A tokenizer that counts look-ups and offers nothing else."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.calls = 0

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        self.calls += 1
        return self.tokenizer.token_bytes(token_id, skip_special_tokens)


class Bytes:
    """Token id n is the byte n."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:  # noqa: ARG002
        return bytes([token_id])


def pieces(tokenizer: Tokenizer | Counting | Bytes, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt or [])
    return [detokenizer.append(token) for token in ids]


@given(text=st.text())
def test_pieces_add_up_to_the_text(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert "".join(pieces(smollm, ids)) == smollm.decode(ids, skip_special_tokens=True)


@given(ids=st.one_of(TOKEN_IDS, BYTE_IDS))
def test_trap_24_no_half_characters_and_no_premature_replacement(smollm: Tokenizer, ids: list[int]) -> None:
    """At every point the text so far is what all bytes so far say, less an unfinished character at the end."""
    detokenizer = IncrementalDetokenizer(smollm)
    text, data = "", b""
    for token in ids:
        text += detokenizer.append(token)
        data += smollm.token_bytes(token)
        whole = data.decode("utf-8", "replace")
        unfinished = whole != text
        assert whole == text + "\ufffd" * unfinished
        if unfinished:  # then more bytes can still turn the end into a character
            assert any(
                (data + tail).decode("utf-8", "replace").count("\ufffd") < whole.count("\ufffd") for tail in TAILS
            )


@given(ids=st.one_of(TOKEN_IDS, BYTE_IDS))
def test_agrees_with_the_tokenizers_library(smollm: Tokenizer, ids: list[int]) -> None:
    streamed, whole = "".join(pieces(smollm, ids)), smollm.decode(ids)
    assert whole in (streamed, streamed + "\ufffd")  # only an unfinished end differs


def test_a_character_of_four_tokens_comes_out_whole() -> None:
    assert pieces(Bytes(), list("a🤗b".encode())) == ["a", "", "", "", "🤗", "b"]


def test_invalid_bytes_are_replaced_as_soon_as_they_are_known() -> None:
    assert pieces(Bytes(), [0xC3, 0x41, 0x80, 0xE2, 0x82]) == ["", "\ufffdA", "\ufffd", "", ""]


def test_trap_24_a_prompt_that_ends_inside_a_character_leaks_nothing() -> None:
    first, second = "é".encode()
    assert pieces(Bytes(), [second, 0x41], prompt=[0x42, first]) == ["é", "A"]  # completed: it comes out whole
    assert pieces(Bytes(), [0x41, 0x42], prompt=[0x42, first]) == ["A", "B"]  # not completed: no trace of it
    assert pieces(Bytes(), [0x41], prompt=[0x42, first, second]) == ["A"]
    assert pieces(Bytes(), [0xC3, 0x41], prompt=[0x42]) == ["", "\ufffdA"]  # the output's own fault stays visible


def test_trap_24_a_stream_of_replacement_characters_is_linear(smollm: Tokenizer) -> None:
    """20,000 tokens that are each an invalid byte: one look-up per token, one character each, nothing kept."""
    bytes_of = [smollm.token_bytes(token) for token in range(300)]
    invalid = bytes_of.index(b"\x80")  # a continuation byte without a beginning
    counting = Counting(smollm)
    text = pieces(counting, [invalid] * 20_000)
    assert counting.calls == 20_000
    assert text == ["\ufffd"] * 20_000


def test_special_tokens_are_silent_unless_asked_for(smollm: Tokenizer) -> None:
    assert pieces(smollm, [1, 2]) == ["", ""]
    loud = IncrementalDetokenizer(smollm, skip_special_tokens=False)
    assert [loud.append(1), loud.append(2)] == ["<|im_start|>", "<|im_end|>"]
