"""Sentencepiece vocabularies, checked against a plain reference of sentencepiece's own algorithm."""

from __future__ import annotations

import itertools
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


def test_a_checkpoint_with_only_a_sentencepiece_model_is_told_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)
