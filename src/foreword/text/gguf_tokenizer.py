"""The tokenizer that a GGUF file describes, as a ``tokenizers`` object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foreword.core.errors import ModelLoadError
from foreword.text.sentencepiece import CONTROL, NORMAL, UNUSED, Piece, add_tokens, build_bpe

if TYPE_CHECKING:
    import tokenizers

_CASELESS_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

END_TOKENS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)
"""Control tokens that end a turn or a text wherever they are known, whichever of them the metadata names."""


class GGUFTokenizer(NamedTuple):
    """A tokenizer and what its metadata say about special tokens.

    Attributes:
        add_bos: whether plain text gets a beginning-of-sequence token; the backend's post-processor adds it too.
        eos_token_ids: ids that end a turn or a text, the metadata's own first.
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``: text, where the file names them.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    bos_token_id: int | None
    add_bos: bool


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> GGUFTokenizer:
    """Build the tokenizer from the metadata of a GGUF file: plain Python values by key.

    Args:
        where: the file, for messages.

    Raises:
        ModelLoadError: the file describes no tokenizer, or one of a kind that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    texts: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    if not texts:
        raise ModelLoadError(f"{where} describes no tokenizer: tokenizer.ggml.tokens is missing")
    pieces = _pieces(metadata, texts)
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "default")
        backend = _byte_level_bpe(pieces, metadata.get("tokenizer.ggml.merges"), pre, where)
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3)
    elif kind == "llama":
        backend = build_bpe(pieces, add_space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True))
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", True)
    else:
        raise ModelLoadError(f"{where} uses the tokenizer model {kind!r}: only 'gpt2' and 'llama' are supported")
    ids: dict[str, Any] = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {names[name]: texts[token] for name, token in ids.items() if token is not None and token < len(texts)}
    add_bos = bool(add_bos) and "bos_token" in special
    if add_bos:
        _add_bos_processor(backend, special["bos_token"], ids["bos"])
    return GGUFTokenizer(backend, special, _end_ids(metadata, pieces), ids["bos"], add_bos)


def _pieces(metadata: Mapping[str, Any], texts: Sequence[str]) -> list[Piece]:
    """The vocabulary; unused tokens at its end only pad the embedding matrix and are left out."""
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(texts)
    pieces = [Piece(*entry) for entry in zip(texts, scores, kinds, strict=True)]
    while pieces and pieces[-1].kind == UNUSED:
        pieces.pop()
    return pieces


def _end_ids(metadata: Mapping[str, Any], pieces: Sequence[Piece]) -> list[int]:
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = [index for index, piece in enumerate(pieces) if piece.kind == CONTROL and piece.text in END_TOKENS]
    return list(dict.fromkeys([token for token in named if token is not None] + known))


def _add_bos_processor(backend: tokenizers.Tokenizer, bos: str, bos_id: int) -> None:
    from tokenizers import processors

    template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    own = backend.post_processor
    backend.post_processor = template if own is None else processors.Sequence([own, template])


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_GPT2 = ("gpt-2", "gpt2", "default")
_DIGITS_APART = ("smollm", "starcoder")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")


def _byte_level_bpe(
    pieces: Sequence[Piece], merges: Sequence[str] | None, pre: str, where: str
) -> tokenizers.Tokenizer:
    """BPE over bytes; ``pre`` names how text is cut into words before."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    if merges is None:
        raise ModelLoadError(f"{where} describes no tokenizer: tokenizer.ggml.merges is missing")
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a whole word that is a token as it is, whether or not merges lead to it.
    try:
        backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in _LLAMA3))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{where} describes a damaged tokenizer: {error}") from error
    if pre in _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _DIGITS_APART:
        # Without single digits "12" would be one token, which these models never saw in training.
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif pre in _LLAMA3 or pre in _QWEN2:
        digits = r"\p{N}{1,3}" if pre in _LLAMA3 else r"\p{N}"
        words = pre_tokenizers.Split(Regex(_CASELESS_WORDS + digits + _PUNCTUATION_AND_SPACE), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    else:
        known = ", ".join((*_GPT2, *_DIGITS_APART, *_LLAMA3, *_QWEN2))
        raise ModelLoadError(f"{where} uses the pre-tokenizer {pre!r} (tokenizer.ggml.pre): supported are {known}")
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, pieces)
    return backend
