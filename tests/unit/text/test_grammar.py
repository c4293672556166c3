"""Grammars over the default model's tokens: what may come next, what is refused, and the way out in time."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path
from typing import Any

import pytest

from foreword import StructuredParams, validate_structured
from foreword.text.grammar import GrammarCompiler, GrammarState
from foreword.text.reasoning import Reasoning
from foreword.text.tokenizer import Tokenizer
from foreword.text.tools.hermes import GenericFormat

VOCAB = 49_152
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "größe": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "boss": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "boss"],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PERSON}}


@pytest.fixture(scope="module")
def compiler(smollm: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(smollm, VOCAB)


def start(compiler: GrammarCompiler, reasoning: Reasoning | None = None, **params: Any) -> GrammarState:
    return compiler.start(StructuredParams(**params), GenericFormat(), reasoning)


def allowed(state: GrammarState) -> list[int]:
    mask = state.mask()
    return [token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1]


def accepts(state: GrammarState, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole ``text`` matches. Each token must be in the mask before it is taken."""
    for token in tokenizer.encode(text):
        if token not in allowed(state):
            return False
        state.advance(token)
    return state.complete


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"name": "Zoë \\"Z\\" O\'Neil", "größe": 1.75, "tags": ["a", "b"], "boss": null}', True),
        ('{"name": "A", "boss": {"name": "B", "boss": null}}', True),
        ('{"name": "A", "größe": 3, "boss": null}', False),
        ('{"name": "A", "tags": ["a", "b", "c", "d"], "boss": null}', False),
        ('{"name": "A"}', False),
        ('{"name": "A", "boss": null, "more": 1}', False),
        ('{"name":"A","boss":null}', False),
    ],
)
def test_json_schema(compiler: GrammarCompiler, smollm: Tokenizer, text: str, valid: bool) -> None:
    assert accepts(start(compiler, json_schema=PERSON), smollm, text) is valid


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"regex": r"[a-c]+/\d{2}\n?"}, ["abc/12", "a/00\n"], ["d/12", "a/123", "a\\/12"]),
        (
            {"choices": ["yes", 'a "quoted"\nline', "ja/はい"]},
            ["yes", 'a "quoted"\nline', "ja/はい"],
            ["no", "yes yes"],
        ),
        ({"grammar": 'root ::= "x" [0-9]+ ("," [0-9]+)*'}, ["x1", "x12,3,456"], ["x", "x1,"]),
        ({"grammar": 'start: "(" start ")" | "."'}, [".", "((.))"], ["((.)"]),
        ({"json_schema": '{"type": "object"}'}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{"]),
    ],
)
def test_other_forms(
    compiler: GrammarCompiler, smollm: Tokenizer, params: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert accepts(start(compiler, **params), smollm, text), text
    for text in bad:
        assert not accepts(start(compiler, **params), smollm, text), text


def test_objects_are_closed_unless_they_say_otherwise(compiler: GrammarCompiler, smollm: Tokenizer) -> None:
    def fits(schema: dict[str, Any], text: str) -> bool:
        return accepts(start(compiler, json_schema=schema), smollm, text)

    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not fits(closed, '{"b": 1}')
    assert fits(closed | {"additionalProperties": True}, '{"b": 1}')
    assert fits({"allOf": [closed, {"properties": {"b": {"type": "integer"}}}]}, '{"a": 1, "b": 1}')
    assert fits(closed | {"required": ["b"]}, '{"b": 1}'), "a key that is required must be possible"


def test_what_constrains_nothing_is_no_obstacle(compiler: GrammarCompiler, smollm: Tokenizer) -> None:
    schema = {
        "type": "array",
        "uniqueItems": False,
        "items": {"type": "string", "format": "password", "description": "format and not and if are words here"},
    }
    assert accepts(start(compiler, json_schema=schema), smollm, '["a", "a"]')


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"properties": {"a": {"items": {"not": {"type": "null"}}}}}}, "#/properties/a/items/not"),
        ({"json_schema": {"type": "string", "format": "iban"}}, "iban"),
        ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "#/pattern"),
        ({"json_schema": {"$ref": "#/$defs/Gone"}}, "#/$ref"),
        ({"json_schema": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "oneOf"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}]}, "'f'"),
        ({"regex": "(?!a)"}, "regex="),
        ({"grammar": "start: ("}, "grammar="),
    ],
)
def test_a_refusal_names_the_keyword(compiler: GrammarCompiler, params: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="honoured") as refused:
        validate_structured(StructuredParams(**params))
    assert named in str(refused.value)
    with pytest.raises(ValueError, match="honoured"):
        start(compiler, **params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "asks for nothing"),
        ({"regex": "a", "choices": ["b"]}, "cannot be combined"),
        ({"regex": "a", "tools": [TOOL]}, "only json_schema"),
        ({"choices": []}, "choices="),
        ({"choices": "yes"}, "choices="),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": [1]}, "json_schema="),
        ({"tools": [TOOL, TOOL]}, "two tools"),
        ({"tools": [TOOL], "tool_choice": "other"}, "'look'"),
        ({"tools": [{"name": "bare"}]}, "function"),
        ({"json_schema": {}, "tool_choice": "any"}, "no tools"),
    ],
)
def test_malformed_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredParams(**params)


