"""Narrowed schemas: each instance is one of the original; what small models lose themselves in is gone."""

from __future__ import annotations

from typing import Any

import pytest

from foreword.text.narrow import flaw, narrow

INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"properties": {"a": INTEGER}}, {"properties": {"a": INTEGER}, "additionalProperties": False}),
        ({"patternProperties": {"^a": INTEGER}}, {"patternProperties": {"^a": INTEGER}, "additionalProperties": False}),
        (
            {"patternProperties": {"^a": INTEGER}, "required": ["ab", "b"], "additionalProperties": INTEGER},
            {
                "patternProperties": {"^a": INTEGER}, "required": ["ab", "b"], "properties": {"b": INTEGER},
                "additionalProperties": False,
            },
        ),
        ({"properties": {}, "additionalProperties": INTEGER}, {"properties": {}, "additionalProperties": INTEGER}),
        ({"type": "integer", "maximum": 5}, {"type": "integer", "maximum": 5, "minimum": -(10**15)}),
        ({"type": "integer", "minimum": 10**16}, {"type": "integer", "minimum": 10**16}),
        (
            {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
            {"type": ["number", "null"], "minimum": 1e-9, "maximum": 1, "multipleOf": 1e-9},
        ),
        ({"type": "number", "enum": [1.5]}, {"type": "number", "enum": [1.5]}),
        ({"properties": {"enum": {"const": {"properties": 1}}}}, {
            "properties": {"enum": {"const": {"properties": 1}}}, "additionalProperties": False,
        }),
    ],
)  # fmt: skip
def test_rules(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(schema)
    assert narrow(schema) == expected
    assert repr(schema) == before


def test_all_of_plain_objects_becomes_one() -> None:
    base = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    schema = {"allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": INTEGER}}], "$defs": {"Base": base}}
    narrowed = narrow(schema)
    assert "allOf" not in narrowed
    assert narrowed["properties"] == {"a": INTEGER, "b": INTEGER}
    assert narrowed["required"] == ["a"]
    assert narrowed["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": INTEGER}, "minProperties": 1}, {"properties": {"b": INTEGER}}]},
        {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"a": {"minimum": 3}}}]},
        {"properties": {"a": INTEGER}, "anyOf": [{"required": ["b"]}, {"properties": {"c": INTEGER}}]},
        {"$ref": "#/$defs/Base", "properties": {"b": INTEGER}, "$defs": {"Base": {"properties": {"a": INTEGER}}}},
    ],
)
def test_objects_that_several_describe_stay_open(schema: dict[str, Any]) -> None:
    assert "additionalProperties" not in repr(narrow(schema))


def test_a_tagged_union_becomes_any_of() -> None:
    """Pydantic leaves a tag with a default out of ``required``; without it the branches are not told apart."""
    cat = {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}}}
    dog = {"type": "object", "properties": {"kind": {"enum": ["dog"]}, "age": INTEGER}, "required": ["age"]}
    schema = {"oneOf": [{"$ref": "#/$defs/Cat"}, dog], "discriminator": {}, "$defs": {"Cat": cat}}
    narrowed = narrow(schema)
    assert "oneOf" not in narrowed
    assert narrowed["$defs"]["Cat"]["required"] == ["kind"]
    assert narrowed["anyOf"][1]["required"] == ["age", "kind"]
    same = {"oneOf": [cat, {**dog, "properties": {"kind": {"const": "cat"}}}]}
    assert "oneOf" in narrow(same)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [(1, 1.0, False), ([1, {"a": 2}], [1.0, {"a": 2.0}], False), (1, True, True), (1, "1", True), (0.5, 1, True)],
)
def test_tags_are_compared_as_json(one: Any, other: Any, apart: bool) -> None:
    """1 and 1.0 are one value, so that an instance with either would match both branches."""
    narrowed = narrow({"oneOf": [{"properties": {"t": {"const": tag}}} for tag in (one, other)]})
    assert ("anyOf" in narrowed) is apart


def test_dates_exist() -> None:
    import datetime
    import re

    pattern = re.compile(narrow({"type": "string", "format": "date"})["pattern"])
    day = datetime.date(1999, 12, 1)
    while day.year < 2005:
        assert pattern.match(day.isoformat()), day
        day += datetime.timedelta(days=1)
    for wrong in ("2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31", "2023-13-01", "2023-00-10"):
        assert not pattern.match(wrong), wrong
    assert pattern.match("2000-02-29")
    moment = re.compile(narrow({"type": "string", "format": "date-time"})["pattern"])
    assert moment.match("2024-02-29T23:59:59.25+01:00")
    assert not moment.match("2024-02-29T23:59:60Z")


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"$ref": "#"}, True),
        ({"properties": {"n": {"$ref": "#"}}, "required": ["n"]}, True),
        ({"properties": {"n": {"$ref": "#"}}}, False),
        ({"properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]}, False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"type": "array", "items": {"$ref": "#"}}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, True),
        ({"$ref": "#/$defs/gone"}, False),
    ],
)
def test_endless_schemas_are_found(schema: dict[str, Any], endless: bool) -> None:
    assert (flaw(schema) is not None) is endless


@pytest.mark.parametrize(
    ("schema", "flawed"),
    [
        ({"minProperties": 2}, True),
        ({"minProperties": 2, "additionalProperties": INTEGER}, True),
        ({"minProperties": 2, "patternProperties": {"^a": INTEGER}}, True),
        ({"minProperties": 1, "additionalProperties": INTEGER}, False),
        ({"minProperties": 2, "properties": {"a": INTEGER, "b": INTEGER}}, False),
    ],
)
def test_keys_that_might_be_counted_twice(schema: dict[str, Any], flawed: bool) -> None:
    assert ("minProperties" in (flaw(schema) or "")) is flawed
