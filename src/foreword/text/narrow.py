"""Narrowing a JSON schema: what is produced must be valid, it need not be everything that is valid.

A schema says what may come in; free text, endless numbers and invented keys are all valid there. Here it says what
comes out, and each rule below makes that set smaller, never larger, so that the grammar can hold it and a model does
not lose itself in it.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

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

_NO_CONSTRAINT = ("password", "binary", "path", "file-path", "directory-path", "int32", "int64", "float", "double")
"""Formats that describe a value without narrowing it: OpenAPI's and Pydantic's."""

_YEAR = "(000[1-9]|00[1-9]\\d|0[1-9]\\d\\d|[1-9]\\d{3})"
_LEAP_YEAR = "(\\d\\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-%s[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    **{f"uuid{version}": _UUID % version for version in "1345678"},
}
"""Formats that the grammar library does not know, or of which it lets days and times through that do not exist."""

_PLAIN = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema", "default", "$id"}
"""Keywords of objects that can be put together key by key."""

_KEYWORDS = {
    *("type", "enum", "const", "$ref", "not", "if", "then", "else", "title", "description", "$defs", "definitions"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "anyOf", "oneOf", "allOf", "$dynamicRef", "$schema", "$id", "$comment", "default", "examples"),
}
_IN_NAMES = '"\\\\\\x00-\\x1f'
"""What has to be escaped in JSON, for a class of characters."""
_DEPTH = 40
_LETTERS = 400
"""Characters to which keys are told apart, of one key and of all: regular expressions may be nested 250 deep, and each
character takes a tenth of a millisecond to compile."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST = 10**15
_FINEST = 1e-9
"""Numbers get bounds and decimals: without, their digits go on for ever, or round over a bound when they are read."""


def narrow(schema: Schema) -> Schema:
    """A schema whose every instance is one of ``schema``:

    - an object that lists ``properties`` or ``patternProperties`` and says nothing about others has no others; where
      several schemas describe one object (``allOf``, ``$ref`` or ``anyOf`` beside other keywords) it is left open;
    - ``allOf`` of plain objects becomes one object;
    - ``oneOf`` whose branches a constant tells apart becomes ``anyOf`` with that tag required;
    - the further keys of an object have no escapes: one of its own keys, spelled with one, would pass for another;
      where ``patternProperties`` name keys too, there are no further ones but those required;
    - numbers have at most 9 decimals and stay below 10^15, unless bounds or ``multipleOf`` say otherwise;
    - a number that must lie beyond a whole one does so by 10^-9;
    - dates and times exist; formats that constrain nothing, and ``uniqueItems: false``, are left out.
    """
    narrowed = copy.deepcopy(schema)
    for part in reversed(list(_objects(narrowed))):
        _merge_all_of(part, narrowed)
    shared = set[str]()  # definitions that describe an object together with others
    for part in _objects(narrowed):
        _tag_union(part, narrowed)
        _simplify(part)
        _bound_numbers(part)
        shared |= _shared_references(part)
    _close(narrowed, narrowed, shared, "#", alone=True)
    return narrowed


def walk(schema: Any, path: str = "#") -> Iterator[tuple[str, Schema]]:
    """Every schema in ``schema`` that is an object, itself first, with its JSON pointer."""
    if isinstance(schema, dict):
        yield path, schema
        for below, part in _children(schema, path):
            yield from walk(part, below)


