"""Answers of the default model under real-world schemas all match them; other schemas are refused by name."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.grammar_cases import CASES, Awkward, Text
from foreword import SamplingParams, StructuredParams, validate_structured
from foreword.text.grammar import GrammarCompiler
from foreword.text.tools.hermes import GenericFormat
from structured.case import Case
from structured.schemas import SCHEMAS, UNSUPPORTED

if TYPE_CHECKING:
    from foreword import Engine
    from foreword.text.tokenizer import Tokenizer

MAX_TOKENS = 144  # the longest of the shortest instances needs nine tenths of it
KEYWORDS = """$defs definitions anyOf oneOf allOf enum const minItems maxItems minimum maximum exclusiveMinimum
    exclusiveMaximum multipleOf pattern minLength maxLength patternProperties prefixItems additionalProperties
    minProperties maxProperties discriminator default title"""
FORMATS = "date date-time time duration uuid email ipv4 ipv6 hostname uri"

REFUSED = {
    "$ref to itself only": r"endless|\$ref",
    "$ref to nowhere": r"\$ref",
    "oneOf, overlapping": "oneOf",
    "not": "not",
    "if, then": "if",
    "minimum > maximum": "minimum",
    "pattern with lookahead": "look-around|pattern",
    "format regex": "format",
    "propertyNames": "propertyNames",
    "minProperties, one key twice": "minProperties",
    "dependentRequired": "dependentRequired",
    "unevaluatedProperties": "unevaluatedProperties",
    "uniqueItems": "uniqueItems",
    "contains": "contains",
}
"""By the names of awkward cases: what their refusal says. All others can be honoured."""


def errors_of(case: Case, text: str) -> list[str]:
    """Why ``text`` is no instance; empty if it is one.

    It is judged with floats, as callers parse it, and with decimals, because in floats 4.35 is no multiple of 0.01.
    """
    found = []
    for read in (float, Decimal):
        validator = Draft202012Validator(
            json.loads(case.text, parse_float=read), format_checker=Draft202012Validator.FORMAT_CHECKER
        )
        for error in validator.iter_errors(json.loads(text, parse_float=read)):
            if read is Decimal or error.validator != "multipleOf":
                found.append(f"{error.json_path}: {error.message[:200]}")
    if case.model is not None:
        case.model.model_validate_json(text)
    return found


@pytest.mark.parametrize("count", [len(SCHEMAS), pytest.param(100, marks=pytest.mark.soak)])
def test_answers_match_their_schemas(engine: Engine, count: int) -> None:
    """At temperature 1 a small model rambles: what ``max_tokens`` would have cut short counts here too."""
    cases = [SCHEMAS[seed % len(SCHEMAS)] for seed in range(count)]
    outputs = engine.chat(
        [[{"role": "user", "content": case.prompt}] for case in cases],
        [SamplingParams(seed=seed, structured={"json_schema": case.schema}) for seed, case in enumerate(cases)],
        temperature=1,
        max_tokens=MAX_TOKENS,
    )
    failures = []
    for seed, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        try:
            assert output.finish_reason in ("stop", "length"), output.error
            assert not (errors := errors_of(case, output.text)), errors
        except (AssertionError, ValueError) as error:
            failures.append(f"{case.name}, seed {seed}, {len(output.token_ids)} tokens: {error}\n    {output.text!r}")
    print(Counter(output.finish_reason for output in outputs), *failures, sep="\n")
    assert f"{count - len(failures)} of {count}" == f"{count} of {count}"


def test_the_collection() -> None:
    """Schemas are well formed, their names are unique, and what the collection promises to hold is in it."""
    for case in SCHEMAS:
        Draft202012Validator.check_schema(case.schema)
    assert len({case.name for case in SCHEMAS}) == len(SCHEMAS) >= 34
    texts = "\n".join(case.text for case in SCHEMAS)
    assert [word for word in KEYWORDS.split() if f'"{word}"' not in texts] == []
    assert [name for name in FORMATS.split() if f'"format": "{name}"' not in texts] == []
    assert sum(not case.text.isascii() for case in SCHEMAS) >= 5
    assert max(len(case.schema.get("properties", {})) for case in SCHEMAS) >= 30


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case.name)
def test_the_schemas_can_be_honoured(case: Case) -> None:
    validate_structured(StructuredParams(json_schema=case.schema))


@pytest.mark.parametrize(("schema", "named"), UNSUPPORTED, ids=[json.dumps(schema)[:60] for schema, _ in UNSUPPORTED])
def test_what_cannot_be_honoured_is_refused_by_name(engine: Engine, schema: dict[str, Any], named: str) -> None:
    """Where it is bound and where it is submitted, alone, within another schema and as a tool's parameters."""
    within = {"type": "object", "properties": {"in": schema}, "required": ["in"], "$defs": schema.get("$defs", {})}
    tool = {"type": "function", "function": {"name": "f", "parameters": within}}
    nothing_matches = f"{named}|required property 'in' is unsatisfiable"
    for structured, message in (
        ({"json_schema": schema}, named),
        ({"json_schema": within}, nothing_matches),
        ({"tools": [tool]}, nothing_matches),
    ):
        with pytest.raises(ValueError, match=message):
            validate_structured(StructuredParams(**structured))
        with pytest.raises(ValueError, match=message):
            engine.chat([{"role": "user", "content": "Hello"}], structured=structured, max_tokens=4)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


@pytest.fixture(scope="module")
def compiler(engine: Engine, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, engine._client.limits.vocab_size)


def test_the_refused_cases_are_cases() -> None:
    assert REFUSED.keys() <= {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_wrong_instance_passes(compiler: GrammarCompiler, tokenizer: Tokenizer, case: Awkward) -> None:
    """An awkward schema is refused, or all that matches it is accepted and nothing else is."""
    params = StructuredParams(json_schema=case.schema)

    def accepts(instance: Any) -> bool:
        state = compiler.start(params, GenericFormat())
        text = instance if isinstance(instance, Text) else json.dumps(instance, ensure_ascii=False)
        try:
            for token in tokenizer.encode(text):
                state.advance(token)
        except ValueError:
            return False
        return state.complete

    if case.name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[case.name]):
            validate_structured(params)
        return
    validate_structured(params)
    assert [instance for instance in case.invalid if accepts(instance)] == []
    assert [instance for instance in case.valid if not accepts(instance)] == []
    assert case.valid, "nothing matches this schema, which must be refused"
