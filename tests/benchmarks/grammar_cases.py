"""Awkward JSON schemas with instances that match and instances that do not, for :mod:`grammar_libraries`.

An instance is a value, written as JSON with its keys in the schema's order, or a :class:`Text`, which is JSON as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Text(str):
    """JSON text that no value gives: a number in another spelling, or a key that comes twice."""


@dataclass(frozen=True)
class Awkward:
    """One schema; ``valid`` and ``invalid`` are what Draft 2020-12 says of the instances, format included."""

    name: str
    schema: dict[str, Any]
    valid: list[Any]
    invalid: list[Any]


def _object(properties: dict[str, Any], required: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), **more}


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_CLOSED = {"additionalProperties": False}
_TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": _object({"v": _INTEGER, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "v", **_CLOSED)
    },
}
_TAGGED = [
    _object({"k": {"const": "a"}, "v": _INTEGER}, "k v", **_CLOSED),
    _object({"k": {"const": "b"}, "v": _STRING}, "k v", **_CLOSED),
]

CASES = [
    Awkward(
        "recursive $defs",
        _TREE,
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3, "kids": [{"v": 4}]}]}],
        [{"v": "1"}, {"v": 1, "kids": [{"kids": []}]}, {"v": 1, "kids": [1]}],
    ),
    Awkward("$ref to itself only", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, [], [1, {}, "a"]),
    Awkward("$ref to nowhere", _object({"a": {"$ref": "#/$defs/b"}}, "a"), [], [{"a": 1}, {"a": "b"}]),
    Awkward("anyOf", {"anyOf": [_STRING, {"type": "null"}, {**_INTEGER, "minimum": 3}]}, ["a", None, 3], [2, True, []]),
    Awkward(
        "anyOf beside properties",
        {**_object({"a": _INTEGER, "b": _INTEGER}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}],
    ),
    Awkward(
        "allOf of objects",
        {"allOf": [_object({"a": _INTEGER}, "a"), _object({"b": _STRING}, "b")]},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}, {"a": "1", "b": "x"}],
    ),
    Awkward("allOf of bounds", {"allOf": [{**_INTEGER, "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    Awkward("allOf of patterns", {"allOf": [{**_STRING, "pattern": "a"}, {"pattern": "b"}]}, ["ab", "bca"], ["a", "b"]),
    Awkward("oneOf, told apart by const", {"oneOf": _TAGGED}, [{"k": "a", "v": 1}], [{"k": "a", "v": "1"}, {"k": "b"}]),
    Awkward(
        "oneOf, overlapping",
        {"oneOf": [{**_INTEGER, "multipleOf": 2}, {**_INTEGER, "multipleOf": 3}]},
        [2, 3, 4],
        [6, 12, 5],
    ),
    Awkward("not", {**_INTEGER, "not": {"const": 3}}, [2, 4], [3]),
    Awkward(
        "if, then",
        {**_object({"a": _INTEGER, "b": _INTEGER}), "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    Awkward(
        "enum of mixed types",
        {"enum": ["a", 1, 2.5, None, True, {"x": [1]}, []]},
        ["a", 1, 2.5, None, True, {"x": [1]}, []],
        ["b", 2, False, {"x": []}, {}],
    ),
    Awkward("enum with type", {"type": "string", "enum": ["a", "b", 1]}, ["a", "b"], [1, "c"]),
    Awkward("const object", {"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}]),
    Awkward(
        "enum, not ASCII",
        {"enum": ["Straße", "日本", "مرحبا", "👩‍👩‍👧"]},
        ["Straße", "日本", "👩‍👩‍👧"],
        ["Strasse", "日"],
    ),
    Awkward(
        "keys, not ASCII",
        _object({"größe": _INTEGER, "名前": _STRING, "😀": {"const": "é"}}, "größe 名前", **_CLOSED),
        [{"größe": 1, "名前": "山田"}, {"größe": 1, "名前": "", "😀": "é"}],
        [{"größe": 1}, {"größe": 1, "名前": 2}, {"größe": 1, "名前": "", "😀": "e"}],
    ),
    Awkward("integer bounds", {**_INTEGER, "minimum": -3, "exclusiveMaximum": 120}, [-3, 0, 119], [-4, 120, 1000]),
    Awkward("number bounds", {"type": "number", "minimum": -0.5, "maximum": 99.5}, [-0.5, 0, 99.5], [-0.6, 99.6, 100]),
    Awkward("exclusive bounds", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0, 1, -0.1]),
    Awkward(
        "bound after rounding",
        {"type": "number", "exclusiveMaximum": 1, "minimum": 0},
        [0.25],
        [Text("0.99999999999999999999")],
    ),
    Awkward("multipleOf, integer", {**_INTEGER, "multipleOf": 5, "minimum": 0}, [0, 5, 100], [7, -5, 101]),
    Awkward("multipleOf, number", {"type": "number", "multipleOf": 0.5, "minimum": 0}, [0, 2.5, 3], [2.4, 0.25]),
    Awkward("minimum > maximum", {**_INTEGER, "minimum": 5, "maximum": 3}, [], [3, 4, 5]),
    Awkward("minLength, maxLength", {**_STRING, "minLength": 2, "maxLength": 3}, ["ab", "äöü", "👍👍"], ["a", "äöüß"]),
    Awkward("pattern", {**_STRING, "pattern": "^[a-z]{2}-[0-9]+$"}, ["ab-1", "zz-99"], ["ab-", "Ab-1", "ab-1x"]),
    Awkward("pattern, not anchored", {**_STRING, "pattern": "[0-9]"}, ["1", "a1b"], ["", "ab"]),
    Awkward("pattern and length", {**_STRING, "pattern": "^a+$", "maxLength": 3}, ["a", "aaa"], ["aaaa", "ab", ""]),
    Awkward("pattern with lookahead", {**_STRING, "pattern": "^(?!admin)[a-z]+$"}, ["user"], ["admin", "U"]),
    Awkward("format date", {**_STRING, "format": "date"}, ["2024-02-29"], ["2024-02-30", "2024-13-01", "1.2.24"]),
    Awkward("format date, leap year", {**_STRING, "format": "date"}, ["2024-02-29"], ["2023-02-29"]),
    Awkward("format date, year 0", {**_STRING, "format": "date"}, ["0001-01-01"], ["0000-01-01"]),
    Awkward("format email", {**_STRING, "format": "email"}, ["a@b.org"], ["a.b.org", ""]),
    Awkward("format ipv4", {**_STRING, "format": "ipv4"}, ["10.0.0.1"], ["256.0.0.1", "1.2.3"]),
    Awkward("format ipv6", {**_STRING, "format": "ipv6"}, ["::1", "fe80::1"], ["1::2::3", "g::"]),
    Awkward("format uuid", {**_STRING, "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]),
    Awkward("format regex", {**_STRING, "format": "regex"}, ["a+"], ["(", "["]),
    Awkward(
        "optional fields",
        _object({"a": _INTEGER, "b": _INTEGER, "c": _INTEGER}, "b", **_CLOSED),
        [{"b": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
        [{}, {"a": 1}, {"b": 1, "d": 1}, Text('{"b": 1, "b": "x"}')],
    ),
    Awkward("no properties", _object({}, **_CLOSED), [{}], [{"a": 1}, [], None]),
    Awkward(
        "additionalProperties",
        _object({"a": _INTEGER}, "a", additionalProperties=_STRING),
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"b": "x"}, {"a": 1, "b": 1}, Text('{"a": 1, "a": "x"}')],
    ),
    Awkward(
        "patternProperties",
        {"type": "object", "patternProperties": {"^x-": _STRING}, **_CLOSED},
        [{}, {"x-a": "1", "x-b": ""}],
        [{"y": "1"}, {"x-a": 1}],
    ),
    Awkward(
        "propertyNames",
        {"type": "object", "additionalProperties": _INTEGER, "propertyNames": {"pattern": "^[a-z]+$"}},
        [{}, {"ab": 1}],
        [{"A": 1}, {"ab": "1"}],
    ),
    Awkward(
        "minProperties, maxProperties",
        {"type": "object", "additionalProperties": _INTEGER, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    Awkward(
        "minProperties, one key twice",
        {"type": "object", "additionalProperties": _INTEGER, "minProperties": 2},
        [{"a": 1, "b": 2}],
        [Text('{"a": 1, "a": 2}')],
    ),
    Awkward(
        "dependentRequired",
        {**_object({"a": _INTEGER, "b": _INTEGER}), "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    Awkward(
        "unevaluatedProperties",
        {"allOf": [_object({"a": _INTEGER}, "a")], "unevaluatedProperties": False},
        [{"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    Awkward(
        "required, not listed",
        {"type": "object", "properties": {"a": _INTEGER}, "required": ["a", "z"]},
        [{"a": 1, "z": 1}],
        [{"a": 1}],
    ),
    Awkward(
        "nested arrays", {"type": "array", "items": {"type": "array", "items": _INTEGER}}, [[[1], []]], [[1], [["1"]]]
    ),
    Awkward(
        "minItems, maxItems",
        {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 3},
        [[1, 2]],
        [[1], [1] * 4],
    ),
    Awkward(
        "prefixItems",
        {"type": "array", "prefixItems": [_STRING, _INTEGER], "items": {"type": "boolean"}, "minItems": 2},
        [["a", 1], ["a", 1, True]],
        [["a"], [1, "a"], ["a", 1, 2]],
    ),
    Awkward("uniqueItems", {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[], [2, 1]], [[1, 1]]),
    Awkward("contains", {"type": "array", "items": _INTEGER, "contains": {"const": 7}}, [[7], [1, 7]], [[], [1]]),
    Awkward("type list", {"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc", 1]),
    Awkward("false schema", _object({"a": False, "b": _INTEGER}), [{}, {"b": 1}], [{"a": 1}]),
    Awkward("big exponents", {"type": "number", "maximum": 1000}, [1, -2.5], [Text("1e9"), Text("1e400")]),
]

OUTPUTS: dict[str, Any] = {
    "create_event": {
        "summary": "Weekly stand-up of the platform team, with demos of what was finished since the last one",
        "start": {"date_time": "2025-06-02T09:30:00+02:00", "time_zone": "Europe/Berlin"},
        "duration_minutes": 45,
        "attendees": [{"email": "ana@example.org"}, {"email": "ben.li@example.org", "optional": True}],
        "recurrence": {"frequency": "weekly", "interval": 1, "by_day": ["MO"], "until": "2025-12-31"},
    },
    "rechnung": {
        "Rechnungsnummer": "2024-0117",
        "Datum": "2024-05-03",
        "Empfänger": {"Name": "Möbelhaus Größl", "Straße": "Fährweg 7", "PLZ": "28195", "Ort": "Bremen"},
        "Positionen": [
            {"Bezeichnung": "Stuhl, Buche geölt", "Menge": 2, "Einzelpreis": 89.5, "Steuersatz": 19},
            {"Bezeichnung": "Kissen für drinnen und draußen", "Menge": 4, "Einzelpreis": 12.25},
        ],
        "Zahlungsart": "Überweisung",
        "Fällig in Tagen": 14,
    },
    "edit_file": {
        "path": "src/app.py",
        "edits": [
            {
                "old_text": "def load(path):\n    with open(path) as file:\n        return json.load(file)\n",
                "new_text": "def read_config(path: Path) -> dict[str, Any]:\n    return json.loads(path.read_text())\n",
            },
            {"old_text": 'config = load("app.json")', "new_text": 'config = read_config(Path("app.json"))'},
        ],
        "dry_run": False,
    },
    "query_table": {
        "table": "customers",
        "columns": ["id", "name", "country", "spent"],
        "where": {
            "any": [
                {"column": "vip", "operator": "=", "value": True},
                {
                    "all": [
                        {"column": "country", "operator": "=", "value": "AT"},
                        {"column": "spent", "operator": ">", "value": 1000},
                    ]
                },
            ]
        },
        "order_by": [{"column": "spent", "descending": True}],
        "limit": 50,
    },
    "ui_tree": {
        "type": "form",
        "label": "Write to us",
        "attributes": [{"name": "id", "value": "contact"}],
        "children": [
            {
                "type": "field",
                "label": "Your name",
                "attributes": [{"name": "placeholder", "value": "as on your passport"}],
                "children": [],
            },
            {
                "type": "row",
                "label": "",
                "attributes": [],
                "children": [{"type": "button", "label": "Send", "attributes": [], "children": []}],
            },
        ],
    },
}
"""By name of a schema of ``tests.structured.schemas``: an output as a good model would give it."""