def resolve(reference: Any, root: Schema) -> Schema | None:
    """The schema that a reference within ``root`` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def flaw(schema: Schema) -> str | None:
    """What no grammar could hold although the library takes it; None if there is nothing of the kind."""
    if schema and not schema.keys() & _KEYWORDS:
        return f"no keyword of JSON Schema is in it, only {', '.join(map(repr, schema))}"
    endless = _endless(schema, schema, ())
    if endless is not None:
        return f"each instance would have to contain another of $ref {endless}, without end"
    for path, part in walk(schema):
        least, named = (
            part.get("minProperties"),
            part.keys() & {"properties", "patternProperties", "additionalProperties"},
        )
        is_open = part.get("additionalProperties", named != {"properties"}) is not False
        if isinstance(least, int) and least > 1 and is_open:
            return f"minProperties={least} (at {path}) where keys are free: one that comes twice would count twice"
    return None


def _endless(part: Any, root: Schema, inside: tuple[str, ...]) -> str | None:
    if not isinstance(part, dict):
        return None
    reference = str(part.get("$ref", ""))
    if reference in inside:
        return reference
    target = resolve(reference, root)
    needed: list[Any] = [target] if target is not None else []
    within = (*inside, reference) if target is not None else inside
    properties = part.get("properties") or {}
    needed += [properties[name] for name in part.get("required") or () if name in properties]
    needed += part.get("allOf") or ()
    if isinstance(least := part.get("minItems"), int) and least > 0:
        prefix = list(part.get("prefixItems") or ())[:least]
        needed += prefix if len(prefix) >= least else [*prefix, part.get("items")]
    found = next((end for end in (_endless(each, root, within) for each in needed) if end), None)
    for key in ("anyOf", "oneOf"):
        ends = [_endless(branch, root, within) for branch in part.get(key) or ()]
        if ends and all(ends):
            found = found or ends[0]
    return found


def _children(schema: Schema, path: str) -> Iterator[tuple[str, Any]]:
    for key, value in list(schema.items()):
        below = f"{path}/{key}"
        if key in _SUBSCHEMAS and isinstance(value, Mapping):
            yield from ((f"{below}/{name}", part) for name, part in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"{below}/{index}", part) for index, part in enumerate(value))
        elif key in _SINGLE:
            yield below, value


def _objects(schema: Schema) -> Iterator[Schema]:
    return (part for _, part in walk(schema))


def _merge_all_of(part: Schema, root: Schema) -> None:
    """Plain objects under ``allOf``, by reference or not, and their parent, become one object."""
    branches = part.get("allOf")
    if not isinstance(branches, list):
        return
    plain = [_dereferenced(branch, root) for branch in [*branches, {k: v for k, v in part.items() if k != "allOf"}]]
    if any(branch is None or not branch.keys() <= _PLAIN for branch in plain):
        return
    merged: Schema = {"properties": {}, "required": []}
    for branch in plain:
        assert branch is not None
        if merged["properties"].keys() & (branch.get("properties") or {}).keys():
            return  # a key that two describe has to fulfil both
        merged["properties"] |= copy.deepcopy(branch.get("properties") or {})
        merged["required"] += [name for name in branch.get("required") or () if name not in merged["required"]]
    kept = {key: value for key, value in part.items() if key not in ("allOf", "properties", "required")}
    part.clear()
    part.update(kept | {"type": "object"} | merged)


def _dereferenced(branch: Any, root: Schema) -> Schema | None:
    if not isinstance(branch, dict):
        return None
    target = resolve(branch.get("$ref"), root)
    found = branch if target is None else target
    return None if found.get("type", "object") != "object" else found


def _tag_union(part: Schema, root: Schema) -> None:
    branches = part.get("oneOf")
    if not isinstance(branches, list):
        return
    targets = [resolve(branch.get("$ref"), root) or branch for branch in branches if isinstance(branch, dict)]
    if len(targets) != len(branches) or len(branches) < 2:
        return
    for tag in targets[0].get("properties") or ():
        values = [_constant((target.get("properties") or {}).get(tag)) for target in targets]
        if None not in values and len(set(values)) == len(values):
            for target in targets:
                target["required"] = list(dict.fromkeys([*(target.get("required") or ()), tag]))
            part["anyOf"] = part.pop("oneOf")
            part.pop("discriminator", None)
            return


def _constant(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return json.dumps(_as_json(values[0]), sort_keys=True) if isinstance(values, list) and len(values) == 1 else None


def _as_json(value: Any) -> Any:
    """``value`` so that what JSON Schema calls equal is equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _simplify(part: Schema) -> None:
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    form = part.get("format")
    if form in _NO_CONSTRAINT:
        del part["format"]
    elif form == "hostname":
        part.setdefault("maxLength", 253)
    elif form in _PATTERNS and "pattern" not in part:
        part["pattern"] = _PATTERNS[part.pop("format")]


def _bound_numbers(part: Schema) -> None:
    kinds = part.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if part.keys() & {"enum", "const"}:
        return
    bounds = [part[key] for key in _BOUNDS if isinstance(part.get(key), (int, float))]
    if kinds != ["integer"]:
        _step_off(part, "exclusiveMinimum", "minimum", 1)
        _step_off(part, "exclusiveMaximum", "maximum", -1)
    if not {"number", "integer"} & {kind for kind in kinds if isinstance(kind, str)}:
        return
    if any(abs(bound) > _LARGEST for bound in bounds):
        return
    if not part.keys() & {"minimum", "exclusiveMinimum"}:
        part["minimum"] = -_LARGEST
    if not part.keys() & {"maximum", "exclusiveMaximum"}:
        part["maximum"] = _LARGEST
    if "number" in kinds and "multipleOf" not in part and all(_is_fine(bound) for bound in bounds):
        part["multipleOf"] = _FINEST


