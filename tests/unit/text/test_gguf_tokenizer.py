"""Byte-level tokenizers from GGUF metadata: how text is cut into words before merging."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from foreword.core.errors import ModelLoadError
from foreword.text.gguf_tokenizer import build_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "It's 1234 don'T  x\n\n y!!\n"


def metadata(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    tokens = ["<|begin|>", "<|end|>", "<|im_end|>", "<tool>", *BYTES, "12", "abc", "[PAD0]", "[PAD1]"]
    kinds = [3, 3, 3, 4, *[1] * (len(BYTES) + 2), 5, 5]
    entries = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": ["1 2"]}
    entries |= {"bos_token_id": 0, "eos_token_id": 2} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


def words(pre: str | None) -> list[str]:
    backend = build_tokenizer(metadata(pre), "x.gguf").backend
    pieces = backend.pre_tokenizer.pre_tokenize_str(TEXT)
    return [TEXT[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize("pre", ["gpt-2", "default", None])
def test_gpt2_words(pre: str | None) -> None:
    assert words(pre) == ["It", "'s", " 1234", " don", "'", "T", " ", " x", "\n\n", " y", "!!", "\n"]


def test_smollm_words_have_single_digits() -> None:
    assert words("smollm") == [
        *("It", "'s", " ", "1", "2", "3", "4"),
        *(" don", "'", "T", " ", " x", "\n\n", " y", "!!", "\n"),
    ]


def test_llama3_words_have_up_to_three_digits() -> None:
    assert words("llama-bpe") == [
        *("It", "'s", " ", "123", "4", " don", "'T", " ", " x", "\n\n", " y", "!!\n"),
    ]


def test_qwen2_words_have_single_digits_and_composed_characters() -> None:
    assert words("qwen2") == [
        *("It", "'s", " ", "1", "2", "3", "4", " don", "'T", " ", " x", "\n\n", " y", "!!\n"),
    ]
    backend = build_tokenizer(metadata("qwen2"), "x.gguf").backend
    assert backend.encode("e\u0301").ids == backend.encode("é").ids


def test_llama3_takes_whole_tokens_that_no_merge_leads_to() -> None:
    tokens = metadata()["tokenizer.ggml.tokens"]
    assert [
        tokens[i] for i in build_tokenizer(metadata("llama-bpe"), "x").backend.encode("abc", None, False, False).ids
    ] == ["abc"]
    assert [tokens[i] for i in build_tokenizer(metadata("qwen2"), "x").backend.encode("abc").ids] == ["a", "b", "c"]


def test_control_and_user_tokens_are_found_in_text() -> None:
    backend = build_tokenizer(metadata(), "x.gguf").backend
    assert backend.encode("<tool><|end|>").ids == [3, 1]
    assert backend.decode([3, 1]) == "<tool>"


def test_unused_tokens_at_the_end_are_left_out() -> None:
    assert build_tokenizer(metadata(), "x.gguf").backend.get_vocab_size() == 4 + 256 + 2


def test_bos_is_added_where_the_family_or_the_file_says_so() -> None:
    for pre, said, expected in (("llama-bpe", None, True), ("qwen2", None, False), ("qwen2", True, True)):
        built = build_tokenizer(metadata(pre, add_bos_token=said), "x.gguf")
        assert built.add_bos is expected
        assert built.backend.encode("a").ids[0] == (0 if expected else 4 + BYTES.index("a"))


def test_every_end_token_is_found() -> None:
    assert build_tokenizer(metadata(eos_token_id=1), "x.gguf").eos_token_ids == [1, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "viking"}, "pre-tokenizer 'viking'.*supported are"),
        ({"model": "bert"}, "tokenizer model 'bert'"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"merges": ["a q\u0301"]}, "damaged tokenizer"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
    ],
)
def test_unsupported_tokenizers_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"x\.gguf.*{said}"):
        build_tokenizer(metadata(**changes), "x.gguf")
