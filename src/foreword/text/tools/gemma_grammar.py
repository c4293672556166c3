"""JSON schemas as grammars of Gemma's notation of values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from typing import Any

from foreword.text.tools.base import Json, Literal, is_token, quote

_NOTES = frozenset(
    ("title", "description", "default", "examples", "$defs", "definitions", "$schema", "$id", "$comment", "deprecated")
)
_KNOWN = {
    "string": frozenset(("type",)),
    "boolean": frozenset(("type",)),
    "null": frozenset(("type",)),
    "array": frozenset(("type", "items", "minItems", "maxItems")),
    "object": frozenset(("type", "properties", "required", "additionalProperties")),
}
_KEY = r"/[^\s:,{}\[\]<>\"|]+/"


class GemmaValues:
    """Collects the Lark rules of the values of tools' arguments.

    Numbers have JSON's notation, so their schemas are left to the grammar library. Of strings only ``enum`` and
    ``const`` can be honoured. Every other keyword that narrows a value, and is not read here, raises.

    Attributes:
        rules: Lark rules, to be put beside those that use them.
    """

    def __init__(self, quotation: str, literal: Literal, json_: Json) -> None:
        self._quotation = quotation
        self._mark = literal(quotation)
        self._json = json_
        self._root: Mapping[str, Any] = {}
        self._where = ""
        self._named: dict[str, str] = {}
        self._count = 0
        if is_token(self._mark):
            quoted = [f"tool_string: {self._mark} TOOL_QUOTED {self._mark}"]
            quoted.append(f"TOOL_QUOTED: /(?s:.*)/ & ~(/(?s:.*)/ {quote(quotation)} /(?s:.*)/)")
        else:
            quoted = [f"tool_string: {self._mark} tool_quoted", f"tool_quoted[lazy]: /(?s:.*)/ {self._mark}"]
        self.rules = quoted

    def arguments(self, tool: str, parameters: Mapping[str, Any] | None) -> str:
        """Lark source of the arguments of ``tool``.

        Raises:
            ValueError: a keyword of the schema cannot be honoured in this notation; the message names it.
        """
        self._root = parameters or {}
        self._where = f"the parameters of tool {tool!r}"
        self._named = {}
        return quote("{}") if parameters is None else self._value(parameters)

    def _value(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            self._refuse("false" if schema is False else repr(schema))
        told = schema.keys() - _NOTES
        for key in ("enum", "const"):
            if key in schema:
                self._check(told, {key, "type"})
                return self._choice(
                    self._constant(value) for value in (schema[key] if key == "enum" else [schema[key]])
                )
        if "$ref" in schema:
            self._check(told, {"$ref"})
            return self._reference(str(schema["$ref"]))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self._check(told, {key})
                return self._choice(self._value(part) for part in schema[key])
        if "allOf" in schema and len(schema["allOf"]) == 1:
            self._check(told, {"allOf"})
            return self._value(schema["allOf"][0])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kinds, list):
            if not {"integer", "number"} & set(kinds):
                self._check(told, set().union(*(_KNOWN.get(kind, ()) for kind in kinds)))
            parts = ({**schema, "type": kind} for kind in kinds)
            return self._choice(
                self._typed(part["type"], part, told & _KNOWN.get(part["type"], told)) for part in parts
            )
        return self._typed(kinds, schema, told)

    def _typed(self, kind: Any, schema: Mapping[str, Any], told: Set[str]) -> str:
        if kind in ("integer", "number"):
            return self._json({key: value for key, value in schema.items() if key not in _NOTES})
        if kind not in _KNOWN:
            return self._any() if kind is None and not told else self._refuse(", ".join(sorted(told)))
        self._check(told, _KNOWN[kind])
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return {"string": "tool_string", "boolean": '("true" | "false")', "null": '"null"'}[kind]

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._rule(self._value(schema.get("items", True)))
        if most == 0:
            return quote("[]")
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        empty = "" if least else f" | {quote('[]')}"
        return f'("[" {item} {more} "]"{empty})'

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        required = set(schema.get("required") or ())
        if required - properties.keys():
            self._refuse(f"required: {sorted(required - properties.keys())} without properties")
        if not properties:
            if others is False:
                return quote("{}")
            pair = self._rule(f'{_KEY} ":" {self._value(True if others is None else others)}')
            return f'("{{" ({pair} ("," {pair})*)? "}}")'
        if others not in (None, False):
            self._refuse("additionalProperties beside properties")
        first, more = '""', '""'  # what may follow when nothing has been written yet, and when something has
        for name in sorted(properties, key=lambda key: str(key).lower(), reverse=True):
            pair = self._rule(f"{quote(f'{name}:')} {self._value(properties[name])}")
            rest = more
            skip_more, skip_first = ("", "") if name in required else (f" | {more}", f" | {first}")
            more = self._rule(f'"," {pair} {rest}{skip_more}')
            first = self._rule(f"{pair} {rest}{skip_first}")
        return f'("{{" {first} "}}")'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._mark} {quote(value)} {self._mark})" if value else f"({self._mark} {self._mark})"
        if isinstance(value, (Mapping, list)):
            self._refuse("enum or const of objects or lists")
        return quote(json.dumps(value))

    def _reference(self, reference: str) -> str:
        if reference not in self._named:
            target: Any = self._root
            if not reference.startswith("#"):
                self._refuse(f"$ref {reference}")
            for step in reference[1:].strip("/").split("/") if reference != "#" else ():
                step = step.replace("~1", "/").replace("~0", "~")
                if not isinstance(target, Mapping) or step not in target:
                    self._refuse(f"$ref {reference}")
                target = target[step]
            name = self._named[reference] = self._name()
            self.rules.append(f"{name}: {self._value(target)}")
        return self._named[reference]

    def _any(self) -> str:
        if not any(rule.startswith("tool_any:") for rule in self.rules):
            self.rules.append(
                'tool_any: tool_string | "true" | "false" | "null" | ' + self._json({"type": "number"}) + "\n"
                f' | "[" (tool_any ("," tool_any)*)? "]" | "{{" ({_KEY} ":" tool_any ("," {_KEY} ":" tool_any)*)? "}}"'
            )
        return "tool_any"

    def _choice(self, parts: Iterable[str]) -> str:
        return f"({' | '.join(parts)})"

    def _rule(self, source: str) -> str:
        name = self._name()
        self.rules.append(f"{name}: {source}")
        return name

    def _name(self) -> str:
        self._count += 1
        return f"tool_value_{self._count}"

    def _check(self, told: Iterable[str], known: Iterable[str]) -> None:
        unknown = set(told) - set(known)
        if unknown:
            self._refuse(", ".join(sorted(unknown)))

    def _refuse(self, what: str) -> Any:
        raise ValueError(
            f"{self._where} cannot be honoured in the format in which this model writes calls: {what}; "
            "leave that out of the schema and check it afterwards"
        )
