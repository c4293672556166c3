"""Tool definitions in one order, so that equal tools give equal prompts, and equal prompts share their cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.core.structured import tool_name

_DEFINITION = ("type", "function")
_FUNCTION = ("name", "description", "parameters")
_SCHEMA = ("type", "description", "enum", "const", "default", "properties", "required", "items")
_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("$defs", "definitions", "patternProperties", "dependentSchemas")


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``tools`` sorted by name, the keys of every object in a fixed order.

    Only the entries of ``properties`` stay as they are given: their order is the order in which arguments are
    written, which is the caller's to choose. Lists keep their order too.

    Raises:
        ValueError: an entry is no OpenAI-style function definition.
    """
    named = sorted(((tool_name(index, tool), tool) for index, tool in enumerate(tools)), key=lambda entry: entry[0])
    return [_definition(tool) for _, tool in named]


def _definition(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        key: _schema(value) if key == "parameters" else _data(value)
        for key, value in _ordered(tool["function"], _FUNCTION)
    }
    found = {key: function if key == "function" else _data(value) for key, value in _ordered(tool, _DEFINITION)}
    return found if "type" in found else {"type": "function"} | found  # templates print the definition as a whole


def _schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return _data(schema)
    found: dict[str, Any] = {}
    for key, value in _ordered(schema, _SCHEMA):
        if key == "properties" and isinstance(value, Mapping):
            found[key] = {name: _schema(entry) for name, entry in value.items()}
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: _schema(value[name]) for name in sorted(value)}
        elif key in _OF_SCHEMAS and isinstance(value, Sequence):
            found[key] = [_schema(entry) for entry in value]
        elif key in ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"):
            found[key] = _schema(value)
        else:
            found[key] = _data(value)
    return found


def _data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _data(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [_data(entry) for entry in value]
    return value


def _ordered(mapping: Mapping[str, Any], first: Sequence[str]) -> list[tuple[str, Any]]:
    keys = [key for key in first if key in mapping]
    return [(key, mapping[key]) for key in (*keys, *sorted((key for key in mapping if key not in first), key=str))]
