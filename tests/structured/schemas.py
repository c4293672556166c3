"""The collection: schemas that are honoured, and schemas that are refused by name."""

from __future__ import annotations

from typing import Any

from .case import Case
from .data_schemas import DATA
from .pydantic_schemas import PYDANTIC
from .tool_schemas import TOOLS

SCHEMAS: list[Case] = [*TOOLS, *DATA, *PYDANTIC]

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_AB = {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}}

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": _INTEGER, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": _INTEGER, "contains": {"const": 7}}, "contains"),
    ({"type": "array", "items": _INTEGER, "unevaluatedItems": False}, "unevaluatedItems"),
    ({**_INTEGER, "not": {"const": 3}}, "not"),
    ({**_AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ({"type": "object", "additionalProperties": _INTEGER, "propertyNames": {"pattern": "^[a-z]+$"}}, "propertyNames"),
    ({**_AB, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**_AB, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({**_AB, "dependencies": {"a": ["b"]}}, "dependencies"),
    ({"allOf": [_AB], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({**_AB, "minProperties": 2}, "minProperties|min/maxProperties"),
    ({"oneOf": [{**_INTEGER, "multipleOf": 2}, {**_INTEGER, "multipleOf": 3}]}, "oneOf"),
    ({"oneOf": [_STRING, {**_STRING, "minLength": 3}]}, "oneOf"),
    ({**_STRING, "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, "pattern"),
    ({**_STRING, "pattern": "^(?!admin)[a-z]+$"}, "pattern"),
    ({**_STRING, "pattern": r"\bword\b"}, "pattern"),
    ({**_STRING, "pattern": r"^(a|b)\1$"}, "pattern"),
    ({**_STRING, "pattern": "["}, "pattern"),
    ({**_STRING, "format": "regex"}, "format"),
    ({**_STRING, "format": "postcode"}, "format"),
    ({"$ref": "https://example.org/schema.json"}, r"\$ref"),
    ({"$ref": "#/$defs/nowhere", "$defs": {"somewhere": _STRING}}, r"\$ref"),
    ({"$dynamicRef": "#node", "$defs": {"node": {"$dynamicAnchor": "node", **_STRING}}}, r"\$dynamicRef"),
    ({**_INTEGER, "minimum": 5, "maximum": 3}, "minimum"),
    ({**_INTEGER, "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "exclusiveM|integer interval"),
    ({**_INTEGER, "minimum": 1, "maximum": 4, "multipleOf": 5}, "multiple"),
    ({**_STRING, "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"enum": []}, "enum"),
    ({**_STRING, "const": 5}, "const|incompatible types"),
    ({"allOf": [_STRING, _INTEGER]}, "allOf|incompatible types"),
    ({**_AB, "required": ["c"], "additionalProperties": False}, "required"),
    ({"type": "text"}, "type"),
    ({**_STRING, "minLength": -1}, "minLength"),
    ({**_INTEGER, "minimum": "3"}, "minimum"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, r"\$ref|endless|never"),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "required": ["next"]}},
        },
        r"\$ref|endless|never",
    ),
]
"""A schema that cannot be honoured, and what the error must say of it, as a regular expression."""
