"""What a constrained output must look like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foreword.core.validation import reject

TOOL_CHOICES = ("auto", "none", "any", "required")


@dataclass(frozen=True, kw_only=True)
class StructuredParams:
    """A constraint on the output, enforced token by token: what comes out always matches, unless it is cut short.

    Give one of ``json_schema``, ``regex``, ``grammar`` and ``choices``, or ``tools``, or ``tools`` and ``json_schema``
    together: then the output is either tool calls or an answer of that schema.

    Args:
        json_schema: a JSON schema as a dict or as text; ``{"type": "object"}`` is any JSON object. An object with
            ``properties`` that says nothing about others has no others.
        regex: a regular expression in Rust's syntax (no look-around), matched by the whole output.
        grammar: a context-free grammar, in Lark's or in llama.cpp's GBNF notation.
        choices: the output is one of these strings.
        tools: OpenAI-style function definitions, called in the format of the model's chat template.
        tool_choice: "auto" (the model decides; a call it begins is well formed), "none", "any" or "required"
            (at least one call), or the name of the tool to call.
        parallel_tool_calls: allow more than one call.

    Raises:
        ValueError: a field is malformed, or the combination is none of the above; the message names the field.
    """

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choices: tuple[str, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        for field in ("choices", "tools"):
            value = getattr(self, field)
            if value is not None:
                if isinstance(value, str) or not isinstance(value, Sequence):
                    reject(field, value, "give a list")
                object.__setattr__(self, field, tuple(value))
        for field in ("regex", "grammar"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                reject(field, value, "give a non-empty string")
        if self.choices is not None and (not self.choices or not all(isinstance(c, str) and c for c in self.choices)):
            reject("choices", self.choices, "give at least one non-empty string, and strings only")
        self._check_tools()
        given = [name for name in ("json_schema", "regex", "grammar", "choices") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined: give one of them")
        if self.tools and given not in ([], ["json_schema"]):
            raise ValueError(f"tools and {given[0]} cannot be combined: only json_schema can stand beside tools")
        if not given and not self.tools:
            raise ValueError("structured asks for nothing: give json_schema, regex, grammar, choices or tools")

    def _check_tools(self) -> None:
        names = [tool_name(index, tool) for index, tool in enumerate(self.tools or ())]
        for index, tool in enumerate(self.tools or ()):
            try:
                json.dumps(tool)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"tools[{index}] ({names[index]!r}) cannot be written as JSON: {error}") from error
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            reject("tools", twice, "two tools have this name; give each its own")
        if not isinstance(self.tool_choice, str) or self.tool_choice not in (*TOOL_CHOICES, *names):
            known = ", ".join(repr(choice) for choice in (*TOOL_CHOICES, *names))
            reject("tool_choice", self.tool_choice, f"give one of {known}")
        if not isinstance(self.parallel_tool_calls, bool):
            reject("parallel_tool_calls", self.parallel_tool_calls, "give True or False")
        if not self.tools and self.tool_choice not in ("auto", "none"):
            reject("tool_choice", self.tool_choice, "there are no tools to choose from; give tools")

    def as_dict(self) -> dict[str, Any]:
        """The fields that say something, for :meth:`build`; of JSON's types alone, but for tuples."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}

    @classmethod
    def build(cls, value: StructuredParams | Mapping[str, Any] | None) -> StructuredParams | None:
        """``value``, which may be a mapping with the same fields."""
        if value is None or isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping):
            reject("structured", value, f"give StructuredParams, or a mapping with {', '.join(known)}")
        for key in value:
            if key not in known:
                raise ValueError(f"structured has the unknown key {key!r}; known are {', '.join(known)}")
        return cls(**value)


def tool_name(index: int, tool: Any) -> str:
    """The name of an OpenAI-style function definition.

    Raises:
        ValueError: it is none; the message says which and why.
    """
    if not isinstance(tool, Mapping):
        reject(f"tools[{index}]", tool, 'give {"type": "function", "function": {"name": ..., "parameters": ...}}')
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        reject(f"tools[{index}]", tool, 'only {"type": "function", "function": {...}} is known')
    name = function.get("name")
    if not isinstance(name, str) or not name:
        reject(f"tools[{index}].function.name", name, "give a non-empty string")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        reject(f"tools[{index}].function.parameters", function["parameters"], "give a JSON schema")
    return name


def _schema_text(schema: Any) -> str | None:
    """JSON text, with the keys in the order given: the output's keys follow it."""
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json_schema is no JSON: {error}") from error
    if not isinstance(schema, Mapping):
        reject("json_schema", schema, "give a JSON schema as a dict or as JSON text")
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema cannot be written as JSON: {error}") from error