def test_a_thought_may_come_first(compiler: GrammarCompiler, smollm: Tokenizer) -> None:
    answer = '{"name": "A", "boss": null}'
    free = start(compiler, Reasoning(), json_schema=PERSON)
    assert accepts(free.fork(), smollm, answer)
    assert accepts(free.fork(), smollm, f"<think>\n{{no}} JSON\n</think>\n\n{answer}")
    assert not accepts(free.fork(), smollm, f"no thought {answer}")
    opened = start(compiler, Reasoning(opened=True), json_schema=PERSON)
    assert accepts(opened.fork(), smollm, f"hm\n</think>\n\n{answer}")
    assert not accepts(opened.fork(), smollm, answer)


def test_forks_go_their_own_ways(compiler: GrammarCompiler, smollm: Tokenizer) -> None:
    first = start(compiler, choices=["ab", "cd"])
    second = first.fork()
    assert accepts(first, smollm, "ab")
    assert first.finished
    assert not second.finished
    assert accepts(second, smollm, "cd")
    with pytest.raises(ValueError, match="grammar cannot go on"):
        second.advance(smollm.encode("x")[0])


def random_walk(state: GrammarState, seed: int, max_tokens: int) -> list[int]:
    """What a sampler without a model would produce: any token the grammar allows, closed in time."""
    rng, ids = random.Random(seed), list[int]()
    while len(ids) < max_tokens and not state.finished:
        token = rng.choice(allowed(state))
        if not state.leaves_room(token, max_tokens - len(ids) - 1):
            token = state.closing_token()
        state.advance(token)
        ids.append(token)
    return ids


@pytest.mark.parametrize("seed", range(12))
def test_json_is_closed_before_the_limit(compiler: GrammarCompiler, smollm: Tokenizer, seed: int) -> None:
    """A sampler that chooses blindly never comes to an end by itself; it always parses all the same."""
    limit = random.Random(seed).randrange(24, 90)
    state = start(compiler, json_schema=PERSON)
    ids = random_walk(state, seed, limit)
    assert len(ids) <= limit
    body = [token for token in ids if token not in smollm.eos_token_ids]
    text = b"".join(smollm.token_bytes(token, False) for token in body).decode()
    assert json.loads(text).keys() >= {"name", "boss"}


def test_calls_are_not_closed_early(compiler: GrammarCompiler) -> None:
    """A call that is cut short is an error to whoever reads it; another call than the model meant would be run."""
    for params in ({"tool_choice": "any"}, {"json_schema": PERSON}):
        state = start(compiler, tools=[TOOL], **params)
        ids = random_walk(state, 0, 40)
        assert len(ids) == 40
        assert not state.closed_early


def test_too_little_room_is_not_fought(compiler: GrammarCompiler) -> None:
    """Where the shortest output does not fit, the model's own choices stand."""
    state = start(compiler, json_schema=PERSON)
    random_walk(state, 0, 5)
    assert not state.closed_early


