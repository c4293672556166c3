"""Sentencepiece vocabularies as ``tokenizers`` objects: from a GGUF's metadata or from a tokenizer.model file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foreword.core.errors import ModelLoadError

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


def build_bpe(
    pieces: Sequence[Piece], *, add_space_prefix: bool, collapse_spaces: bool = False
) -> tokenizers.Tokenizer:
    """The tokenizer that merges, like sentencepiece in BPE mode, the adjacent pair whose piece has the best score.

    Args:
        add_space_prefix: text starts with a space that is not there.
        collapse_spaces: runs of spaces count as one, and spaces at the ends are dropped.
    """
    from tokenizers import Tokenizer, models

    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    has_bytes = any(piece.kind == BYTE for piece in pieces)
    model = models.BPE(vocab, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    return _finish(Tokenizer(model), pieces, add_space_prefix, collapse_spaces)


def build_unigram(
    pieces: Sequence[Piece], *, add_space_prefix: bool, collapse_spaces: bool = False
) -> tokenizers.Tokenizer:
    """The tokenizer that, like sentencepiece in unigram mode, takes the split with the best sum of scores."""
    from tokenizers import Tokenizer, models

    unknown = next((index for index, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    has_bytes = any(piece.kind == BYTE for piece in pieces)
    vocab = [(piece.text, piece.score) for piece in pieces]
    model = models.Unigram(vocab, unk_id=unknown, byte_fallback=has_bytes)
    return _finish(Tokenizer(model), pieces, add_space_prefix, collapse_spaces)


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


def _finish(
    backend: tokenizers.Tokenizer, pieces: Sequence[Piece], add_space_prefix: bool, collapse_spaces: bool
) -> tokenizers.Tokenizer:
    """Add what surrounds the model: spaces are written as U+2581 on the way in and read back on the way out."""
    from tokenizers import Regex, decoders, normalizers

    steps: list[Any] = []
    if collapse_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
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


def tokenizer_from_model(file: Path, options: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer in a tokenizer.model file, with the added tokens of ``options`` (tokenizer_config.json).

    Raises:
        ModelLoadError: the file is damaged, or normalises text in a way that is not supported.
    """
    from tokenizers import AddedToken

    try:
        model = _read_model(file.read_bytes())
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise ModelLoadError(f"{file} is no sentencepiece model that can be read: {error}") from error
    build = {1: build_unigram, 2: build_bpe}.get(model.algorithm)
    if build is None:
        raise ModelLoadError(
            f"{file} uses the sentencepiece algorithm {model.algorithm}: only unigram and BPE are read"
        )
    if model.rewrites_characters:
        raise ModelLoadError(
            f"{file} rewrites characters before tokenizing (normalizer {model.normalizer!r}): this is not supported; "
            "save the checkpoint's tokenizer as tokenizer.json with transformers' AutoTokenizer"
        )
    backend = build(model.pieces, add_space_prefix=model.add_space_prefix, collapse_spaces=model.collapse_spaces)
    listed = options.get("added_tokens_decoder", {})
    for token_id, token in sorted(listed.items(), key=lambda item: int(item[0])):
        added = AddedToken(token["content"], special=bool(token.get("special")), normalized=False)
        backend.add_tokens([added])
        if backend.token_to_id(token["content"]) != int(token_id):
            raise ModelLoadError(f"{file.parent / 'tokenizer_config.json'}: token {token_id} is not the next free id")
    return backend


class _Model(NamedTuple):
    pieces: list[Piece]
    algorithm: int
    normalizer: str
    rewrites_characters: bool
    add_space_prefix: bool
    collapse_spaces: bool


def _read_model(data: bytes) -> _Model:
    """Read the parts of sentencepiece's ``ModelProto`` that decide how text is tokenized."""
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
            pieces.append(Piece(piece[1].decode("utf-8"), score, piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    name = normalizer.get(1, b"").decode("utf-8", "replace")
    return _Model(
        pieces,
        algorithm=trainer.get(3, 1),
        normalizer=name,
        rewrites_characters=bool(normalizer.get(2)) and name != "identity",
        add_space_prefix=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of the fields of a protocol buffer message: int for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field of unknown wire type {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError("it is truncated")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
