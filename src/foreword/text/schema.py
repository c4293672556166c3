"""JSON schemas as the grammar takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as ``json.dumps`` and chat templates write it. Free white space is where small models lose themselves."""

_NO_CONSTRAINT = (
    "password",
    "binary",
    "byte",
    "path",
    "file-path",
    "directory-path",
    "int32",
    "int64",
    "float",
    "double",
)
"""Formats that describe a value without narrowing it: OpenAPI's and Pydantic's."""

_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
)


_MEANT = {"regex": "pattern", "Pointer": "$ref", "Resource": "$ref", "anyOf is empty": "enum"}
"""Keywords that the grammar library does not call by their names."""


@lru_cache(maxsize=256)
def grammar_source(schema: str) -> str:
    """``schema`` (JSON text) as Lark source of llguidance: ``%json {...}`` with our layout.

    - An object with ``properties`` that says nothing about others gets none: what is produced is valid all the same,
      and a model does not invent keys. Where ``allOf`` or a ``$ref`` beside other keywords merges objects, all are
      left open.
    - What constrains nothing is left out: ``uniqueItems: false``, formats such as ``password`` and ``int64``.
    """
    found = json.loads(schema)
    closes = not any(_merges(part) for _, part in walk(found))
    for _, part in walk(found):
        if closes and "properties" in part and not part.keys() & {"additionalProperties", "patternProperties"}:
            part["additionalProperties"] = set(part.get("required", ())) - part["properties"].keys() != set()
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if part.get("format") in _NO_CONSTRAINT:
            del part["format"]
    return f"%json {json.dumps(found | {'x-guidance': _LAYOUT}, ensure_ascii=False)}"


def walk(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in ``schema`` that is an object, itself first, with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in list(schema.items()):
        below = f"{path}/{key}"
        if key in _SUBSCHEMAS and isinstance(value, Mapping):
            for name, part in value.items():
                yield from walk(part, f"{below}/{name}")
        elif key in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from walk(part, f"{below}/{index}")
        elif key in _SINGLE:
            yield from walk(value, below)


def where(schema: str, reason: str) -> str:
    """Which keywords of ``schema`` the grammar library's ``reason`` is about, with their places."""
    words = set(re.findall(r"[$\w]+", reason)) | {key for word, key in _MEANT.items() if word in reason}
    found = [
        (f"{path}/{key}", value)
        for path, part in walk(json.loads(schema))
        for key, value in part.items()
        if key in words
    ]
    exact = [place for place, value in found if isinstance(value, str) and value in reason]
    places = exact or [place for place, _ in found]
    return f" (at {', '.join(places[:3])})" if places else ""


def _merges(schema: dict[str, Any]) -> bool:
    return (
        len(schema.get("allOf", ())) > 1
        or ("allOf" in schema and "properties" in schema)
        or ("$ref" in schema and bool(schema.keys() & {"properties", "required", "allOf"}))
    )
