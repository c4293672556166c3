"""Tools, tool choices and response formats, in the one form that the engine reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from typing_extensions import is_typeddict

from foreword import StructuredParams, validate_structured

JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ANY_OBJECT: dict[str, Any] = {"type": "object"}
CHOICES = ("auto", "none", "any", "required")
_FORMS = (
    'give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}, {"type": "json_object"}, '
    "a Pydantic class, a TypedDict or a JSON schema"
)


def openai_tools(tools: Sequence[Any] | None, *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Definitions of `tools`, each once: functions, Pydantic classes, `BaseTool`s, TypedDicts and dicts.

    Raises:
        ValueError: one of them is no tool, or two different ones have one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for tool in tools or ():
        definition = tool if _is_definition(tool) and strict is None else convert_to_openai_tool(tool, strict=strict)
        definition = _with_cache_point(definition, tool)
        if not _is_definition(definition):
            kind = definition.get("type")
            raise ValueError(f"the tool {tool!r} is of type {kind!r}, which no model here runs: give a function")
        name = definition["function"].get("name")
        first = found.setdefault(name, definition)
        if first is not definition and _untitled(first) != _untitled(definition):
            raise ValueError(f"two tools have the name {name!r}: give each its own")
    return list(found.values())


def _with_cache_point(definition: dict[str, Any], tool: Any) -> dict[str, Any]:
    """Conversions drop it: the ``cache_control`` of a definition, wherever it stands in it."""
    if not isinstance(tool, Mapping):
        return definition
    inner = tool.get("function")
    point = tool.get("cache_control") or (inner.get("cache_control") if isinstance(inner, Mapping) else None)
    if point is None or definition.get("cache_control") is not None:
        return definition
    function = {name: value for name, value in definition["function"].items() if name != "cache_control"}
    return {**definition, "function": function, "cache_control": point}


def _untitled(schema: Any) -> Any:
    """A schema without titles, which conversions keep or drop."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def _is_definition(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function" and isinstance(tool.get("function"), Mapping)


def chosen_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """A `tool_choice` in the engine's words: "auto", "none", "any" or a tool's name.

    Raises:
        ValueError: it is none of LangChain's forms, or `True` where there is not exactly one tool.
    """
    if choice is None or choice is False:
        return "auto"
    if choice is True:
        if len(tools) != 1:
            raise ValueError(
                f"tool_choice=True means the only tool, but there are {len(tools)}: give 'any' or a tool's name"
            )
        return str(tools[0]["function"]["name"])
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        choice = name if isinstance(name, str) else choice.get("type")
    if not isinstance(choice, str):
        forms = ", ".join(repr(word) for word in CHOICES)
        raise ValueError(
            f"tool_choice={choice!r}: give {forms}, True, a tool's name, or "
            '{"type": "function", "function": {"name": ...}}'
        )
    return choice


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a Pydantic class (v1 or v2), TypedDict, dataclass, JSON schema or function definition.

    Raises:
        ValueError: it is nothing of the kind.
    """
    if isinstance(schema, Mapping):
        return _schema_in(schema)
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        cls: Any = schema
        found: dict[str, Any] = cls.model_json_schema() if hasattr(cls, "model_json_schema") else cls.schema()
        return found
    if is_typeddict(schema):
        return convert_to_json_schema(schema)
    if isinstance(schema, type) and dataclasses.is_dataclass(schema):
        from pydantic import TypeAdapter

        return TypeAdapter(schema).json_schema()
    raise ValueError(f"{schema!r} has no JSON schema: give a Pydantic class, a TypedDict, a dataclass or a JSON schema")


def _schema_in(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema inside a function definition or response format of OpenAI's or Anthropic's; else the mapping."""
    wrapped = schema.get("json_schema") if schema.get("type") == "json_schema" else schema
    function = wrapped.get("function", wrapped) if isinstance(wrapped, Mapping) else schema
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        for key in ("parameters", "input_schema", "schema"):
            if isinstance(function.get(key), Mapping):
                return dict(function[key])
        if "properties" not in function and "type" not in function:
            return ANY_OBJECT | {"properties": {}}  # a function without parameters
    return dict(schema)


def schema_name(schema: Any) -> str:
    """What to call the schema in a `response_format`."""
    if isinstance(schema, Mapping):
        function = schema.get("function", schema)
        name = function.get("name") if isinstance(function, Mapping) else None
        return str(name or schema.get("title") or "answer") if not isinstance(name, Mapping) else "answer"
    return str(getattr(schema, "__name__", "answer"))


def wanted_schema(response_format: Any) -> dict[str, Any] | None:
    """The JSON schema that a `response_format` asks for; None for plain text.

    Raises:
        ValueError: it is no response format.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        return json_schema(response_format)
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is None:
            raise ValueError(f"response_format={response_format!r} holds no schema: {_FORMS}")
        return json_schema(schema)
    if not response_format:
        raise ValueError(f"response_format is empty: {_FORMS}")
    schema = json_schema(response_format)
    kind = schema.get("type")
    if isinstance(kind, str) and kind not in JSON_TYPES:
        near = max(("json_object", "json_schema"), key=lambda known: SequenceMatcher(None, kind, known).ratio())
        meant = f"did you mean {near!r}? " if "json" in kind.lower() else ""
        raise ValueError(f"response_format has the unknown type {kind!r}: {meant}{_FORMS}")
    return schema


def bound_options(tools: Sequence[Any], choice: Any, strict: bool | None, response_format: Any) -> dict[str, Any]:
    """The arguments of `bind_tools` as options of a call, converted once and checked as far as goes without an engine.

    Raises:
        ValueError: a schema uses a keyword that cannot be honoured, or `choice` names no tool; the message says which.
    """
    definitions = openai_tools(tools, strict=strict)
    chosen = chosen_tool(choice, definitions)
    schema = wanted_schema(response_format)
    if definitions or schema is not None:
        validate_structured(
            StructuredParams(tools=tuple(definitions) or None, tool_choice=chosen, json_schema=schema),
        )
    elif chosen not in ("auto", "none"):
        raise ValueError(f"tool_choice={choice!r}, but there are no tools to choose from: give tools")
    options: dict[str, Any] = {"tools": definitions, "tool_choice": chosen} if definitions else {}
    if schema is not None:
        inner = {"name": _format_name(response_format), "schema": schema}
        options["response_format"] = {"type": "json_schema", "json_schema": inner}
    return options


def _format_name(response_format: Any) -> str:
    inner = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    return str(inner["name"]) if isinstance(inner, Mapping) and inner.get("name") else schema_name(response_format)
