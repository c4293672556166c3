"""Sentencepiece vocabularies, checked against a plain reference of sentencepiece's own algorithm."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.errors import ModelLoadError
from foreword.text.detokenizer import IncrementalDetokenizer
from foreword.text.gguf_tokenizer import build_tokenizer
from foreword.text.sentencepiece import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, Piece
from foreword.text.tokenizer import Tokenizer

WORDS = ["ab", "abc", "bc", "ca", SPACE + "a", SPACE + "ab", "é", SPACE + SPACE, "cab", SPACE + "cab", "bb", "bbb"]
PIECES = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
PIECES += [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
PIECES += [Piece(text, -float(rank), NORMAL) for rank, text in enumerate([*WORDS, SPACE, "a", "b", "c"])]


def reference(text: str) -> list[str]:
    """Merge the leftmost adjacent pair with the best score until there is none; then spell the rest in bytes."""
    scores = {piece.text: piece.score for piece in PIECES if piece.kind == NORMAL}
    parts = list((" " + text).replace(" ", SPACE)) if text else []
    while True:
        pairs = [
            (-scores[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [part for parts in spelled for part in parts]


def field(number: int, value: int | bytes | float) -> bytes:
    """One field of a protocol buffer message; numbers stay below 128 here."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3, value])
    size = len(value)
    return bytes([number << 3 | 2, size & 0x7F | 0x80, size >> 7]) + value


def model_file(directory: Path, *, algorithm: int = 2, charsmap: bytes = b"", collapse: int = 0) -> Path:
    pieces = [field(1, field(1, p.text.encode()) + field(2, p.score) + field(3, p.kind)) for p in PIECES]
    normalizer = field(1, b"nmt_nfkc") + field(2, charsmap) + field(3, 1) + field(4, collapse)
    file = directory / "tokenizer.model"
    file.write_bytes(b"".join(pieces) + field(2, field(3, algorithm)) + field(3, normalizer))
    return file


def metadata(**changes: Any) -> dict[str, Any]:
    entries = {"model": "llama", "tokens": [p.text for p in PIECES], "scores": [p.score for p in PIECES]}
    entries |= {"token_type": [p.kind for p in PIECES], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items()}


GGUF = build_tokenizer(metadata(), "test.gguf")
TOKENIZER = Tokenizer(GGUF.backend, special_tokens=GGUF.special_tokens)


@given(st.text("abc é🤗", max_size=16))
def test_merges_are_sentencepieces(text: str) -> None:
    names = [PIECES[token].text for token in TOKENIZER.encode(text, add_special_tokens=False)]
    assert names == reference(text)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE)))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids[0] == 1
    assert TOKENIZER.decode(ids) == text
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    streamed = "".join(detokenizer.append(token) for token in ids)
    assert streamed == (" " + text if text else "")  # a continuation keeps its leading space


def test_a_gguf_without_space_prefix() -> None:
    backend = build_tokenizer(metadata(add_space_prefix=False, add_bos_token=False), "test.gguf").backend
    assert backend.encode("ab").tokens == ["ab"]


def test_a_directory_with_only_a_sentencepiece_model(tmp_path: Path) -> None:
    model_file(tmp_path)
    config = """{"bos_token": "<s>", "add_bos_token": true, "added_tokens_decoder":
        {"1": {"content": "<s>", "special": true}, "275": {"content": "<turn>", "special": true}}}"""
    (tmp_path / "tokenizer_config.json").write_text(config)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("cab é", add_special_tokens=False) == TOKENIZER.encode("cab é", add_special_tokens=False)
    assert tokenizer.encode("ab<turn>")[0] == 1
    assert tokenizer.encode("ab<turn>")[-1] == 275


def test_unigram_takes_the_best_sum_of_scores(tmp_path: Path) -> None:
    model_file(tmp_path, algorithm=1)
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("cab", add_special_tokens=False)
    assert [PIECES[token].text for token in ids] == [SPACE + "cab"]  # -9 beats any split


def test_spaces_are_collapsed_where_the_model_says_so(tmp_path: Path) -> None:
    model_file(tmp_path, collapse=1)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("  ab   cab ") == tokenizer.encode("ab cab")
    assert tokenizer.decode(tokenizer.encode("ab\n\n cab")) == "ab\n\n cab"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: model_file(path, algorithm=3), "algorithm 3"),
        (lambda path: model_file(path, charsmap=b"x"), "nmt_nfkc"),
        (lambda path: (path / "tokenizer.model").write_bytes(b"\x0a\x7fshort"), "truncated"),
        (lambda path: (path / "tokenizer.model").write_bytes(b""), "no pieces"),
        (lambda path: (path / "tokenizer.model").write_bytes(b"\xff"), "no sentencepiece model"),
    ],
)
def test_models_that_cannot_be_read_are_named(tmp_path: Path, make: Any, said: str) -> None:
    make(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"tokenizer\.model.*{said}"):
        Tokenizer.from_directory(tmp_path)