def test_a_closing_does_not_depend_on_what_others_met(compiler: GrammarCompiler, smollm: Tokenizer) -> None:
    """The way out is found anew by each completion, so that the same seed gives the same tokens after any others."""
    mail = {
        "type": "object",
        "properties": {"to": {"type": "string", "format": "email"}, "at": {"type": "string", "format": "date-time"}},
        "required": ["to", "at"],
    }
    alone = [
        random_walk(GrammarCompiler(smollm, VOCAB).start(StructuredParams(json_schema=mail), GenericFormat()), 3, 44)
    ]
    for seed in range(6):
        random_walk(start(compiler, json_schema=mail), seed + 10, 40 + seed)
    alone.append(random_walk(start(compiler, json_schema=mail), 3, 44))
    assert alone[0] == alone[1]


def test_tags_of_thoughts_may_be_special_tokens(smollm: Tokenizer) -> None:
    """Text cannot spell a special token; where a model has tags as such, the grammar names them."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(smollm._backend.to_str())
    backend.add_special_tokens([AddedToken("<think>", special=True), AddedToken("</think>", special=True)])
    tokenizer = Tokenizer(backend, special_tokens=smollm.special_tokens, eos_token_ids=smollm.eos_token_ids)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def follows(reasoning: Reasoning, text: str) -> bool:
        state = start(compiler, reasoning, choices=["yes"])
        for token in tokenizer.encode(text):
            state.advance(token)
        return state.complete

    assert follows(Reasoning(), "<think>\nhm\n</think>\n\nyes")
    assert follows(Reasoning(), "yes")
    assert follows(Reasoning(opened=True), "hm</think>yes")
    with pytest.raises(ValueError, match="cannot go on"):
        follows(Reasoning(), "<think>hm</think>no")


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(a{1000}){1000}"},
        {"grammar": "start: start"},
        {"json_schema": {"required": 5}},
        {"json_schema": {"anyOf": 5}},
        {"json_schema": {"titel": "x"}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": object()}}]},
    ],
)
def test_what_can_never_run_is_refused_at_once(compiler: GrammarCompiler, params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"honoured|JSON|object") as refused:
        start(compiler, **params)
    assert len(str(refused.value)) < 300


def test_many_choices_and_names_of_special_tokens(compiler: GrammarCompiler, smollm: Tokenizer) -> None:
    many = start(compiler, choices=[f"choice {number}" for number in range(5000)])
    assert accepts(many, smollm, "choice 4321")
    state = start(compiler, choices=["x <|im_end|> y"])
    ids = random_walk(state, 0, 60)
    text = b"".join(smollm.token_bytes(token) for token in ids if token not in smollm.eos_token_ids).decode()
    assert text == "x <|im_end|> y"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}, "q": {"type": "integer"}}, "required": ["q"]},
        {"type": "string", "pattern": "^[0-9]+px$"},
        {"type": "string", "pattern": "^\\+?[0-9 ]+#$"},
    ],
)
def test_ways_out_that_are_hard_to_find(compiler: GrammarCompiler, smollm: Tokenizer, schema: dict[str, Any]) -> None:
    for seed in range(6):
        ids = random_walk(start(compiler, json_schema=schema), seed, 40)
        json.loads(b"".join(smollm.token_bytes(token) for token in ids if token not in smollm.eos_token_ids))


def test_a_compiler_that_nobody_uses_is_freed(tiny_dir: Path) -> None:
    """With its tokenizer and its table, which are large: an engine that is closed leaves nothing of them."""
    tokenizer = Tokenizer.from_directory(tiny_dir)
    compiler = GrammarCompiler(tokenizer, 260)
    compiler.start(StructuredParams(json_schema={"type": "object"}), GenericFormat()).mask()
    gone = weakref.ref(tokenizer)
    del tokenizer, compiler
    gc.collect()
    assert gone() is None


def holds(state: GrammarState, tokens: list[int]) -> bool:
    """Whether these tokens match, all of them; quicker than :func:`accepts`, which looks at the masks."""
    matcher = state._matcher.deep_copy()
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


_AT = (0, 1, 0.5, 0.05, -0.5, -1, 2, 1.5, -1.5)
_NUMBERS = [
    *(f"{sign}{number}" for sign in ("", "-") for number in (0, "0.0", 1, "1.0", 2, 10, 0.5, 0.49, 0.51, 0.1, 0.05)),
    *(f"{sign}{number}" for sign in ("", "-") for number in (0.3, 0.9, 0.001, 1.01, 1.4, 1.5, 1.6, 2.01, "0.052")),
    *(
        f"{sign}{number}"
        for sign in ("", "-")
        for number in ("0.000000001", "0.999999999", "1.000000001", "0.0000000001")
    ),
]


@pytest.mark.parametrize(("kind", "step"), [("number", None), ("number", 0.1), ("integer", None), (None, None)])
def test_no_number_beyond_its_bounds(
    compiler: GrammarCompiler, smollm: Tokenizer, kind: str | None, step: float | None
) -> None:
    """All pairs of bounds, also those that are less than one apart and those that leave one number or none."""
    import jsonschema

    lower = [{}, *({key: at} for key in ("minimum", "exclusiveMinimum") for at in _AT)]
    upper = [{}, *({key: at} for key in ("maximum", "exclusiveMaximum") for at in _AT)]
    spelled = {text: smollm.encode(text) for text in _NUMBERS}
    wrong, held = [], 0
    for bounds in (low | high for low in lower for high in upper):
        schema = bounds | ({"type": kind} if kind else {})
        try:
            state = start(compiler, json_schema=schema | ({"multipleOf": step} if step else {}))
        except ValueError:  # no number is left, or none that the library finds
            continue
        valid = jsonschema.Draft202012Validator(schema).is_valid
        found = [text for text, tokens in spelled.items() if holds(state, tokens)]
        held += len(found)
        wrong += [(schema, text) for text in found if not valid(json.loads(text))]
    assert held > 300
    assert wrong == []


@pytest.mark.parametrize(("bounds", "text"), [
    ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.1"), ({"exclusiveMinimum": 1, "maximum": 1.5}, "1.000000001"),
    ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.1"), ({"exclusiveMinimum": 3, "maximum": 4}, "4"),
    ({"exclusiveMinimum": 10**7, "maximum": 10**7 + 1}, "10000000.5"),
])  # fmt: skip
def test_what_lies_beyond_a_whole_number_is_left(
    compiler: GrammarCompiler, smollm: Tokenizer, bounds: dict[str, Any], text: str
) -> None:
    assert accepts(start(compiler, json_schema={"type": "number"} | bounds), smollm, text)


_MORE = {"type": "integer", "minimum": 10}


@pytest.mark.parametrize("others", [True, {"type": "string"}])
@pytest.mark.parametrize(
    ("names", "more"),
    [
        (["a"], {}),
        (["ab", "abc", "ü", 'q"', "/-^]", ""], {"required": ["ab"]}),
        (["a" * 60, "a"], {"required": ["z"]}),
        ([f"{i} is a key" for i in range(100)], {}),
        (["a"], {"patternProperties": {"^ab": {"type": "integer"}}}),
        ([], {"patternProperties": {"^a": {"type": "integer"}}}),
    ],
)
def test_no_key_slips_past_its_schema(
    compiler: GrammarCompiler, smollm: Tokenizer, names: list[str], more: dict[str, Any], others: Any
) -> None:
    """Keys of the object's own spelled with an escape, in front of keys that are free."""
    import jsonschema

    schema = {"type": "object", "properties": dict.fromkeys(names, _MORE), "additionalProperties": others} | more
    state, held = start(compiler, json_schema=schema), set()
    for name in [*names, "a", "ab", "abx", "b", "ü", "z", "a" * 61, "free key", "q", "/-^]x"]:
        escaped = "".join(f"\\u{ord(char):04x}" for char in name[:1]) + name[1:]
        for key in (json.dumps(name, ensure_ascii=False)[1:-1], escaped):
            for value in ("11", '"x"'):
                text = f'{{"{key}": {value}}}'
                if holds(state, smollm.encode(text)):
                    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
                    held.add(name)
    required = more.get("required")
    assert (required[0] if required else names[0] if names else "a") in held or "patternProperties" in more
    assert required or "patternProperties" in more or "free key" in held
