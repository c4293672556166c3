"""The tokenizer of a checkpoint directory, through the ``tokenizers`` library alone (transformers takes seconds)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.core.errors import ModelLoadError
from foreword.text.chat import ChatTemplate

if TYPE_CHECKING:
    import tokenizers

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SPACE = "\u2581"  # how sentencepiece writes a space


class Tokenizer:
    """Text to token ids and back. Immutable once built; any number of threads may use it.

    Args:
        backend: the tokenizer itself. Truncation and padding are switched off: a prompt is never cut silently.
        special_tokens: ``bos_token``, ``eos_token`` and their like, as text.
        eos_token_ids: every id that ends a turn or a text.
        add_bos: whether plain text gets a beginning-of-sequence token; None asks the tokenizer's post-processor.
        chat_template: None if the checkpoint has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int] = frozenset(),
        add_bos: bool | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        bos, eos = self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token")
        self.bos_token_id: int | None = backend.token_to_id(bos) if bos else None
        self.eos_token_id: int | None = backend.token_to_id(eos) if eos else None
        own_eos = frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids) | own_eos
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {token: each.content.encode() for token, each in added.items()}
        self.special_token_ids: frozenset[int] = frozenset(token for token, each in added.items() if each.special)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes: dict[int, bytes] = {}  # filled as tokens are asked for
        if add_bos is None:
            add_bos = self.bos_token_id in backend.encode("", add_special_tokens=True).ids[:1]
        self._add_bos = add_bos and self.bos_token_id is not None

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """The tokenizer in a Hugging Face style checkpoint directory.

        Reads tokenizer.json and, if they exist, tokenizer_config.json, special_tokens_map.json,
        generation_config.json, config.json and chat_template.jinja or .json.

        Raises:
            ModelLoadError: no tokenizer, or a file that cannot be read; names the file and the reason.
        """
        path = Path(path)
        options = _read_json(path / "tokenizer_config.json")
        special = _special_tokens(options) or _special_tokens(_read_json(path / "special_tokens_map.json"))
        backend = _load_backend(path)
        add_bos = options.get("add_bos_token")
        return cls(
            backend,
            special_tokens=special,
            eos_token_ids=_eos_ids(path),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            chat_template=_chat_template(path, options, special),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``; special tokens written in it are recognised.

        With ``add_special_tokens`` a beginning-of-sequence token comes first if the model wants one, exactly once:
        none is added to text that starts with it already. No end token is ever added: the text is to be continued.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # the library's words for text that is no Unicode
            raise ValueError("the text holds half a surrogate pair: give valid Unicode") from error
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)  # type: ignore[arg-type]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Invalid bytes give U+FFFD; ids outside the vocabulary give nothing."""
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The raw UTF-8 bytes that a token stands for; they need not be whole characters.

        Special tokens give ``b""``, or their name with ``skip_special_tokens=False``. Ids outside the vocabulary,
        such as those of padded embeddings, give ``b""``.
        """
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether token names are written in the byte alphabet of GPT-2; else they are sentencepiece's."""
        part = self._backend.decoder or self._backend.pre_tokenizer
        return part is not None and b"ByteLevel" in part.__getstate__()

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        name = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if name is None:
            return b""
        if self._is_byte_level:
            alphabet = _byte_alphabet()
            return b"".join(alphabet.get(char) or char.encode() for char in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace(_SPACE, " ").encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's way of writing bytes as printable characters, turned round.

    Bytes that print in Latin-1 stand for themselves; the others, in ascending order, are written U+0100 onwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{file} is missing. If the checkpoint has another form of tokenizer, such as tokenizer.model, write it "
            "once with transformers: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file} is no tokenizer that can be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds a {type(content).__name__} where an object is needed")
    return content


def _special_tokens(options: Mapping[str, Any]) -> dict[str, str]:
    """Name to text of the special tokens; in files each is a string or an object with ``content``."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = options.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_ids(path: Path) -> frozenset[int]:
    """End ids of generation_config.json and config.json, an integer or a list in either."""
    config = _read_json(path / "config.json")
    text_config = config.get("text_config")
    sources = [
        _read_json(path / "generation_config.json"),
        config,
        text_config if isinstance(text_config, dict) else {},
    ]
    ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in given):
            raise ModelLoadError(f"{path}: eos_token_id is {value!r} where an integer or a list of them is needed")
        ids.update(given)
    return frozenset(ids)


def _chat_template(path: Path, options: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    """The template of chat_template.jinja, chat_template.json or tokenizer_config.json, in this order."""
    file = path / "chat_template.jinja"
    try:
        source: Any = file.read_text(encoding="utf-8") if file.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if source is None:
        file = path / "chat_template.json"
        source = _read_json(file).get("chat_template")
    if source is None:
        file, source = path / "tokenizer_config.json", options.get("chat_template")
    if not source:
        return None
    by_name = {"default": source}
    if isinstance(source, list):  # several named templates
        try:
            by_name = {entry["name"]: entry["template"] for entry in source}
        except (KeyError, TypeError) as error:
            raise ModelLoadError(f"{file}: chat_template is a list without names and templates") from error
    try:
        default = by_name.get("default") or next(iter(by_name.values()))
        if not isinstance(default, str):
            raise ValueError(f"chat_template is a {type(default).__name__} where text is needed")
        return ChatTemplate(default, special, tool_source=by_name.get("tool_use"))
    except ValueError as error:
        raise ModelLoadError(f"{file}: {error}") from error
