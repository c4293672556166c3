"""The tokenizer of a directory: the default model's, and small ones written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from foreword.core.errors import ModelLoadError
from foreword.text.chat import render_chat
from foreword.text.conversation import encode_chat
from foreword.text.tokenizer import Tokenizer

# The ids that llama.cpp and the original tokenizer give.
KNOWN_IDS = {
    "a  3": [81, 256, 35],
    "x\n\n1. foo\n2. bar": [104, 1116, 33, 30, 29856, 198, 34, 30, 2753],
    "  12": [256, 33, 34],
    "\n\n\n42 is": [16506, 36, 34, 314],
    "price:  $3.50": [17517, 42, 216, 1885, 35, 30, 37, 32],
    "v2.0": [102, 34, 30, 32],
    "abc123def": [25276, 33, 34, 35, 1604],
    "tab\t\t7": [15999, 1656, 39],
}
# The vocabulary, as trained, lacks some control characters and the bytes that begin planes 4 and above.
TEXT = st.text(
    st.characters(max_codepoint=0xD7FF, exclude_characters="\x04\x06\x13\x14\x16\x1d") | st.sampled_from("🤗🇫🇷𝛑")
)
MESSAGES = [{"role": "user", "content": "Hello  12"}]


def write(directory: Path, *, post: bool = False, **files: Any) -> Path:
    """A byte-level tokenizer directory with the tokens <s> (0), </s> (1), <end> (2), then all single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", "<end>", *alphabet]
    backend = Backend(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=True) for name in names[:3]] + [AddedToken("ünit", normalized=False)])
    if post:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(8)  # as some checkpoints ship it
    backend.enable_padding(length=16)
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


CONFIG = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}


@pytest.mark.parametrize(("text", "ids"), KNOWN_IDS.items())
def test_the_default_model_gives_the_ids_it_was_trained_with(smollm: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm.encode(text) == ids


@given(text=TEXT)
def test_encoding_and_decoding_gives_the_text_back(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


@given(text=TEXT)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(smollm: Tokenizer, text: str) -> None:
    assert b"".join(smollm.token_bytes(token, False) for token in smollm.encode(text)) == text.encode()


def test_properties_of_the_default_tokenizer(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49_152
    assert smollm.bos_token_id == 1
    assert smollm.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert smollm.encode("") == []


def test_trap_25_one_bos_through_the_default_chat_template(smollm: Tokenizer) -> None:
    """<|im_start|> is this model's BOS and opens every turn; the text begins with exactly one."""
    ids = encode_chat(smollm, MESSAGES)
    assert ids[:2] == [1, 9690]  # <|im_start|> system
    assert ids.count(1) == 3  # system, user, assistant
    assert ids == smollm.encode(smollm.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("how", ["post-processor", "add_bos_token"])
def test_trap_25_one_bos_however_the_text_comes(tmp_path: Path, how: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = CONFIG | {"chat_template": template} | ({"add_bos_token": True} if how == "add_bos_token" else {})
    tokenizer = Tokenizer.from_directory(write(tmp_path, post=how == "post-processor", tokenizer_config=config))
    letter = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [0, *letter]
    assert tokenizer.encode("<s>a") == [0, *letter]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [0, *letter]
    assert encode_chat(tokenizer, [{"role": "user", "content": "a"}]) == [0, *letter]
    assert tokenizer.encode("") == [0]


def test_add_bos_token_false_overrules_the_post_processor(tmp_path: Path) -> None:
    config = CONFIG | {"add_bos_token": False}
    tokenizer = Tokenizer.from_directory(write(tmp_path, post=True, tokenizer_config=config))
    assert 0 not in tokenizer.encode("a")


def test_trap_25_without_a_template_there_is_one_bos_too(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, post=True, tokenizer_config=CONFIG))
    assert tokenizer.chat_template is None
    ids = encode_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "User: a\n\nAssistant:"


def test_trap_26_a_conversation_is_tokenized_as_one_string(smollm: Tokenizer) -> None:
    """Seams fall where they fall in the whole text, even where the pieces on their own would give other tokens."""
    assert smollm.chat_template is not None
    text = smollm.chat_template.render(MESSAGES)
    assert encode_chat(smollm, MESSAGES) == smollm.encode(text, add_special_tokens=False)
    assert smollm.encode("Hello wor") + smollm.encode("ld") != smollm.encode("Hello world")  # why it matters


def test_trap_26_a_longer_conversation_begins_with_the_tokens_of_the_shorter(smollm: Tokenizer) -> None:
    longer = [*MESSAGES, {"role": "assistant", "content": " Hi\n"}, {"role": "user", "content": "3.14"}]
    assert smollm.chat_template is not None
    first = smollm.encode(render_chat(smollm.chat_template, MESSAGES, add_generation_prompt=False))
    assert encode_chat(smollm, longer)[: len(first)] == first


def test_end_ids_are_collected_from_every_file(tmp_path: Path) -> None:
    files = {"tokenizer_config": CONFIG, "generation_config": {"eos_token_id": [2, 7]}, "config": {"eos_token_id": 9}}
    assert Tokenizer.from_directory(write(tmp_path, **files)).eos_token_ids == {1, 2, 7, 9}


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, tokenizer_config={}, special_tokens_map=CONFIG))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, {1})


def test_texts_are_never_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    assert len(tokenizer.encode("abcdefghijkl")) == 12
    assert len(tokenizer.encode("a")) == 1


def test_tokens_outside_the_vocabulary_are_empty(smollm: Tokenizer) -> None:
    assert [smollm.token_bytes(token) for token in (49_152, 10**9, -1)] == [b"", b"", b""]
    assert smollm.decode([49_152, -1, 35]) == "3"


def test_an_added_token_stands_for_its_own_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    [token] = tokenizer.encode("ünit")
    assert tokenizer.token_bytes(token) == "ünit".encode()
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(2, skip_special_tokens=False) == b"<end>"


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", "named"])
def test_where_chat_templates_are_found(tmp_path: Path, place: str) -> None:
    source: Any = "from " + place
    if place == "named":
        source = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": source}]
        place = "tokenizer_config.json"
    write(tmp_path, tokenizer_config={"chat_template": "overruled"})
    text = source if place.endswith(".jinja") else json.dumps({"chat_template": source})
    (tmp_path / place).write_text(text)
    template = Tokenizer.from_directory(tmp_path).chat_template
    assert template is not None
    assert template.render(MESSAGES).startswith("from ")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (write(tmp_path) / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_directory(tmp_path)


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)


def test_a_broken_chat_template_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json.*no valid jinja2"):
        Tokenizer.from_directory(write(tmp_path, tokenizer_config={"chat_template": "{% if %}"}))
