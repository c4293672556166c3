"""Sentencepiece vocabularies of GGUF files as ``tokenizers`` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces; GGUF uses the same numbers."""


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its position."""

    text: str
    score: float
    kind: int


def build_bpe(pieces: Sequence[Piece], *, add_space_prefix: bool) -> tokenizers.Tokenizer:
    """The tokenizer that merges, like sentencepiece in BPE mode, the adjacent pair whose piece has the best score.

    Args:
        add_space_prefix: text starts with a space that is not there.
    """
    from tokenizers import Tokenizer, models

    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    has_bytes = any(piece.kind == BYTE for piece in pieces)
    model = models.BPE(vocab, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    return _finish(Tokenizer(model), pieces, add_space_prefix)


def add_tokens(backend: tokenizers.Tokenizer, pieces: Sequence[Piece]) -> None:
    """Make control and user-defined pieces tokens that are found in text before anything else."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(piece.text, special=piece.kind != USER_DEFINED, normalized=False)
            for piece in pieces
            if piece.kind in (CONTROL, USER_DEFINED, UNKNOWN) and piece.text
        ]
    )


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first."""
    by_text = {piece.text: piece for piece in pieces if piece.kind in (NORMAL, USER_DEFINED, UNUSED)}
    merges = [
        (-piece.score, text[:cut], text[cut:])
        for text, piece in by_text.items()
        if piece.kind == NORMAL
        for cut in range(1, len(text))
        if text[:cut] in by_text and text[cut:] in by_text
    ]
    merges.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in merges]


def _finish(backend: tokenizers.Tokenizer, pieces: Sequence[Piece], add_space_prefix: bool) -> tokenizers.Tokenizer:
    """Add what surrounds the model: spaces are written as U+2581 on the way in and read back on the way out."""
    from tokenizers import decoders, normalizers

    steps: list[Any] = []
    if add_space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    out: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        out.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(out)
    add_tokens(backend, pieces)
    return backend