def _step_off(part: Schema, exclusive: str, inclusive: str, sign: int) -> None:
    """A whole number that is excluded on the side of zero: the grammar library lets it in where the other bound is less
    than one away, so the next number of 9 decimals becomes the bound."""
    bound = part.get(exclusive)
    if isinstance(bound, bool) or not isinstance(bound, (int, float)) or bound * sign < 0 or abs(bound) > _LARGEST:
        return
    if not float(bound).is_integer():
        return
    step = abs(bound) + max(_FINEST, math.ulp(abs(bound)))
    del part[exclusive]
    other = part.get(inclusive)
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        step = max(step, other * sign)
    part[inclusive] = sign * step


def _is_fine(bound: float) -> bool:
    """Whether a bound is far enough from others for numbers of 9 decimals to lie between."""
    return bound == 0 or abs(bound) >= 1e-6


def _shared_references(part: Schema) -> set[str]:
    """References of a schema that describes its object together with other keywords."""
    if not _is_joint(part):
        return set()
    branches = [part, *(branch for key in _LISTS[:3] for branch in part.get(key) or () if isinstance(branch, dict))]
    return {branch["$ref"] for branch in branches if isinstance(branch.get("$ref"), str)}


def _is_joint(part: Schema) -> bool:
    describes = part.keys() & {"properties", "required", "patternProperties", "additionalProperties"}
    combines = part.keys() & {"$ref", "allOf", "anyOf", "oneOf"}
    return len(combines) > 1 or bool(describes and combines) or len(part.get("allOf") or ()) > 1


def _close(part: Any, root: Schema, shared: set[str], path: str, *, alone: bool) -> None:
    """``alone``: no other schema describes the same object."""
    if not isinstance(part, dict):
        return
    joint = _is_joint(part)
    if alone and not joint and path not in shared and part.keys() & {"properties", "patternProperties"}:
        named = part.get("properties") or {}
        if "additionalProperties" not in part and "unevaluatedProperties" not in part:
            part["additionalProperties"] = any(name not in named for name in part.get("required") or ())
        _spell_others(part)
    for below, child in _children(part, path):
        branch = below.removeprefix(path).split("/")[1] in _LISTS[:3]
        _close(child, root, shared, below, alone=not (branch and (joint or not alone)))


def _spell_others(part: Schema) -> None:
    """Further keys become those of a pattern: the grammar library spells those without escapes, and free keys with."""
    others = part.get("additionalProperties", False)
    if others is False or not isinstance(others, (bool, dict)):
        return
    if not (part.get("properties") or part.get("patternProperties")):
        return  # no key has a schema of its own
    schema: Schema = others if isinstance(others, dict) else {}
    named: Schema = part.setdefault("properties", {})
    patterns: Schema = part.setdefault("patternProperties", {})
    for name in part.get("required") or ():
        if name not in named and not any(_matches(pattern, name) for pattern in patterns):
            named[name] = copy.deepcopy(schema)
    part["additionalProperties"] = False
    if not patterns:
        plain = [name for name in named if not re.search(f"[{_IN_NAMES}]", name)]
        depth = min(_DEPTH, max(2, _LETTERS // max(1, len(plain))))
        patterns[f"^{_unlike(plain, depth)}$"] = schema


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _unlike(names: list[str], depth: int) -> str:
    """A regular expression of texts without escapes and none of ``names``; it leaves out, too, what begins like one
    that is longer than ``depth``."""
    rest: dict[str, list[str]] = {}
    for name in names:
        if name:
            rest.setdefault(name[0], []).append(name[1:])
    first = "".join(f"\\x{{{ord(char):x}}}" for char in rest)
    ways = [f"[^{first}{_IN_NAMES}][^{_IN_NAMES}]*"]
    if depth:
        ways += [f"\\x{{{ord(char):x}}}{_unlike(ends, depth - 1)}" for char, ends in rest.items()]
    return f"({'|'.join(ways)})" + ("" if "" in names else "?")
