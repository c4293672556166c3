"""JSON schemas as the grammar takes them."""

from __future__ import annotations

import contextlib
import json
import re
from functools import lru_cache

from foreword.text.narrow import narrow, walk

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space as ``json.dumps`` and chat templates write it. Free white space is where small models lose themselves."""

_MEANT = {
    "regex": ("pattern",),
    "Pointer": ("$ref",),
    "Resource": ("$ref",),
    "anyOf is empty": ("enum",),
    "incompatible types": ("const", "enum", "allOf", "type"),
}
"""Keywords that the grammar library does not call by their names."""


@lru_cache(maxsize=256)
def grammar_source(schema: str) -> str:
    """``schema`` (JSON text), narrowed, as Lark source of llguidance: ``%json {...}``."""
    found = json.loads(schema)
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # malformed: the grammar library says where
        found = narrow(found)
    return f"%json {json.dumps(found | {'x-guidance': _LAYOUT}, ensure_ascii=False)}"


def where(schema: str, reason: str) -> str:
    """Which keywords of ``schema`` the grammar library's ``reason`` is about, with their places."""
    words = set(re.findall(r"[$\w]+", reason)) | {
        key for word, keys in _MEANT.items() if word in reason for key in keys
    }
    found = [
        (f"{path}/{key}", value)
        for path, part in walk(json.loads(schema))
        for key, value in part.items()
        if key in words
    ]
    exact = [place for place, value in found if isinstance(value, str) and value in reason]
    places = exact or [place for place, _ in found]
    return f" (at {', '.join(places[:3])})" if places else ""
